"""Model names with their replicas and prices, read from the database every second."""

import asyncio
import logging
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from django.db import connection, transaction

from apps.accounts.members.visibility import Sight, seeing
from apps.accounts.queries import RegionRefused, list_limited
from apps.adapters.operations import CHECKPOINT_MARK
from apps.catalog.pricing import batch_sku
from apps.catalog.queries import ModelNotFound, list_all_active_prices
from apps.core.database.clock import db_now
from apps.core.errors import Unavailable
from apps.finetuning.results.checkpoint_models import request_model
from apps.interfaces.gateway.database import DATABASE_ERRORS, Database
from apps.interfaces.gateway.errors import PriceNotSet
from apps.interfaces.gateway.http.bodies import largest_body
from apps.serving.placements import record_requests
from apps.serving.queries import AliasRoute, Route, list_alias_routes, list_routes

logger = logging.getLogger(__name__)

REFRESH_SECONDS = 1.0
# A missing name may belong to an adapter registered since the last read. The table is then read again, at most this
# often.
MIN_SECONDS_BETWEEN_REFRESHES = 0.25
# Requests are counted this often, because adapters are placed on replicas by demand.
STORE_SECONDS = 5.0
MAX_LOAD_SECONDS = 20.0  # longest wait of a request for an adapter that a replica is loading
MAX_START_SECONDS = 60.0  # longest wait for the first replica of a base model; clients and proxies wait longer


class Asker(Protocol):
    """A key that asks for a model: its organization, and the private projects that it sees."""

    @property
    def organization_id(self) -> str: ...
    @property
    def sight(self) -> Sight | None: ...


@dataclass(frozen=True)
class Price:
    """One price rule: a price in nano-USD for `per` tokens."""

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
    prices: dict[tuple[str, str | None], Price]  # of a SKU, for all organizations (None) or for one
    clock_offset_seconds: float
    aliases: dict[tuple[str, str], AliasRoute]  # by organization and name
    regions: dict[str, frozenset[str]] = field(default_factory=dict)  # of organizations that are limited to some
    largest_body_bytes: int = largest_body(0, takes_media=False)
    # By base model and organization, and whether batches ask.
    found_prices: dict[tuple[str, str, bool], Prices] = field(default_factory=dict)


