"""The tokens that an engine read and wrote for customers, by its own counters. They check the gateways' meters.

The counters distinguish neither customers nor adapters, and include the agent's own questions. The agent counts its
questions separately, and keeps that count on disk because the engine outlives the agent.
"""

import time

import msgspec

from apps.contracts.serving import EngineCount
from gpu_workers.common.files import PRIVATE, replace_file
from gpu_workers.engine.client import EngineClient, TokensAsked
from gpu_workers.engine.load import sum_samples
from gpu_workers.engine.state import EnginePaths, EngineState, read_engine_state

INPUT, OUTPUT = "prompt_tokens_total", "generation_tokens_total"


class _Kept(msgspec.Struct, frozen=True):
    """`asked.json`: the agent's own questions to one start of the engine."""

    generation: str = ""
    asked: TokensAsked = TokensAsked()


class TokenCounter:
    """Reads one engine's counters, inside one event loop."""

    def __init__(self, paths: EnginePaths) -> None:
        self._paths = paths
        self._path = paths.work_dir / "asked.json"
        try:
            self._kept = msgspec.json.decode(self._path.read_bytes(), type=_Kept)
        except FileNotFoundError:
            self._kept = _Kept()
        self._seen: EngineCount | None = None
        self._seen_at = 0.0

    def record_asked(self, asked: TokensAsked) -> None:
        """Record the tokens of a question that the agent has just asked."""
        state = read_engine_state(self._paths)
        if state is not None:
            self._kept = _Kept(state.generation, self._asked_of(state) + asked)
            replace_file(self._path, msgspec.json.encode(self._kept), mode=PRIVATE)

    async def read(self, engine: EngineClient, state: EngineState) -> str:
        """Return the engine's /metrics text, and record its counts. Raises EngineDown, EngineRefused.

        While one of the agent's questions runs, it is unknown how much of it is already counted. So the last reading
        stays.
        """
        before, asked_at = engine.questions, time.monotonic()
        metrics = await engine.read_metrics()
        if before.is_settled and engine.questions == before:
            sums, own = sum_samples(metrics), self._asked_of(state)
            self._seen = EngineCount(
                input_tokens=max(0, int(sums.get(INPUT, 0.0)) - own.input_tokens),
                output_tokens=max(0, int(sums.get(OUTPUT, 0.0)) - own.output_tokens),
            )
            self._seen_at = asked_at
        return metrics

    def forget(self) -> None:
        """Report nothing until the counters of the next engine were read."""
        self._seen = None

    def seen(self) -> EngineCount | None:
        """Return the last reading with its age, for the control plane."""
        if self._seen is None:
            return None
        return msgspec.structs.replace(self._seen, age_seconds=time.monotonic() - self._seen_at)

    def _asked_of(self, state: EngineState) -> TokensAsked:
        return self._kept.asked if self._kept.generation == state.generation else TokensAsked()
