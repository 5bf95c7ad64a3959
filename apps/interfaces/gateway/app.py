"""The gateway process: OpenAI-compatible inference, without Django's request stack.

    uvicorn --factory apps.interfaces.gateway.app:create_app \\
        --http apps.interfaces.gateway.http.connections:GatewayConnection --uds run/gateway.sock

Django is set up for its ORM only. Threads read keys, routes and slices through the domain's own functions.
"""

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path

import django
from asgiref.sync import markcoroutinefunction

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "apps.config.settings.dev")  # noqa: TID251 - Django's own entry point
django.setup()

from django.conf import settings  # noqa: E402 - needs the settings
from starlette.applications import Starlette  # noqa: E402
from starlette.exceptions import HTTPException  # noqa: E402
from starlette.requests import Request  # noqa: E402
from starlette.responses import JSONResponse, Response  # noqa: E402
from starlette.routing import Route  # noqa: E402

from apps.contracts.struct import prepare_types  # noqa: E402
from apps.core.database.policies import refuse_unsafe_role  # noqa: E402
from apps.core.errors import DomainError, MethodNotAllowed  # noqa: E402
from apps.core.http.asgi import REQUEST_ID_HEADER, Application, Receive, Scope, Send, UnknownUrl, allow_origins  # noqa: E402
from apps.core.http.fair_shares import LateRefusals  # noqa: E402
from apps.core.http.garbage import spare_lasting_objects  # noqa: E402
from apps.core.ids import new_id  # noqa: E402
from apps.core.messages import tracing  # noqa: E402
from apps.interfaces.gateway.admission.key_invalidation import keep_listening  # noqa: E402
from apps.interfaces.gateway.admission.keys import Keys  # noqa: E402
from apps.interfaces.gateway.admission.limits import OpenRequests, Rates  # noqa: E402
from apps.interfaces.gateway.database import DATABASE_ERRORS, Database  # noqa: E402
from apps.interfaces.gateway.engines.faults import Faults  # noqa: E402
from apps.interfaces.gateway.engines.routes import Routes  # noqa: E402
from apps.interfaces.gateway.engines.upstreams import Upstreams  # noqa: E402
from apps.interfaces.gateway.http.bodies import Bodies  # noqa: E402
from apps.interfaces.gateway.metering.completions import CompletionRoom  # noqa: E402
from apps.interfaces.gateway.metering.recorder import Recorder  # noqa: E402
from apps.interfaces.gateway.metering.refused import RefusedRequests  # noqa: E402
from apps.interfaces.gateway.metering.shipper import keep_adopting  # noqa: E402
from apps.interfaces.gateway.metering.spending_slices import SpendingSlices  # noqa: E402
from apps.interfaces.gateway.metering.tickets import Metering  # noqa: E402
from apps.interfaces.gateway.requests.grammars import Grammars  # noqa: E402
from apps.interfaces.gateway.stalls import Stalls  # noqa: E402
from apps.interfaces.gateway.surfaces import embeddings  # noqa: E402
from apps.interfaces.gateway.surfaces.inference import SURFACES, Inference, Services, held_answers  # noqa: E402

logger = logging.getLogger(__name__)

_FLUSH_SECONDS = 10


