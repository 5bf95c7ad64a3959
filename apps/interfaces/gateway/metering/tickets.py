"""The accounting of one request: reserved, started and ended on the spool, shipped."""

import asyncio
import datetime
import logging
import time

import msgspec

from apps.adapters.operations import CHECKPOINT_MARK
from apps.batches.completions.records import CompletionRecord
from apps.billing.usage.metering import UsageRecord, price_ceiling
from apps.core.errors import Unavailable
from apps.interfaces.gateway.admission.keys import InferenceCaller
from apps.interfaces.gateway.engines.faults import Faults
from apps.interfaces.gateway.engines.meter import Meter, TokenBounds
from apps.interfaces.gateway.engines.routes import Prices, Routes
from apps.interfaces.gateway.metering.recorder import Recorder
from apps.interfaces.gateway.metering.spending_slices import SliceShare, SpendingSlices
from apps.interfaces.gateway.metering.spool import Start
from apps.interfaces.gateway.requests.engine_request import EngineRequest
from apps.serving.queries import Route

logger = logging.getLogger(__name__)

# An engine may have a longer context than the catalogue has for its base model (YaRN stretches it four times), and a
# tokenizer that normalizes Unicode may read more tokens than the body has bytes. Both exceed the reserved count, and
# neither is the replica's fault.
_MAX_CONTEXTS = 4


def cost_nano(prices: Prices, *, input_tokens: int, output_tokens: int) -> int:
    """Return the cost of the tokens in nano-USD, rounded up as reservations are."""
    return price_ceiling(
        quantity=input_tokens, price_nano=prices.input.price_nano, per=prices.input.per
    ) + price_ceiling(quantity=output_tokens, price_nano=prices.output.price_nano, per=prices.output.per)


def bounds_of(request: EngineRequest, context_length: int) -> TokenBounds:
    """Return the reserved token counts of the request and the highest counts that a working engine can make."""
    longest = _MAX_CONTEXTS * context_length
    reserved_input = request.input_tokens_bound(context_length)
    return TokenBounds(
        input=reserved_input,
        output=request.output_tokens_bound(context_length),
        possible_input=max(reserved_input, request.prompt_count * longest),
        possible_output=request.output_tokens_bound(longest),
    )


class Ticket(msgspec.Struct):
    """An admitted request. Finish it exactly once, with any outcome.

    `charged_id`: the record's id if the request is charged and a repetition must not be charged again.
    """

    metering: "Metering"
    id: str
    caller: InferenceCaller
    route: Route
    prices: Prices
    share: SliceShare
    meter: Meter
    charged_id: str = ""
    started_at: float = msgspec.field(default_factory=time.monotonic)
    first_token_ms: int | None = None
    replica_id: str = ""
    is_finished: bool = False

    def record_first_token(self, replica_id: str) -> None:
        self.replica_id = replica_id
        self.first_token_ms = self._elapsed_ms()

    def _elapsed_ms(self) -> int:
        return int((time.monotonic() - self.started_at) * 1000)

    def finish(
        self, finish: str, *, is_charged: bool = True, completion: CompletionRecord | None = None
    ) -> "asyncio.Future[bool]":
        """Record the usage, with the completion to store if there is one, and settle the share.

        The future's result is whether both are on the disk.
        """
        assert not self.is_finished
        self.is_finished = True
        self._judge_counts()
        record = self._record(finish, is_charged=is_charged)
        self.share.settle(cost_nano(self.prices, input_tokens=record.input_tokens, output_tokens=record.output_tokens))
        return self.metering.end(record, start_id=self.id, completion=completion)

    def _judge_counts(self) -> None:
        """Isolate a replica whose counts no working engine reports. Nothing above the share is billed."""
        if not self.replica_id:
            return
        if fault := self.meter.fault:
            self.metering.accuse(self.replica_id, f"{self.id}: {fault}")
        elif excess := self.meter.excess:
            logger.warning("replica %s, %s: %s, which were reserved", self.replica_id, self.id, excess)

    def _record(self, finish: str, *, is_charged: bool) -> UsageRecord:
        meter, caller, prices = self.meter, self.caller, self.prices
        read, written = meter.input_tokens, meter.output_tokens
        return UsageRecord(
            id=(is_charged and self.charged_id) or self.id,
            organization_id=caller.organization_id,
            key_id=caller.key_id,
            model_name=self.route.model_name,
            adapter_version_id=self.route.adapter_version_id,
            slice_id=self.share.slice_id,
            reserved_nano=self.share.amount_nano,
            input_price_id=prices.input.id,
            output_price_id=prices.output.id,
            input_tokens=read if is_charged else 0,
            cached_input_tokens=meter.cached_input_tokens if is_charged else 0,
            output_tokens=written if is_charged else 0,
            finish=finish,
            latency_ms=self._elapsed_ms(),
            first_token_ms=self.first_token_ms,
            occurred_at=self.metering.now(),
            replica_id=self.replica_id,
            engine_input_tokens=meter.engine_input_tokens if self.replica_id else 0,
            engine_output_tokens=written if self.replica_id else 0,
            # Before the first text arrives, the gateway cannot compare the tokens with it.
            output_bytes=meter.content_bytes if self.first_token_ms is not None else None,
        )


