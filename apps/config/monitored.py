"""What a server of pages says to probes and monitors: that it answers, and how its requests went."""

import hmac
import time
from bisect import bisect_left
from itertools import accumulate

from apps.core.http.asgi import Application, Message, Receive, Scope, Send
from apps.serving.metrics import CONTENT_TYPE, format_series, metrics_token

HEALTH_PATH, METRICS_PATH = "/healthz", "/metrics"
_BOUNDS = (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)  # seconds
_NAME = "anneal_http_request_seconds"


class Monitored:
    """ASGI layer around all others. It counts requests by their status and by the seconds until their answer begins.

    No limit counts /healthz, and it asks no database: one that is away must not end or hide all processes at once. To a
    caller without the monitor's token, /metrics is a path like any other.
    """

    def __init__(self, application: Application, *, process: str) -> None:
        self._application, self._process = application, process
        self._counts: dict[str, list[int]] = {}  # by the class of the status: of each bucket
        self._seconds: dict[str, float] = {}
        self._open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._application(scope, receive, send)
        elif scope["path"] == HEALTH_PATH:
            await _answer(send, "application/json", '{"status":"ok"}')
        elif scope["path"] == METRICS_PATH and _is_monitor(scope):
            await _answer(send, CONTENT_TYPE, self.render())
        else:
            await self._measure(scope, receive, send)

    async def _measure(self, scope: Scope, receive: Receive, send: Send) -> None:
        began_at = time.perf_counter()

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._count(f"{message['status'] // 100}xx", time.perf_counter() - began_at)
            await send(message)

        self._open += 1
        try:
            await self._application(scope, receive, answer)
        finally:
            self._open -= 1

    def _count(self, status: str, seconds: float) -> None:
        counts = self._counts.setdefault(status, [0] * (len(_BOUNDS) + 1))
        counts[bisect_left(_BOUNDS, seconds)] += 1
        self._seconds[status] = self._seconds.get(status, 0.0) + seconds

    def render(self) -> str:
        """Return the series of this process in Prometheus' text format."""
        lines = [f"# HELP {_NAME} Seconds until an answer begins.", f"# TYPE {_NAME} histogram"]
        for status, counts in sorted(self._counts.items()):
            labels = f'process="{self._process}",status="{status}"'
            sums = list(accumulate(counts))
            for bound, count in zip([*_BOUNDS, "+Inf"], sums, strict=True):
                lines.append(f'{_NAME}_bucket{{{labels},le="{bound}"}} {count}')
            lines += [f"{_NAME}_sum{{{labels}}} {self._seconds[status]:.6f}", f"{_NAME}_count{{{labels}}} {sums[-1]}"]
        words, own = "Requests whose answer has not ended, live pages included.", {"process": self._process}
        return "\n".join(lines) + "\n" + format_series("anneal_http_open_requests", "gauge", words, [(own, self._open)])


def _is_monitor(scope: Scope) -> bool:
    given = dict(scope["headers"]).get(b"authorization", b"")
    return hmac.compare_digest(given, f"Bearer {metrics_token()}".encode())


async def _answer(send: Send, content_type: str, body: str) -> None:
    headers = [(b"content-type", content_type.encode()), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body.encode()})
