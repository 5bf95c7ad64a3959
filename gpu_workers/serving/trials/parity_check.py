"""A comparison of the engine's log-probabilities with the trainer's: the last step before an adapter may be served."""

import asyncio
import logging
from pathlib import Path

import msgspec

from apps.contracts.parity import PARITY_FILE, EngineScores, ParityProbe, ParityResult, compare
from gpu_workers.engine.client import EngineClient, EngineRefused

log = logging.getLogger("anneal.serving")


class Uncertifiable(Exception):
    """The adapter is permanently at fault; the message is for its owner."""


class CannotSay(Exception):
    """This engine has a problem, so it allows no verdict on the adapter now."""


async def measure(engine: EngineClient, folder: Path, *, lora_name: str, base_name: str) -> ParityResult | None:
    """Score the rows of the adapter's probe with and without it; None for an adapter without a probe.

    Raises Uncertifiable, CannotSay or EngineDown.
    """
    probe = await asyncio.to_thread(_read_probe, folder)
    if probe is None:
        return None
    try:
        result = await _score(engine, probe, lora_name, base_name)
    except EngineRefused as refusal:
        log.warning("%s could not be certified: %s", lora_name, refusal)
        if refusal.is_busy:
            raise CannotSay("The engine could not score the adapter's rows now.") from refusal
        raise Uncertifiable("The engine refuses the adapter's parity rows.") from refusal
    log.info("%s: %s", lora_name, msgspec.json.encode(result).decode())
    if not result.base_difference <= result.tolerance:
        raise CannotSay(
            f"This replica's base model differs from the trainer's by {result.base_difference:.3f} nats a token."
        )
    return result


async def _score(engine: EngineClient, probe: ParityProbe, lora_name: str, base_name: str) -> ParityResult:
    longest = next((m.max_model_len for m in await engine.list_models() if m.id == base_name), None)
    if longest is not None:
        probe = probe.cut_to(longest - 1)  # the request adds one token
    scores = [
        EngineScores(
            tuned=await engine.score_tokens(lora_name, row.token_ids),
            base=await engine.score_tokens(base_name, row.token_ids),
        )
        for row in probe.rows
    ]
    is_template_equal = None
    if probe.chat is not None:
        written = await engine.tokenize_chat(lora_name, probe.chat.messages)
        is_template_equal = written == list(probe.chat.token_ids)
    version = await engine.get_version()
    return compare(probe, scores, is_template_equal=is_template_equal, engine=f"vllm {version}")


def _read_probe(folder: Path) -> ParityProbe | None:
    try:
        return msgspec.json.decode((folder / PARITY_FILE).read_bytes(), type=ParityProbe).bounded()
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Uncertifiable("The adapter's parity rows cannot be read.") from error