class Metering:
    def __init__(self, routes: Routes, spending_slices: SpendingSlices, recorder: Recorder, faults: Faults) -> None:
        self._routes = routes
        self._spending_slices = spending_slices
        self._recorder = recorder
        self._faults = faults

    async def require_affordable(
        self, caller: InferenceCaller, route: Route | None, request: EngineRequest, *, is_batched: bool
    ) -> None:
        """Check the balance for the worst case of a request that cannot be answered yet. Raises the errors of `admit`.

        Without a route, only a checkpoint's name may become a model. Its worst case is that of its base model. If the
        base model is no longer served, any credit is enough.
        """
        is_checkpoint = route is None and CHECKPOINT_MARK in request.model_name
        if is_checkpoint:
            base_model = request.model_name.split(":")[1]
            route = self._routes.known(base_model, caller=caller)
        if route is None:
            if is_checkpoint:
                await self._spending_slices.require_room(caller.organization_id, caller.key_id, 1)
            return
        prices = self._routes.prices_of(route, organization_id=caller.organization_id, is_batched=is_batched)
        bounds = bounds_of(request.with_limit(route.context_length), route.context_length)
        amount_nano = cost_nano(prices, input_tokens=bounds.input, output_tokens=bounds.output)
        await self._spending_slices.require_room(caller.organization_id, caller.key_id, amount_nano)

    async def admit(
        self,
        caller: InferenceCaller,
        route: Route,
        request: EngineRequest,
        meter: Meter,
        *,
        usage_id: str,
        charged_id: str = "",
    ) -> Ticket:
        """Reserve the worst case of the request and begin it. A request of a batch has a `charged_id` and its price.

        Raises PriceNotSet, InsufficientBalance, Unavailable.
        """
        prices = self._routes.prices_of(route, organization_id=caller.organization_id, is_batched=bool(charged_id))
        if not self._recorder.has_room():
            raise Unavailable("Requests cannot be metered at the moment. Try again shortly.", retry_after_seconds=5)
        meter.bounds = bounds = bounds_of(request, route.context_length)
        worst_case_nano = cost_nano(prices, input_tokens=bounds.input, output_tokens=bounds.output)
        share = await self._spending_slices.reserve(caller.organization_id, caller.key_id, worst_case_nano)
        ticket = Ticket(self, usage_id, caller, route, prices, share, meter, charged_id)
        self._recorder.start(
            Start(
                id=usage_id,
                organization_id=caller.organization_id,
                key_id=caller.key_id,
                model_name=route.model_name,
                slice_id=share.slice_id,
                worst_case_nano=worst_case_nano,
                at=self._routes.now(),
                charged_id=charged_id,
            )
        )
        return ticket

    def accuse(self, replica_id: str, reason: str) -> None:
        self._faults.accuse(replica_id, reason)

    def end(
        self, record: UsageRecord, *, start_id: str = "", completion: CompletionRecord | None = None
    ) -> "asyncio.Future[bool]":
        return self._recorder.end(record, start_id=start_id, completion=completion)

    def now(self) -> datetime.datetime:
        return datetime.datetime.fromtimestamp(self._routes.now(), datetime.UTC)