def create_app() -> Application:
    """Return the ASGI application. It refuses to start under a database role that bypasses row-level security."""
    tracing.start("gateway")
    gateway = Gateway(spool_root=settings.HOME / "spool")
    services = gateway.services
    doors: dict[str, Application] = {path: Inference(services, surface) for path, surface in SURFACES.items()}
    doors[embeddings.PATH] = embeddings.Embeddings(services)
    others = Starlette(
        routes=[
            *(Route(path, door, methods=["POST"]) for path, door in doors.items()),
            Route("/healthz", gateway.health),
        ],
        lifespan=gateway.lifespan,
        exception_handlers={HTTPException: _refuse},
    )

    @markcoroutinefunction
    def application(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        # Inference goes straight to its handler. Routing and middleware cost as much as reading the request, and a
        # coroutine here would add a step to each resumption of every answer.
        door = doors.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        return (door or others)(scope, receive, send)

    return allow_origins(application, settings.API_ORIGINS)


class Gateway:
    """All parts of one gateway process, and the order in which they start and stop."""

    def __init__(self, *, spool_root: Path) -> None:
        name = new_id("gateway")
        self._spool_root = spool_root
        self._database = Database()
        self._keys = Keys(self._database)
        self._routes = Routes(self._database)
        self._spending_slices = SpendingSlices(self._database, name=name)
        self._completion_room = CompletionRoom(self._database)
        self._recorder = Recorder(
            spool_root,
            name=name,
            settled=self._spending_slices.record_settled,
            stored=self._completion_room.record_stored,
        )
        self._upstreams = Upstreams(places_per_replica=settings.REPLICA_PLACES, addresses=settings.REPLICA_ADDRESSES)
        self._grammars = Grammars()
        self._stalls = Stalls()
        metering = Metering(self._routes, self._spending_slices, self._recorder, Faults(self._database, self._routes))
        self._refused = RefusedRequests(self._routes, metering, self._recorder)
        self.services = Services(
            keys=self._keys,
            routes=self._routes,
            rates=Rates(),
            refusals=LateRefusals(),
            open_requests=OpenRequests(),
            metering=metering,
            refused=self._refused,
            upstreams=self._upstreams,
            spending_slices=self._spending_slices,
            bodies=Bodies(),
            answers=held_answers(),
            grammars=self._grammars,
            completion_room=self._completion_room,
            media_hosts=settings.MEDIA_HOSTS,
        )

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        await self._database.call(refuse_unsafe_role)
        await self._routes.refresh()
        await self._recorder.open()
        prepare_types()
        spare_lasting_objects()
        tasks = [
            asyncio.create_task(work)
            for work in (
                keep_listening(self._keys, self._database),
                self._routes.keep_fresh(),
                self._spending_slices.maintain(),
                self._stalls.watch(),
                self._refused.keep_recording(),
                keep_adopting(self._database, self._spool_root),
            )
        ]
        for task in tasks:
            task.add_done_callback(_stop_when_broken)
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._settle()

    async def _settle(self) -> None:
        """Ship the metered usage and return the unspent money.

        Usage not shipped in time stays on disk for the next process.
        """
        try:
            async with asyncio.timeout(_FLUSH_SECONDS):
                self._refused.record()
                await self._recorder.flush()
                await self._spending_slices.return_idle(at_once=True)
        except (TimeoutError, ConnectionError, *DATABASE_ERRORS) as error:
            logger.warning("stopping with %d requests on disk only: %r", self._recorder.waiting, error)
        await asyncio.to_thread(tracing.stop)
        self._upstreams.close()
        await self._grammars.close()
        await self._recorder.close()
        self._database.close()

    async def health(self, request: Request) -> Response:
        """Report whether requests can be metered, and the longest event-loop stalls.

        No request is admitted without metering.
        """
        is_well = self._recorder.has_room()
        body = {
            "status": "ok" if is_well else "spool is full",
            "requests_to_record": self._recorder.waiting,
            "longest_stall_ms": round(self._stalls.longest_seconds * 1000, 1),
            "longest_stall_of_last_minute_ms": round(self._stalls.longest_of_last_minute() * 1000, 1),
        }
        return JSONResponse(body, status_code=200 if is_well else 503)


def _stop_when_broken(task: "asyncio.Task[None]") -> None:
    """End the process when a bug ended one of its loops; the supervisor then starts a new one."""
    if not task.cancelled() and task.exception() is not None:
        logger.critical("a background task failed", exc_info=task.exception())
        os.kill(os.getpid(), signal.SIGTERM)


async def _refuse(request: Request, exception: Exception) -> Response:
    assert isinstance(exception, HTTPException)
    error: DomainError = MethodNotAllowed(f"{request.url.path} does not take {request.method}: use POST.")
    if exception.status_code == 404:
        error = UnknownUrl(f"Unknown request URL: {request.method} {request.url.path}.")
    headers = {REQUEST_ID_HEADER: new_id("req")} | dict(exception.headers or {})
    return JSONResponse(error.as_openai(), status_code=exception.status_code, headers=headers)
