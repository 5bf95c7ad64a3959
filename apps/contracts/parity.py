"""The parity certificate: fixed rows with the trainer's log-probabilities, compared with a serving engine's.

The probe is a file of the adapter (`parity.json`), so it is hashed and immutable with the weights it describes. An
engine that loads the adapter scores the same tokens; only an adapter with matching numbers may answer customers.
"""

import math
from collections.abc import Sequence

import msgspec

from apps.contracts.struct import Struct

PARITY_FILE = "parity.json"
MAX_PARITY_BYTES = 4 * 2**20
# What a shared engine is asked for an adapter. Its other tenants wait meanwhile.
MAX_ROWS, MAX_ROW_TOKENS, MAX_CHAT_CHARACTERS = 8, 2_100, 32_000

# Mean over tokens of |difference| in nats. Measured with vLLM on a CPU against PEFT, both in bfloat16: see the figures
# in tests/engines/serving/one_replica/test_1_certificates.py.
TOLERANCE = 0.05
# Below this, an adapter cannot be distinguished from its base: a zero adapter gives exactly 0.
MIN_EFFECT = 1e-3


class ParityRow(Struct, frozen=True, kw_only=True):
    """Token ids, and the log-probability of every token but the first under the tuned and the base model."""

    token_ids: tuple[int, ...]
    tuned: tuple[float, ...]
    base: tuple[float, ...]


class ParityChat(Struct, frozen=True, kw_only=True):
    """Messages and the tokens they must become; this pins the chat template as served."""

    messages: tuple[dict[str, str], ...]
    token_ids: tuple[int, ...]

    @property
    def characters(self) -> int:
        return sum(len(text) for message in self.messages for text in message.values())


class ParityProbe(Struct, frozen=True, kw_only=True):
    rows: tuple[ParityRow, ...]
    chat: ParityChat | None = None
    chat_template_sha256: str = ""
    dtype: str = ""
    tolerance: float = TOLERANCE
    software: dict[str, str] = {}

    def bounded(self) -> "ParityProbe":
        """Return the probe with no more than a shared engine is asked: its first rows, and no long chat."""
        is_long = self.chat is not None and self.chat.characters > MAX_CHAT_CHARACTERS
        few = msgspec.structs.replace(self, rows=self.rows[:MAX_ROWS], chat=None if is_long else self.chat)
        return few.cut_to(MAX_ROW_TOKENS)

    def cut_to(self, most_tokens: int) -> "ParityProbe":
        """Return the probe with each row cut to the engine's maximum length."""
        rows = tuple(
            ParityRow(
                token_ids=row.token_ids[:most_tokens],
                tuned=row.tuned[: most_tokens - 1],
                base=row.base[: most_tokens - 1],
            )
            for row in self.rows
        )
        return msgspec.structs.replace(self, rows=rows)


class ParityResult(Struct, frozen=True, kw_only=True):
    """The measurements of one engine. Differences are means over tokens, in nats."""

    tokens: int
    tuned_difference: float  # engine against trainer, with the adapter
    base_difference: float  # the same without it: the noise between two implementations
    largest_difference: float
    effect: float  # adapter against base, by the engine
    tolerance: float
    is_template_equal: bool | None = None  # None: the rows contain no chat to test it with
    engine: str = ""


class EngineScores(Struct, frozen=True, kw_only=True):
    """An engine's log-probabilities of one row's tokens, without the first."""

    tuned: tuple[float, ...]
    base: tuple[float, ...]


def compare(
    probe: ParityProbe, scores: Sequence[EngineScores], *, is_template_equal: bool | None, engine: str
) -> ParityResult:
    """Return how far the engine's numbers are from the trainer's. A probe may narrow the tolerance, never widen it."""
    rows = list(zip(probe.rows, scores, strict=True))
    tuned = [abs(mine - theirs) for row, seen in rows for mine, theirs in zip(row.tuned, seen.tuned, strict=True)]
    base = [abs(mine - theirs) for row, seen in rows for mine, theirs in zip(row.base, seen.base, strict=True)]
    effect = [abs(one - other) for seen in scores for one, other in zip(seen.tuned, seen.base, strict=True)]
    return ParityResult(
        tokens=len(tuned),
        tuned_difference=_mean(tuned),
        base_difference=_mean(base),
        largest_difference=max(tuned),
        effect=_mean(effect),
        tolerance=min(probe.tolerance, TOLERANCE),
        is_template_equal=is_template_equal,
        engine=engine,
    )


def problem_of(result: ParityResult) -> str:
    """Return why the engine's numbers do not certify the adapter; "" when they do."""
    if not all(math.isfinite(value) for value in (result.tuned_difference, result.effect)):
        return "The adapter gives invalid numbers."
    if result.effect < MIN_EFFECT:
        return "The adapter answers exactly as the base model does."
    allowed = min(result.tolerance, max(result.effect / 2, 2 * result.base_difference))
    if result.tuned_difference > allowed:
        return (
            f"The engine's log-probabilities differ from the trainer's by {result.tuned_difference:.3g} on average; "
            f"{allowed:.3g} is allowed: these are not the weights that were trained."
        )
    if result.is_template_equal is False:
        return "The engine writes chats with another template than the one trained with."
    return ""


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan
