"""The load of the engine, for the control plane's pages: its counters and the memory of its processes."""

import re
import time
from pathlib import Path

from apps.contracts.serving import EngineLoad
from gpu_workers.common.process_tree import is_alive, list_descendants
from gpu_workers.engine.state import EngineState

_SAMPLE = re.compile(r"^vllm:(\w+)\{[^}]*\} ([0-9.eE+-]+)$", re.MULTILINE)
_TOKENS = ("prompt_tokens_total", "generation_tokens_total")


class LoadMeter:
    """Turns counters into rates, inside one event loop."""

    def __init__(self) -> None:
        self._generation = ""
        self._tokens = 0.0
        self._read_at = 0.0
        self._starts = 0

    def read(
        self, metrics: str, state: EngineState, *, cached_adapters: int, waiting: int, disk_bytes: int
    ) -> EngineLoad:
        """Return the load from the engine's /metrics text; `waiting` counts requests that wait for an adapter slot."""
        sums = sum_samples(metrics)
        now, tokens = time.monotonic(), sum(sums.get(name, 0.0) for name in _TOKENS)
        is_same = state.generation == self._generation
        rate = (tokens - self._tokens) / (now - self._read_at) if is_same and now > self._read_at else 0.0
        if not is_same:
            self._starts += 1
        self._generation, self._tokens, self._read_at = state.generation, tokens, now
        return EngineLoad(
            memory_bytes=measure_memory(state),
            cached_adapters=cached_adapters,
            running=int(sums.get("num_requests_running", 0)),
            waiting=int(sums.get("num_requests_waiting", 0)) + waiting,
            tokens_per_second=round(max(0.0, rate), 2),
            kv_cache_share=round(sums.get("kv_cache_usage_perc", 0.0), 4),
            restarts=self._starts - 1,
            disk_bytes=disk_bytes,
        )


def sum_samples(metrics: str) -> dict[str, float]:
    """Return each of vLLM's series summed over its labels.

    Labels are dropped, because some name other tenants' adapters.
    """
    sums: dict[str, float] = {}
    for name, value in _SAMPLE.findall(metrics):
        sums[name] = sums.get(name, 0.0) + float(value)
    return sums


def measure_memory(state: EngineState) -> int:
    """Return the resident bytes of all processes of the engine; 0 if they are not visible from here."""
    if not is_alive(state.launcher):
        return 0
    return sum(_resident_bytes(process.pid) for process in list_descendants(state.launcher.pid))


def _resident_bytes(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    found = re.search(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0
