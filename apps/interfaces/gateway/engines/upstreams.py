"""Requests to the engines' proxies: choice of replica and retries.

Another replica is asked only before the first token: if the first one cannot be reached, is busy, starting or dying,
has lost the adapter, or ended its answer too early. Errors of the request itself are never retried.
"""

import asyncio
import logging
from contextlib import suppress
from typing import Self

import msgspec

from apps.contracts.addresses.replicas import AddressRules
from apps.core.errors import Unavailable
from apps.interfaces.gateway.engines.chunks import (
    DONE,
    EngineChunk,
    EngineFault,
    SseParser,
    decode_chunk,
    decode_chunks,
)
from apps.interfaces.gateway.engines.engine_http import (
    FIRST_TOKEN_SECONDS,
    Broken,
    EngineResponse,
    ReplicaClient,
    Unreachable,
)
from apps.interfaces.gateway.engines.meter import Meter
from apps.interfaces.gateway.engines.refusals import TryAnother, meaning_of, read_refusal
from apps.interfaces.gateway.engines.traces import UNTRACED, RequestPhase, RequestTrace
from apps.interfaces.gateway.errors import EngineError
from apps.interfaces.gateway.fair_queue import Breaker, FairQueue
from apps.interfaces.gateway.requests.engine_request import EngineRequest
from apps.serving.queries import Route, Upstream

logger = logging.getLogger(__name__)

# A request that kills its engine must not go through all of them. Replicas that were not reached do not count.
MAX_ATTEMPTS = 2
_END_SECONDS = 2
_TRUNCATED = (Broken, TimeoutError, ValueError, msgspec.DecodeError)


class CallProgress(msgspec.Struct):
    """The progress of a request. `is_sent`: an engine has seen it and may have worked on it before it counted a token.

    `model_name`: as sent, once it is read. `is_metered`: a usage record will have its outcome. `replica_id`: of the
    replica that answers it.
    """

    is_sent: bool = False
    model_name: str = ""
    is_metered: bool = False
    replica_id: str = ""
    trace: RequestTrace = UNTRACED


class Call(msgspec.Struct, frozen=True):
    """A request, independent of the replica that answers it."""

    tenant: str
    path: str
    request: EngineRequest
    cache_salt: str
    request_id: str
    meter: Meter
    progress: CallProgress
    is_batched: bool = False  # it takes spare places only


class Upstreams:
    def __init__(self, *, places_per_replica: int, addresses: AddressRules | None = None) -> None:
        self._addresses = addresses
        self.turns = FairQueue(places=places_per_replica)
        self._breaker = Breaker()
        self._replicas: dict[str, ReplicaClient] = {}

    async def begin(self, route: Route, call: Call) -> "EngineAnswer":
        """Return the answer of the first replica that answers, with its first token.

        The answer holds its places on the replica until `end`. Raises Unavailable, RateLimited, ContextLengthExceeded,
        InvalidValue, RequestFailed.
        """
        # The checked fields and the engine's model name, always as a metered stream.
        body = msgspec.json.encode(
            call.request.fields
            | {
                "model": route.engine_name,
                "cache_salt": call.cache_salt,
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            }
        )
        untried = {upstream.replica_id: upstream for upstream in route.upstreams}
        attempts = 0
        trace = call.progress.trace
        while attempts < MAX_ATTEMPTS and (allowed := self._breaker.allowed(untried)):
            trace.enter(RequestPhase.PLACE)
            tenant, count = call.tenant, call.request.sequence_count
            if call.is_batched:
                replica_id = self.turns.take_spare(tenant, allowed, count)
            else:
                replica_id = self.turns.take_free(tenant, allowed, count) or await self.turns.take(
                    tenant, allowed, count
                )
            upstream = untried.pop(replica_id)
            self._breaker.record_trial(replica_id)
            traceparent = trace.ask_engine(route.model_name, replica_id, output_tokens=call.request.max_tokens)
            try:
                answer = await self._begin(upstream, call, body, traceparent)
            except BaseException as reason:
                self.turns.give_back(tenant, replica_id, count)
                self._record_failure(replica_id, call, reason)
                if not isinstance(reason, TryAnother):
                    raise
                trace.fail_phase("replica_unavailable")
                attempts += not reason.is_unreached
                call.meter.reset()
                call.progress.replica_id = ""
            else:
                self._breaker.record_success(replica_id)
                return answer
        raise Unavailable(
            "The model cannot answer at the moment: it is loading, busy or restarting. Try again shortly."
        )

    def _record_failure(self, replica_id: str, call: Call, reason: BaseException) -> None:
        """Count a failure against the replica unless the request, the customer or load caused it."""
        if not isinstance(reason, TryAnother):
            return
        logger.warning("replica %s does not answer %s: %s", replica_id, call.request_id, reason)
        if not reason.is_busy:
            self._breaker.record_failure(replica_id, call.tenant, is_replicas=reason.is_unreached or reason.is_down)

    async def _begin(self, upstream: Upstream, call: Call, body: bytes, traceparent: str) -> "EngineAnswer":
        replica = self._replicas.get(upstream.url)
        if replica is None:
            replica = self._replicas[upstream.url] = ReplicaClient(upstream.url, self._addresses)
        was_sent, call.progress.is_sent = call.progress.is_sent, True
        try:
            response = await replica.post(
                call.path, token=upstream.token, request_id=call.request_id, body=body, traceparent=traceparent
            )
        except Unreachable as error:
            call.progress.is_sent = was_sent
            raise TryAnother(str(error), is_unreached=True) from error
        except Broken as error:
            raise TryAnother(str(error)) from error
        answer = EngineAnswer(response, call.request, call.meter, replica_id=upstream.replica_id)
        try:
            if response.status != 200:
                raise await read_refusal(response, call.request)
            call.progress.replica_id = upstream.replica_id
            await answer.read_to_first_token()
        except BaseException as error:
            if isinstance(error, TryAnother) and (error.is_busy or error.is_down):
                call.progress.is_sent = was_sent  # this replica did no work; an earlier one may have
            answer.close()
            raise
        return answer

    def end(self, call: Call, answer: "EngineAnswer") -> None:
        """Free the answer's places. If the answer is incomplete, the engine stops."""
        answer.close()
        self.turns.give_back(call.tenant, answer.replica_id, call.request.sequence_count)

    def close(self) -> None:
        for replica in self._replicas.values():
            replica.close()