class Routes:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._table = _Table({}, {}, 0.0, {})
        self._asked_at = -math.inf
        self._reading = asyncio.Lock()
        self._storing = asyncio.Lock()
        self._news = asyncio.Condition()
        self._asked: Counter[str] = Counter()  # requests by adapter version since the last store
        self._asked_fleets: set[str] = set()
        self._stored_at = -math.inf

    async def refresh(self) -> None:
        """Read the table again. Raises one of DATABASE_ERRORS; the previous table then stays in use."""
        async with self._reading:
            await self._read()

    async def _read(self) -> None:
        asked_at = time.monotonic()
        self._table = await self._database.call(_read)
        self._asked_at = asked_at
        async with self._news:
            self._news.notify_all()

    async def _refresh_since(self, moment: float) -> None:
        """Make sure that the table was read after `moment`. All concurrent callers share one read."""
        async with self._reading:
            if self._asked_at < moment:
                await asyncio.sleep(self._asked_at + MIN_SECONDS_BETWEEN_REFRESHES - time.monotonic())
                await self._read()

    async def keep_fresh(self) -> None:
        """Refresh until cancelled."""
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            try:
                if time.monotonic() - self._stored_at > STORE_SECONDS:
                    await self._store_counts()
                await self.refresh()
            except DATABASE_ERRORS as error:
                logger.warning("routes not refreshed: %s", error)

    async def find(self, model_name: str, *, caller: Asker) -> Route:
        """Return the route of a base model or of the organization's own adapter once a replica can answer it.

        The caller has checked the balance. If the route is ready, the caller counts the request once it is paid for.
        Requests a missing replica or adapter and waits until it has started or loaded. Raises ModelNotFound;
        RegionRefused if only replicas in regions that the organization may not use have it; Unavailable if no replica
        has it in time.
        """
        ready = self.known(model_name, caller=caller)
        if ready is not None and ready.upstreams:
            return ready
        if ready is None:
            with suppress(*DATABASE_ERRORS):
                await self._refresh_since(time.monotonic())
                await self._ask_for_checkpoint(model_name, caller)
        model_name = self.resolve_alias(model_name, caller=caller)
        await self._count_request(self._visible(model_name, caller), caller)
        await self._wait_while(self._is_starting, model_name, caller, seconds=MAX_START_SECONDS)
        route = self._visible(model_name, caller)
        if route is not None and route.is_cold and route.fleets:  # counted before its first replica existed
            self._asked[route.adapter_version_id] += 0
            await self._store_at_once()
        await self._wait_while(self._is_loading, model_name, caller, seconds=MAX_LOAD_SECONDS)
        route = self.require_known(model_name, caller=caller)
        if not route.upstreams:
            self._require_region(route, caller)
            raise Unavailable("The model is not loaded and cannot answer yet. Try again shortly.", param="model")
        return route

    async def _wait_while(
        self, is_pending: Callable[[str, Asker], bool], model_name: str, caller: Asker, *, seconds: float
    ) -> None:
        """Wait until the table no longer shows this, or until the time is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds), self._news:
                await self._news.wait_for(lambda: not is_pending(model_name, caller))

    async def _ask_for_checkpoint(self, model_name: str, caller: Asker) -> None:
        """Request the model of a checkpoint that is named for the first time, and wait for its route.

        Raises one of DATABASE_ERRORS; Unavailable if it takes too long.
        """
        if CHECKPOINT_MARK not in model_name or self._visible(model_name, caller) is not None:
            return
        if not await self._database.call(_request_model, caller, model_name):
            return
        try:
            async with asyncio.timeout(MAX_LOAD_SECONDS), self._news:
                await self._news.wait_for(lambda: self._visible(model_name, caller) is not None)
        except TimeoutError as late:
            message = "The model of this checkpoint is being made. Try again shortly."
            raise Unavailable(message, param="model") from late

    def known(self, model_name: str, *, caller: Asker) -> Route | None:
        """Return the route of a name that the organization may use, even if no replica can answer it, or None."""
        return self._visible(self.resolve_alias(model_name, caller=caller), caller)

    def require_known(self, model_name: str, *, caller: Asker) -> Route:
        """Return the route of a name that the organization may use, even if no replica can answer it.

        Raises ModelNotFound.
        """
        route = self.known(model_name, caller=caller)
        if route is None:  # unknown or another organization's: no name in the message, so both answers are identical
            raise ModelNotFound(
                "The model does not exist or you do not have access to it. GET /v1/models lists yours.", param="model"
            )
        return route

    def count(self, route: Route, *, caller: Asker) -> None:
        """Count the request in the next batch: of its adapter, and of the fleets where it can be answered."""
        if route.adapter_version_id:
            self._asked[route.adapter_version_id] += 1
        base = self._visible(route.base_model_name, caller)
        answering = route.upstreams or (base.upstreams if base is not None else ())
        regions = {upstream.region for upstream in answering} or {fleet.region for fleet in route.fleets[:1]}
        self._asked_fleets.update(fleet.fleet_id for fleet in route.fleets if fleet.region in regions)

    async def _count_request(self, route: Route | None, caller: Asker) -> None:
        """Count the request; of a cold adapter, and if a replica must start first, store the counts at once."""
        if route is None:
            return
        self.count(route, caller=caller)
        if route.is_cold or (route.fleets and not route.upstreams):
            await self._store_at_once()

    async def _store_at_once(self) -> None:
        """Store the counts and read the table again. All concurrent callers share one store and one read."""
        try:
            async with self._storing:
                if self._asked or self._asked_fleets:
                    await asyncio.sleep(self._stored_at + MIN_SECONDS_BETWEEN_REFRESHES - time.monotonic())
                    await self._store_counts()
            await self._refresh_since(time.monotonic())
        except DATABASE_ERRORS as error:
            logger.warning("requests were not counted: %s", error)

    async def _store_counts(self) -> None:
        """Store the counts. Raises one of DATABASE_ERRORS; the counts are then kept for the next time."""
        asked, self._asked = self._asked, Counter()
        fleets, self._asked_fleets = self._asked_fleets, set()
        self._stored_at = time.monotonic()
        if not asked and not fleets:
            return
        try:
            await self._database.call(lambda: record_requests(counts=asked, fleets=fleets, now=db_now()))
        except DATABASE_ERRORS:
            self._asked.update(asked)
            self._asked_fleets |= fleets
            raise

    def resolve_alias(self, model_name: str, *, caller: Asker) -> str:
        """Return the version name that an alias of the organization stands for in this request.

        The canary is drawn here, so call this once per request. An alias never has the name of a model.
        """
        alias = self._table.aliases.get((caller.organization_id, model_name))
        if alias is None or self._visible(model_name, caller) is not None:
            return model_name
        is_canary = alias.canary_target and random.randrange(100) < alias.canary_percent  # noqa: S311 - not a secret
        return alias.canary_target if is_canary else alias.target

    def _visible(self, model_name: str, caller: Asker) -> Route | None:
        route = self._table.routes.get(model_name)
        if route is None or route.organization_id not in (None, caller.organization_id):
            return None
        if route.private_project and caller.sight is not None and route.private_project not in caller.sight.project_ids:
            return None
        regions = self._table.regions.get(caller.organization_id)
        return route if regions is None else route.limited_to(regions)

    def _require_region(self, route: Route, caller: Asker) -> None:
        """Raise RegionRefused if all replicas that could answer are where the organization's data may not be."""
        regions = self._table.regions.get(caller.organization_id)
        named = (self._table.routes.get(name) for name in (route.model_name, route.base_model_name))
        able = [each for each in named if each is not None]
        found = {one.region for each in able for one in each.upstreams}
        found |= {one.region for each in able for one in each.fleets}
        if regions is not None and found and not found & regions:
            allowed, others = ", ".join(sorted(regions)), ", ".join(sorted(found))
            raise RegionRefused(
                f"Your organization is limited to {allowed}, and this model is served in {others} alone. Choose "
                "another model, or ask the operator of this installation for a replica.",
                param="model",
            )

    def _is_starting(self, model_name: str, caller: Asker) -> bool:
        """Return whether a fleet may start the first replica that could answer, or take one back that drains."""
        route = self._visible(model_name, caller)
        if route is None or route.upstreams or not route.fleets:
            return False
        base = self._visible(route.base_model_name, caller)
        return base is not None and set(base.upstreams) <= set(base.draining)

    def _is_loading(self, model_name: str, caller: Asker) -> bool:
        route = self._visible(model_name, caller)
        return route is not None and route.is_loading

    @property
    def largest_body_bytes(self) -> int:
        """Return the size in bytes of the largest body that any model here can use."""
        return self._table.largest_body_bytes

    def prices_of(self, route: Route, *, organization_id: str, is_batched: bool = False) -> Prices:
        """Return the route's token prices for the organization. Adapters cost the same as their base model.

        Raises PriceNotSet.
        """
        known = self._table.found_prices
        asked = (route.base_model_name, organization_id, is_batched)
        found = known.get(asked)
        if found is None:
            found = known[asked] = _prices_of(self._table.prices, *asked)
        return found

    def now(self) -> float:
        """Return Unix time by the database clock, accurate to the duration of one query."""
        return time.time() + self._table.clock_offset_seconds


