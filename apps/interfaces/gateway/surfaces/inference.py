"""POST /v1/chat/completions, /v1/completions and /v1/responses, as plain ASGI.

A request is authenticated, limited, parsed, routed and paid for before the engine sees it. A customer gets the end of
an answer only after its usage is on disk. If a customer disconnects, the engine stops, and the customer pays for the
tokens it generated.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from apps.batches import signatures
from apps.billing.usage.metering import REPEATABLE_PREFIX
from apps.billing.usage.traffic import Refusal, refusal_of
from apps.core.errors import DomainError, RateLimited, Unavailable
from apps.core.http.asgi import MIB, ClientGone, Receive, Scope, Send, ServerFault, TooLarge
from apps.core.http.fair_shares import LateRefusals
from apps.core.ids import new_id
from apps.core.messages import tracing
from apps.interfaces.gateway.admission.keys import InferenceCaller, Keys
from apps.interfaces.gateway.admission.limits import OpenRequests, Rates
from apps.interfaces.gateway.engines.chunks import EngineChunk
from apps.interfaces.gateway.engines.meter import Meter
from apps.interfaces.gateway.engines.routes import Routes
from apps.interfaces.gateway.engines.traces import RequestPhase, begin_trace
from apps.interfaces.gateway.engines.upstreams import Call, CallProgress, EngineAnswer, Upstreams
from apps.interfaces.gateway.errors import AnswerTooLarge, EngineError, RequestFailed
from apps.interfaces.gateway.http.bodies import LARGE_BYTES, Bodies, tokens_unread
from apps.interfaces.gateway.http.client import Client
from apps.interfaces.gateway.http.held_bytes import HeldBytes, Holding
from apps.interfaces.gateway.metering.completions import CompletionRoom
from apps.interfaces.gateway.metering.refused import RefusedRequests
from apps.interfaces.gateway.metering.spending_slices import SpendingSlices
from apps.interfaces.gateway.metering.tickets import Metering, Ticket
from apps.interfaces.gateway.requests.engine_request import EngineRequest
from apps.interfaces.gateway.requests.grammars import Grammars, SchemaTooCostly
from apps.interfaces.gateway.requests.large_bodies import require_decodable
from apps.interfaces.gateway.requests.media import require_allowed
from apps.interfaces.gateway.requests.schema import parse_chat, parse_completion
from apps.interfaces.gateway.surfaces.answers import Assembler, Renderer
from apps.interfaces.gateway.surfaces.response_answers import ResponseRenderer
from apps.interfaces.gateway.surfaces.responses import as_sent, parse_response
from apps.interfaces.gateway.surfaces.stored_answers import CompletionTooLarge, Keeper
from apps.serving.queries import Route

logger = logging.getLogger(__name__)

_Chunks = list[EngineChunk]
_FREE = nullcontext()
_ANSWERS_OF_ONE, _ANSWERS_OF_ALL = 288 * MIB, 640 * MIB  # of organizations; the largest answer takes 260 MiB
# A batch's worker gives up an answer after ANSWER_SECONDS, and does not ask again. Its clock began before ours.
_LAST_BATCHED_SECONDS = 0.8 * signatures.ANSWER_SECONDS


@dataclass(frozen=True)
class Services:
    """Objects shared by all routes."""

    keys: Keys
    routes: Routes
    rates: Rates
    refusals: LateRefusals
    open_requests: OpenRequests
    metering: Metering
    refused: RefusedRequests
    upstreams: Upstreams
    spending_slices: SpendingSlices
    bodies: Bodies
    answers: HeldBytes
    grammars: Grammars
    completion_room: CompletionRoom
    media_hosts: frozenset[str]  # hosts from which the engines may fetch images and audio

    async def wait_to_refuse(
        self, error: DomainError, caller: InferenceCaller | None, client: Client, progress: CallProgress
    ) -> None:
        """Count the refused request.

        Then wait if the organization often exceeds its limits, or if the address often sends wrong keys.
        """
        if caller is None:
            await self.refusals.wait(f"address {client.address()}")
            return
        if not progress.is_metered and error.code != signatures.BUSY_CODE:
            self.refused.count(caller, progress.model_name, refusal_of(error))
        if isinstance(error, RateLimited | TooLarge):
            await self.refusals.wait(caller.share_holder)


class AnswerRenderer(Protocol):
    """Writes answers for the customer."""

    def opening(self) -> bytes: ...
    def event(self, chunk: EngineChunk) -> bytes: ...
    def closing(self, meter: Meter) -> bytes: ...
    def whole(self, assembler: Assembler, meter: Meter) -> bytes: ...


@dataclass(frozen=True)
class Surface:
    """One public route: its parser, its path on the engine, and its renderer of answers."""

    parse: Callable[[bytes], EngineRequest]
    engine_path: str
    renderer: Callable[[str, str, EngineRequest], AnswerRenderer]  # ulid, model name
    as_sent: Callable[[DomainError], DomainError] = lambda error: error  # gives an error this route's field names


def _chat(ulid: str, model_name: str, request: EngineRequest) -> AnswerRenderer:
    wants = request.wants_usage
    return Renderer(f"chatcmpl-{ulid}", int(time.time()), model_name, is_chat=True, wants_usage=wants)


def _completion(ulid: str, model_name: str, request: EngineRequest) -> AnswerRenderer:
    wants = request.wants_usage
    return Renderer(f"cmpl-{ulid}", int(time.time()), model_name, is_chat=False, wants_usage=wants)


def _response(ulid: str, model_name: str, request: EngineRequest) -> AnswerRenderer:
    return ResponseRenderer(ulid, int(time.time()), model_name, request.echoed)


SURFACES = {
    "/v1/chat/completions": Surface(parse_chat, "/v1/chat/completions", _chat),
    "/v1/completions": Surface(parse_completion, "/v1/completions", _completion),
    "/v1/responses": Surface(parse_response, "/v1/chat/completions", _response, as_sent),
}


class Inference:
    """One inference route, as plain ASGI."""

    def __init__(self, services: Services, surface: Surface) -> None:
        self._services = services
        self._surface = surface

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client, services = Client(scope), self._services
        caller: InferenceCaller | None = None
        progress = CallProgress()
        if tracing.is_on():
            sent, request_id = client.traceparent, client.request_id
            progress.trace = begin_trace(scope["path"], request_id=request_id, sent=sent)
        try:
            caller = await services.keys.identify(client.authorization, client.address, client.project)
            if client.batch_key_id:
                caller = await services.keys.for_key(caller, client.batch_key_id)
            progress.trace.annotate({"anneal.organization.id": caller.organization_id})
            client.limit_headers = lambda: services.rates.headers(caller.limits)
            services.rates.take_request(caller.limits)
            services.rates.require_few_wasted(caller.limits)
            services.spending_slices.require_credit(caller.organization_id, caller.key_id)
            body = services.bodies.holding(caller.share_holder)
            with services.open_requests.one_more(caller.limits), body, client.watch():
                await services.rates.wait_turn(caller.limits)
                await self._serve(caller, client, body.count, progress)
        except DomainError as error:
            if client.is_batched and isinstance(error, Unavailable) and not progress.is_sent:
                error.code = signatures.BUSY_CODE
            progress.trace.refuse(error.code, int(error.status))
            await services.wait_to_refuse(error, caller, client, progress)
            await client.refuse(self._surface.as_sent(error))
        except ClientGone:
            progress.trace.annotate({"error.type": "client_gone"})
        except Exception:
            progress.trace.refuse(ServerFault.code, int(ServerFault.status))
            logger.exception("request %s failed", client.request_id)
            if caller and not progress.is_metered:
                services.refused.count(caller, progress.model_name, Refusal.ERROR)
            await client.refuse(ServerFault("The server had an error while processing your request."))
        finally:
            progress.trace.end()

    async def _serve(
        self, caller: InferenceCaller, client: Client, count: Callable[[int], None], progress: CallProgress
    ) -> None:
        """Read the request and answer it within the limit of tokens per minute.

        A body counts before it is parsed. A request that an engine has seen always counts.
        """
        rates = self._services.rates
        request, taken = await self._read(caller, client, count)
        progress.model_name = request.model_name
        used, meter, estimate = taken, Meter(request.choice_count), request.tokens_estimate()
        rates.take_all_tokens(caller.limits, estimate, taken=taken)
        try:
            with self._services.open_requests.one_more_structured(caller.limits) if request.is_structured else _FREE:
                await self._answer(caller, request, meter, client, progress)
        except (SchemaTooCostly, RequestFailed):
            rates.record_failure(caller.limits)
            raise
        except asyncio.CancelledError:
            if progress.is_sent and not meter.output_tokens:
                rates.record_abandoned(caller.limits, request.prompt_tokens_estimate())
            raise
        finally:
            if progress.is_sent:
                used = meter.input_tokens + meter.output_tokens or request.prompt_tokens_estimate()
            rates.correct(caller.limits, taken=estimate, used=used)

    async def _read(
        self, caller: InferenceCaller, client: Client, count: Callable[[int], None]
    ) -> tuple[EngineRequest, int]:
        """Return the request and the number of tokens charged for its body.

        If its length is known, they are charged before it is read. A large body is parsed in a thread. It counts as
        held until the request ends, because the parsed request and the engine's are as large.
        """
        services, parse = self._services, self._surface.parse
        taken = tokens_unread(client.declared_bytes)
        services.rates.take_tokens(caller.limits, taken)
        raw = await client.read_body(most_bytes=services.routes.largest_body_bytes, count=count)
        is_large = len(raw) > LARGE_BYTES
        count(len(raw) if is_large else 0)
        undeclared = tokens_unread(len(raw)) - taken
        if undeclared > 0:
            services.rates.take_tokens(caller.limits, undeclared)
            taken += undeclared
        if is_large:
            return await services.bodies.parse_aside(caller.share_holder, partial(_parse_large, parse), raw), taken
        return parse(raw), taken

    async def _require_room(self, caller: InferenceCaller, request: EngineRequest, route: Route) -> None:
        """Check the other needs of the request: places, room for its answer here and in storage, media, schemas."""
        request.require_few_sequences(self._services.upstreams.turns.most_at_once)
        request.require_answer_fits(route.context_length)
        if request.media:
            require_allowed(request.media, taken=route.media, hosts=self._services.media_hosts)
        if request.schemas:
            await self._services.grammars.require(caller.share_holder, request.schemas)
        if request.stored:
            await self._services.completion_room.require(caller.organization_id)

    async def _find_route(
        self, caller: InferenceCaller, request: EngineRequest, client: Client, progress: CallProgress
    ) -> tuple[Route, bool]:
        """Return the route of the request once a replica can answer it, and whether one could at once."""
        routes = self._services.routes
        model_name = routes.resolve_alias(request.model_name, caller=caller)
        known = routes.known(model_name, caller=caller)
        if known is not None:
            await self._require_room(caller, request, known)
            known = routes.known(model_name, caller=caller)  # as it is now
        is_ready = known is not None and bool(known.upstreams)
        if not is_ready:  # it may start a replica, take the place of another adapter, or copy a checkpoint
            await self._services.metering.require_affordable(caller, known, request, is_batched=client.is_batched)
            progress.trace.enter(RequestPhase.REPLICA)
        route = await routes.find(model_name, caller=caller)
        if not is_ready:
            progress.trace.enter(RequestPhase.ADMISSION)
        progress.trace.annotate({"gen_ai.request.model": route.model_name})
        if known is None:
            await self._require_room(caller, request, route)
        return route, is_ready

    async def _answer(
        self, caller: InferenceCaller, request: EngineRequest, meter: Meter, client: Client, progress: CallProgress
    ) -> None:
        routes, began = self._services.routes, time.monotonic()
        route, is_ready = await self._find_route(caller, request, client, progress)
        request = request.with_limit(route.context_length)
        ulid, upstreams = client.ulid, self._services.upstreams
        usage_id, charged_id = f"use_{ulid}", ""
        if client.is_batched:  # its sender may repeat it, and pays for one whole answer
            try:
                replica_ids = [each.replica_id for each in route.upstreams]
                upstreams.turns.require_spare(caller.share_holder, replica_ids, request.sequence_count)
            except Unavailable:
                routes.count(route, caller=caller)  # the batch is paid for, and asks again
                raise
            usage_id, charged_id = new_id("use"), f"{REPEATABLE_PREFIX}{ulid}"
        ticket = await self._services.metering.admit(
            caller, route, request, meter, usage_id=usage_id, charged_id=charged_id
        )
        progress.is_metered = True
        if is_ready:  # what waited was counted, so that a replica has it
            routes.count(route, caller=caller)
        renderer = self._surface.renderer(ulid, route.model_name, request)
        keeper = None
        if request.stored and isinstance(renderer, Renderer):
            keeper = Keeper(request.stored, renderer, caller, client.request_id)
        try:
            call = Call(
                caller.share_holder,
                self._surface.engine_path,
                request,
                caller.cache_salt,
                ulid,
                meter,
                progress,
                is_batched=client.is_batched,
            )
            answer = await upstreams.begin(route, call)
            try:
                ticket.record_first_token(answer.replica_id)
                progress.trace.record_first_token()
                deliver = _stream if request.is_streamed else _send_whole
                ending = AnswerEnding(ticket, keeper, self._services.completion_room)
                with self._services.answers.holding(caller.share_holder) as held:
                    chunks = _held(answer, request, meter, held) if request.is_held else answer
                    await deliver(chunks, ending, renderer, client)
                progress.trace.annotate({"http.response.status_code": 200})
            finally:
                upstreams.end(call, answer)
                progress.trace.record_usage(meter)
        except DomainError as error:
            _finish(ticket, progress, refusal_of(error), is_charged=isinstance(error, AnswerTooLarge))
            raise
        finally:
            # The task was cancelled, by a customer who left, too slow a reader, or a bug. The engine's output still
            # counts, except for a batch whose worker repeats the request: it does so unless it left after its time.
            is_last = client.is_gone and time.monotonic() - began > _LAST_BATCHED_SECONDS
            _finish(ticket, progress, "aborted", is_charged=is_last or not client.is_batched)


def _parse_large(parse: Callable[[bytes], EngineRequest], raw: bytes) -> EngineRequest:
    require_decodable(raw)
    return parse(raw)


def _finish(ticket: Ticket, progress: CallProgress, finish: str, *, is_charged: bool) -> None:
    if not ticket.is_finished:
        ticket.replica_id = progress.replica_id  # it may have counted tokens before the first that was seen
        ticket.finish(finish, is_charged=is_charged)


@dataclass(frozen=True)
class AnswerEnding:
    """The records that must be on disk before the customer gets the end of an answer."""

    ticket: Ticket
    keeper: Keeper | None
    room: CompletionRoom

    async def written(self) -> None:
        """Wait until the answer's usage, and the completion to store, are on the disk.

        If the customer leaves meanwhile, the wait ends but the write goes on. Raises EngineError if the write failed,
        and CompletionTooLarge, once the usage is written, for an answer that cannot be stored.
        """
        meter, completion, refused = self.ticket.meter, None, None
        try:
            completion = self.keeper.record(meter) if self.keeper else None
        except CompletionTooLarge as error:
            refused = error
        if completion:
            self.room.take(completion)
        if not await self.ticket.finish(meter.finish, completion=completion):
            raise EngineError("The answer could not be completed. Try the request again.")
        if refused:
            raise refused


def held_answers() -> HeldBytes:
    """Return the count of answers that this process holds until they are whole."""
    advice = "This answer is charged as far as it was written. Ask for less at a time, or stream answers."
    return HeldBytes("answers", most_of_one=_ANSWERS_OF_ONE, most_of_all=_ANSWERS_OF_ALL, advice=advice)


async def _held(answer: EngineAnswer, request: EngineRequest, meter: Meter, held: Holding) -> AsyncIterator[_Chunks]:
    """Yield the chunks of an answer while there is room to hold it. Raises AnswerTooLarge, Unavailable."""
    async for chunks in answer:
        try:
            held.count(max(meter.output_tokens * request.held_bytes_per_token, meter.content_bytes))
        except RateLimited as full:
            raise AnswerTooLarge(full.message) from None
        yield chunks


async def _stream(
    answer: AsyncIterable[_Chunks], ending: AnswerEnding, renderer: AnswerRenderer, client: Client
) -> None:
    client.start_stream()
    events = renderer.opening()
    async for chunks in answer:
        if ending.keeper:
            ending.keeper.assembler.add(*chunks)
        events += b"".join(renderer.event(chunk) for chunk in chunks if chunk.choices)
        if events:
            await client.send_part(events)
            events = b""
    await ending.written()
    await client.end(renderer.closing(ending.ticket.meter))


async def _send_whole(
    answer: AsyncIterable[_Chunks], ending: AnswerEnding, renderer: AnswerRenderer, client: Client
) -> None:
    assembler = ending.keeper.assembler if ending.keeper else Assembler()
    async for chunks in answer:
        assembler.add(*chunks)
    await ending.written()
    await client.send_json(renderer.whole(assembler, ending.ticket.meter))
