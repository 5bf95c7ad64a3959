"""The public origin of an installation without a proxy: inference goes to the gateway, the rest to Django."""

import asyncio
from collections.abc import Collection

from apps.core.errors import Unavailable
from apps.core.http.asgi import Application, Receive, Scope, Send, allow_origins
from apps.core.http.body_limits import LimitBodies
from apps.core.messages import tracing
from apps.interfaces.web.edge.busy_process import BusyProcess
from apps.interfaces.web.edge.passing import PassThrough
from apps.interfaces.web.edge.request_limits import LimitRequests, WebLimits

INFERENCE_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"})


class FrontDoor:
    """ASGI application of the web process. `busy` runs the views of heavy users."""

    def __init__(
        self,
        django_application: Application,
        *,
        gateway_url: str,
        limits: WebLimits,
        busy: BusyProcess | None = None,
        origins: Collection[str] = (),
    ) -> None:
        self._busy = busy
        self._django = allow_origins(LimitRequests(django_application, limits, busy=busy), origins)
        self._gateway = PassThrough(
            gateway_url,
            unavailable=Unavailable("The inference gateway is not available. Try again in a moment."),
            dropped=[b"host", b"cookie"],  # cookies belong to the dashboard
        )
        # The gateway names the origin in its own answers. These are the refusals of this process.
        self._inference = allow_origins(LimitBodies(self._gateway), origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif is_inference(scope):
            await self._inference(scope, receive, send)
        else:
            await self._django(scope, receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        if self._busy:
            await self._busy.start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await asyncio.to_thread(tracing.stop)
        await self._gateway.close()
        if self._busy:
            await self._busy.end()
        await send({"type": "lifespan.shutdown.complete"})


def is_inference(scope: Scope) -> bool:
    return scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in INFERENCE_PATHS
