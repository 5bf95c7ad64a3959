"""One request's way through the books: reserved, begun on the spool, ended on the spool, shipped."""

import asyncio
import datetime
import time

import msgspec

from apps.billing.usage import UsageRecord, price_ceiling
from apps.core.errors import Unavailable
from apps.gateway.chunks import Meter
from apps.gateway.keys import Caller
from apps.gateway.purses import Purses, Reservation
from apps.gateway.recorder import Recorder
from apps.gateway.routes import Prices, Routes
from apps.gateway.schema import EngineRequest
from apps.gateway.spool import Start
from apps.serving.queries import Route


def cost_nano(prices: Prices, *, input_tokens: int, output_tokens: int) -> int:
    """Return what the tokens cost, rounded up as reservations are."""
    return price_ceiling(
        quantity=input_tokens, price_nano=prices.input.price_nano, per=prices.input.per
    ) + price_ceiling(quantity=output_tokens, price_nano=prices.output.price_nano, per=prices.output.per)


class Ticket(msgspec.Struct):
    """An admitted request. Must be finished exactly once, however it ends."""

    metering: "Metering"
    id: str
    caller: Caller
    route: Route
    prices: Prices
    reservation: Reservation
    meter: Meter
    started_at: float = msgspec.field(default_factory=time.monotonic)
    first_token_ms: int | None = None
    replica_id: str = ""
    is_finished: bool = False

    def note_first_token(self, replica_id: str) -> None:
        self.replica_id = replica_id
        self.first_token_ms = self._elapsed_ms()

    def _elapsed_ms(self) -> int:
        return int((time.monotonic() - self.started_at) * 1000)

    def finish(self, finish: str, *, is_charged: bool = True) -> "asyncio.Future[bool]":
        """Write down what was used and settle the reservation; the future tells whether it is on the disk."""
        assert not self.is_finished
        self.is_finished = True
        record = self._record(finish, is_charged=is_charged)
        self.reservation.settle(
            cost_nano(self.prices, input_tokens=record.input_tokens, output_tokens=record.output_tokens)
        )
        return self.metering.end(record)

    def _record(self, finish: str, *, is_charged: bool) -> UsageRecord:
        meter, caller, prices = self.meter, self.caller, self.prices
        read, written = meter.input_tokens, meter.output_tokens
        return UsageRecord(
            id=self.id,
            organization_id=caller.organization_id,
            key_id=caller.key_id,
            model_name=self.route.model_name,
            adapter_version_id=self.route.adapter_version_id,
            slice_id=self.reservation.slice_id,
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
        )


class Metering:
    def __init__(self, routes: Routes, purses: Purses, recorder: Recorder) -> None:
        self._routes = routes
        self._purses = purses
        self._recorder = recorder

    async def admit(
        self, caller: Caller, route: Route, request: EngineRequest, meter: Meter, *, usage_id: str
    ) -> Ticket:
        """Reserve the worst case of the request and begin it. Raises PriceNotSet, InsufficientBalance, Unavailable."""
        prices = self._routes.prices_of(route, organization_id=caller.organization_id)
        if not self._recorder.has_room():
            raise Unavailable("Requests cannot be metered at the moment. Try again shortly.", retry_after_seconds=5)
        worst_case_nano = cost_nano(
            prices,
            input_tokens=request.input_tokens_bound(route.context_length),
            output_tokens=request.output_tokens_bound(route.context_length),
        )
        reservation = await self._purses.reserve(caller.organization_id, caller.key_id, worst_case_nano)
        ticket = Ticket(self, usage_id, caller, route, prices, reservation, meter)
        self._recorder.start(
            Start(
                id=usage_id,
                organization_id=caller.organization_id,
                key_id=caller.key_id,
                model_name=route.model_name,
                slice_id=reservation.slice_id,
                worst_case_nano=worst_case_nano,
                at=self._routes.now(),
            )
        )
        return ticket

    def end(self, record: UsageRecord) -> "asyncio.Future[bool]":
        return self._recorder.end(record)

    def now(self) -> datetime.datetime:
        return datetime.datetime.fromtimestamp(self._routes.now(), datetime.UTC)
