"""Which model names can be asked for, where they answer and what they cost: read from the database every second."""

import asyncio
import logging
import math
import time
from contextlib import suppress
from dataclasses import dataclass

from apps.catalog.queries import list_active_prices
from apps.core.clock import db_now
from apps.core.errors import Unavailable
from apps.gateway.database import DATABASE_ERRORS, Database
from apps.gateway.errors import ModelNotFound, PriceNotSet
from apps.serving.operations import note_requests
from apps.serving.queries import Route, list_routes

logger = logging.getLogger(__name__)

REFRESH_SECONDS = 1.0
# A name not found may be of an adapter registered since the last reading: the table is read again, this often at most.
LEAST_SECONDS_BETWEEN_REFRESHES = 0.25
# An adapter in use is noted this often: the replicas keep those that were asked for last.
NOTE_SECONDS = 60.0
_NOTE_COLD_SECONDS = 2.0
LONGEST_LOAD_SECONDS = 20.0  # how long a request waits for an adapter that a replica is loading


@dataclass(frozen=True)
class Price:
    """One price rule: so many nano-USD for `per` tokens."""

    id: str
    price_nano: int
    per: int


@dataclass(frozen=True)
class Prices:
    input: Price
    output: Price


@dataclass(frozen=True)
class _Table:
    routes: dict[str, Route]
    prices: dict[str, Price]
    clock_offset_seconds: float


class Routes:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._table = _Table({}, {}, 0.0)
        self._asked_at = -math.inf
        self._reading = asyncio.Lock()
        self._news = asyncio.Condition()
        self._noted_at: dict[str, float] = {}
        self._to_note: set[str] = set()

    async def refresh(self) -> None:
        """Raises one of DATABASE_ERRORS; what was read before stays in use."""
        async with self._reading:
            await self._read()

    async def _read(self) -> None:
        asked_at = time.monotonic()
        self._table = await self._database.call(_read)
        self._asked_at = asked_at
        async with self._news:
            self._news.notify_all()

    async def _refresh_since(self, moment: float) -> None:
        """Have the table read after `moment`; all who ask meanwhile share one reading."""
        async with self._reading:
            if self._asked_at < moment:
                await asyncio.sleep(self._asked_at + LEAST_SECONDS_BETWEEN_REFRESHES - time.monotonic())
                await self._read()

    async def keep_fresh(self) -> None:
        """Refresh until cancelled."""
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            try:
                await self._note_requests()
                await self.refresh()
            except DATABASE_ERRORS as error:
                logger.warning("routes not refreshed: %s", error)

    async def find(self, model_name: str, *, organization_id: str) -> Route:
        """Return the route of a base model or of the organization's own adapter, once a replica can answer it.

        An adapter that is being loaded is waited for, and a cold one is asked back. Raises ModelNotFound; Unavailable
        when no replica has it in time.
        """
        route = self._visible(model_name, organization_id)
        if route is not None and route.upstreams and not self._is_note_due(route):
            return route
        return await self._find(model_name, organization_id)

    def _is_note_due(self, route: Route) -> bool:
        noted_at = self._noted_at.get(route.adapter_version_id, -math.inf)
        return bool(route.adapter_version_id) and time.monotonic() - noted_at > NOTE_SECONDS

    async def _find(self, model_name: str, organization_id: str) -> Route:
        if self._visible(model_name, organization_id) is None:
            with suppress(*DATABASE_ERRORS):
                await self._refresh_since(time.monotonic())
        await self._note_request(self._visible(model_name, organization_id))
        with suppress(TimeoutError):
            async with asyncio.timeout(LONGEST_LOAD_SECONDS), self._news:
                await self._news.wait_for(lambda: not self._is_loading(model_name, organization_id))
        route = self._visible(model_name, organization_id)
        if route is None:
            raise ModelNotFound(
                "The model does not exist or you do not have access to it. GET /v1/models lists yours.", param="model"
            )
        if not route.upstreams:
            raise Unavailable("The model is not loaded and cannot answer yet. Try again shortly.", param="model")
        return route

    async def _note_request(self, route: Route | None) -> None:
        """Note the request of an adapter, for the next refresh; that of a cold one at once."""
        if route is None or not route.adapter_version_id:
            return
        age = time.monotonic() - self._noted_at.get(route.adapter_version_id, -math.inf)
        if age > (_NOTE_COLD_SECONDS if route.is_cold else NOTE_SECONDS):
            self._noted_at[route.adapter_version_id] = time.monotonic()
            self._to_note.add(route.adapter_version_id)
        if route.is_cold:
            with suppress(*DATABASE_ERRORS):
                await self._note_requests()
                await self._refresh_since(time.monotonic())

    async def _note_requests(self) -> None:
        """Raises one of DATABASE_ERRORS; what could not be noted is left for the next time."""
        asked = frozenset(self._to_note)
        if not asked:
            return
        await self._database.call(lambda: note_requests(version_ids=asked, now=db_now()))
        self._to_note -= asked
        long_ago = time.monotonic() - NOTE_SECONDS
        self._noted_at = {id: moment for id, moment in self._noted_at.items() if moment > long_ago}

    def _visible(self, model_name: str, organization_id: str) -> Route | None:
        route = self._table.routes.get(model_name)
        return route if route is not None and route.organization_id in (None, organization_id) else None

    def _is_loading(self, model_name: str, organization_id: str) -> bool:
        route = self._visible(model_name, organization_id)
        return route is not None and route.is_loading

    def prices_of(self, route: Route) -> Prices:
        """Return what the route's tokens cost; adapters cost what their base does. Raises PriceNotSet."""
        found = [self._table.prices.get(f"inference:{way}:{route.base_model_name}") for way in ("input", "output")]
        if found[0] is None or found[1] is None:
            raise PriceNotSet(
                "No price is set for this model, so it cannot answer yet. Ask the operator of this installation.",
                param="model",
            )
        return Prices(input=found[0], output=found[1])

    def now(self) -> float:
        """Return Unix time by the database's clock, to within the time a query takes."""
        return time.time() + self._table.clock_offset_seconds


def _read() -> _Table:
    prices = {rule.sku: Price(rule.pk, rule.price_nano, rule.per) for rule in list_active_prices(prefix="inference:")}
    before = time.time()
    offset = db_now().timestamp() - (before + time.time()) / 2
    return _Table({route.model_name: route for route in list_routes()}, prices, offset)
