"""What another tenant notices of the fuzzing, and for how long the gateway's event loop stood still."""

import threading
import time
from typing import Any

import httpx

from tests.bench.neighbours.stage import Platform

_EVERY_SECONDS = 0.1
_HANG_SECONDS = 10.0
_ASKED = {"model": "none", "messages": [{"role": "user", "content": "Hi"}]}


class Monitor:
    """Asks the gateway for its stalls, and as a tenant of its own for a model that does not exist."""

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._times: list[float] = []
        self._failed = 0
        self._stall_ms = 0.0

    def __enter__(self) -> "Monitor":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        headers = {"Authorization": f"Bearer {self._platform.working.keys[0]}"}
        transport = httpx.HTTPTransport(uds=str(self._platform.home / "gateway.sock"))
        with httpx.Client(transport=transport, base_url="http://gateway", timeout=_HANG_SECONDS) as client:
            while not self._end.wait(_EVERY_SECONDS):
                began = time.perf_counter()
                try:
                    answer = client.post("/v1/chat/completions", json=_ASKED, headers=headers)
                    self._failed += answer.status_code != 404
                    stalls = client.get("/healthz").json()
                    self._stall_ms = max(self._stall_ms, stalls["longest_stall_of_last_minute_ms"])
                except (httpx.HTTPError, ValueError, KeyError):
                    self._failed += 1
                self._times.append((time.perf_counter() - began) * 1000)

    def summary(self) -> dict[str, Any]:
        times = sorted(self._times) or [0.0]
        return {
            "longest_stall_ms": round(self._stall_ms, 1),
            "neighbour_p99_ms": round(times[int(len(times) * 0.99)], 1),
            "neighbour_longest_ms": round(times[-1], 1),
            "neighbour_failed": self._failed,
        }
