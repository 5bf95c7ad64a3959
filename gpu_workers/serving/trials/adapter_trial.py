"""Tests of an adapter that an engine has just loaded, before any customer may use it there."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from apps.contracts.parity import ParityResult, problem_of
from gpu_workers.engine.client import Canary, EngineClient, EngineRefused
from gpu_workers.serving.trials.parity_check import CannotSay, Uncertifiable, measure

INVALID_NUMBERS = "The adapter gives invalid numbers."
NOT_LOADABLE = "The engine could not load the adapter."
NOT_LOADED_YET = "The engine could not load the adapter this time."
_MAX_REFUSALS = 3  # in a row: vLLM answers 500 to a bad adapter, and also if memory or file handles are short


class Verdict(msgspec.Struct, frozen=True):
    """The result. `reason` is "" if the adapter is good, or else says why it is bad.

    `parity` is None if nothing was measured.
    """

    reason: str = ""
    parity: ParityResult | None = None


class Refusals:
    """The loads that the engine refused since the last that worked, by adapter. A busy engine's do not count."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def is_final(self, name: str, refusal: EngineRefused) -> bool:
        """Count the refusal; return whether it is evidence against the adapter."""
        count = self._counts[name] = self._counts.get(name, 0) + (not refusal.is_busy)
        if count >= _MAX_REFUSALS:
            self.forget(name)
        return count >= _MAX_REFUSALS

    def forget(self, name: str) -> None:
        self._counts.pop(name, None)


async def try_adapter(
    engine: EngineClient,
    folder: Path,
    *,
    lora_name: str,
    base_name: str,
    base_canary: Canary | None,
    corrupted_before: int,
    require_same_engine: Callable[[], Awaitable[None]],
    known: ParityResult | None = None,
) -> Verdict:
    """Return whether the loaded adapter gives finite numbers that match its trainer's and differ from the base model's.

    `known` is the result for the same files on an earlier start of such an engine. It replaces the comparison with the
    trainer. `require_same_engine` raises EngineDown if the engine died meanwhile: its refusal is then no evidence
    against the adapter. Raises CannotSay if the test must be repeated later, and EngineDown.
    """
    try:
        canary = await engine.ask_canary(lora_name)
    except EngineRefused as refusal:
        await require_same_engine()
        if refusal.is_busy:
            raise CannotSay("The engine was too busy to try the adapter.") from refusal
        return Verdict(INVALID_NUMBERS)
    if not canary.is_finite():
        return Verdict(INVALID_NUMBERS)
    if base_canary is not None and not canary.differs_from(base_canary):
        return Verdict("The adapter answers exactly as the base model does.")
    try:
        result = known or await measure(engine, folder, lora_name=lora_name, base_name=base_name)
    except Uncertifiable as refusal:
        await require_same_engine()
        return Verdict(str(refusal))
    except CannotSay:
        await require_same_engine()
        raise
    reason = "" if result is None else problem_of(result)
    if not reason and await engine.count_corrupted_requests() > corrupted_before:
        reason = INVALID_NUMBERS
    return Verdict(reason, result)