# --- One answer -------------------------------------------------------------------------------------------------------


class _EngineFailed(Exception):
    """The stream holds an error or an invalid end."""

    def __init__(self, fault: EngineFault) -> None:
        super().__init__(fault.message)
        self.fault = fault


class EngineAnswer:
    """The chunks of one answer, metered as they arrive. Iteration yields batches of chunks that arrived together."""

    def __init__(self, response: EngineResponse, request: EngineRequest, meter: Meter, *, replica_id: str) -> None:
        self.replica_id = replica_id
        self._response = response
        self._request = request
        self._meter = meter
        self._parser = SseParser()
        self._first: list[EngineChunk] = []
        self._is_done = False  # no more bytes will come
        self._has_said_done = False

    async def read_to_first_token(self) -> None:
        """Hold back everything before the first token, because until then another replica can still take over.

        Raises TryAnother, or an error of the request itself; the engine reports some of these only in the stream.
        """
        try:
            while not self._is_done:
                chunks = await self._read(FIRST_TOKEN_SECONDS)
                self._first += chunks
                if _has_token(chunks):
                    return
        except _EngineFailed as failed:
            raise meaning_of(failed.fault, failed.fault.code, self._request) from failed
        except _TRUNCATED as error:
            raise TryAnother(repr(error)) from error
        raise TryAnother("it ended its answer before the first token")

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[EngineChunk]:
        """Return the next chunks. Raises EngineError if the answer ends incomplete."""
        if self._first:
            first, self._first = self._first, []
            return first
        try:
            if not self._is_done:
                return await self._read()
        except _EngineFailed as failed:
            logger.warning("the engine failed in the middle of an answer: %s", failed.fault.message[:500])
            raise EngineError(_FAILED) from failed
        except _TRUNCATED as error:
            if self._meter.total is None:
                raise EngineError(_FAILED) from error
        if self._meter.total is None:
            raise EngineError(_FAILED)
        raise StopAsyncIteration

    async def _read(self, seconds: float | None = None) -> list[EngineChunk]:
        if self._has_said_done:
            # Read the end of the body after [DONE], so that the connection can be reused.
            if not self._response.has_ended:
                async with asyncio.timeout(_END_SECONDS):
                    while await self._response.read():
                        pass
            self._is_done = True
            return []
        content = self._response.read_nowait() or await self._response.read(seconds)
        if not content:
            self._is_done = True
            return []
        chunks = self._decode(content)
        self._is_done = self._has_said_done and self._response.has_ended
        return chunks

    def _decode(self, content: bytes) -> list[EngineChunk]:
        payloads = self._parser.feed(content)
        if DONE in payloads:
            self._has_said_done = True
            del payloads[payloads.index(DONE) :]
        try:
            chunks = decode_chunks(payloads)
        except msgspec.DecodeError:
            for payload in payloads:  # chunks before the broken one count
                self._observe([decode_chunk(payload)])
            raise
        self._observe(chunks)
        return chunks

    def _observe(self, chunks: list[EngineChunk]) -> None:
        """Meter the chunks. Raises _EngineFailed if one of them reports a failure."""
        self._meter.observe(*chunks)
        for chunk in chunks:
            if chunk.error is not None:  # the engine sends [DONE] even after an error, so the error decides
                raise _EngineFailed(chunk.error)
        if not self._meter.is_sound:
            raise _EngineFailed(EngineFault("the answer was aborted"))

    def close(self) -> None:
        """Release the connection. If the answer is incomplete, meter the chunks that arrived and abort the rest."""
        if not self._is_done:
            with suppress(_EngineFailed, *_TRUNCATED):
                self._decode(self._response.read_nowait())
        self._response.close()


_FAILED = "The model failed while answering. Nothing of this request is charged; try it again."


def _has_token(chunks: list[EngineChunk]) -> bool:
    """Return whether the answer has its first token or ended without one."""
    for chunk in chunks:
        for choice in chunk.choices:
            if choice.finish_reason or choice.has_content:
                return True
    return False
