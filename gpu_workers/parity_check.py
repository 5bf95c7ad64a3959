"""Hold an engine's numbers against the trainer's: the last step before an adapter may answer customers."""

from pathlib import Path

import msgspec

from apps.contracts.parity import PARITY_FILE, EngineScores, ParityProbe, ParityResult, compare
from gpu_workers.engine_client import EngineClient


class UnreadableProbe(Exception):
    """The file is no probe: the adapter is not what a trainer of ours delivers."""


class BaseDiffers(Exception):
    """The engine's base model gives other numbers than the trainer's: nothing can be said of an adapter here."""


def read_probe(folder: Path) -> ParityProbe | None:
    """Return the probe among an adapter's checked files, None where there is none; raises UnreadableProbe."""
    try:
        return msgspec.json.decode((folder / PARITY_FILE).read_bytes(), type=ParityProbe)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnreadableProbe(str(error)) from error


async def measure(engine: EngineClient, probe: ParityProbe, *, lora_name: str, base_name: str) -> ParityResult:
    """Score the probe's rows with and without the adapter; raises EngineRefused, EngineDown or BaseDiffers."""
    longest = next((m.max_model_len for m in await engine.list_models() if m.id == base_name), None)
    if longest is not None:
        probe = probe.cut_to(longest - 1)  # one more token is asked for
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
    result = compare(probe, scores, is_template_equal=is_template_equal, engine=f"vllm {version}")
    if not result.base_difference <= probe.tolerance:
        raise BaseDiffers(f"{result.base_difference:.3f} nats on average where {probe.tolerance:g} are allowed")
    return result