def _prices_of(
    prices: dict[tuple[str, str | None], Price], base_model_name: str, organization_id: str, is_batched: bool
) -> Prices:
    """Return the input and output prices. The organization's own price comes before the general one.

    Raises PriceNotSet.
    """
    skus = [f"inference:{way}:{base_model_name}" for way in ("input", "output")]
    found = [_price_of(prices, (batch_sku(sku), sku) if is_batched else (sku,), organization_id) for sku in skus]
    if found[0] is None or found[1] is None:
        raise PriceNotSet(
            "No price is set for this model, so it cannot answer yet. Ask the operator of this installation.",
            param="model",
        )
    return Prices(input=found[0], output=found[1])


def _price_of(prices: dict[tuple[str, str | None], Price], skus: Iterable[str], organization_id: str) -> Price | None:
    owned = (prices.get((sku, owner)) for sku in skus for owner in (organization_id, None))
    return next((price for price in owned if price is not None), None)


def _request_model(caller: Asker, model_name: str) -> bool:
    with seeing(caller.sight):
        return request_model(organization_id=caller.organization_id, model_name=model_name)


def _read() -> _Table:
    """Return the table as of one moment, so that each model has the price and replica that came with it."""
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        prices = {
            (rule.sku, rule.organization_id): Price(rule.pk, rule.price_nano, rule.per)
            for rule in list_all_active_prices(prefix="inference:")
        }
        aliases = {(alias.organization_id, alias.model_name): alias for alias in list_alias_routes()}
        routes = {route.model_name: route for route in list_routes()}
        regions = list_limited()
        before = time.time()
        offset = db_now().timestamp() - (before + time.time()) / 2
    bodies = [largest_body(route.context_length, takes_media=bool(route.media)) for route in routes.values()]
    return _Table(routes, prices, offset, aliases, regions, max(bodies, default=largest_body(0, takes_media=False)))
