"""Which model names can be asked for, where they answer and what they cost: read from the database every second."""

import asyncio
import logging
import time
from dataclasses import dataclass

from apps.catalog.queries import list_active_prices
from apps.core.clock import db_now
from apps.gateway.database import DATABASE_ERRORS, Database
from apps.gateway.errors import ModelNotFound, PriceNotSet
from apps.serving.queries import Route, list_routes

logger = logging.getLogger(__name__)

REFRESH_SECONDS = 1.0


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

    async def refresh(self) -> None:
        """Raises one of DATABASE_ERRORS; what was read before stays in use."""
        self._table = await self._database.call(_read)

    async def keep_fresh(self) -> None:
        """Refresh until cancelled."""
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            try:
                await self.refresh()
            except DATABASE_ERRORS as error:
                logger.warning("routes not refreshed: %s", error)

    def find(self, model_name: str, *, organization_id: str) -> Route:
        """Return the route of a base model or of the organization's own adapter. Raises ModelNotFound."""
        route = self._table.routes.get(model_name)
        if route is None or route.organization_id not in (None, organization_id):
            raise ModelNotFound(
                "The model does not exist or you do not have access to it. GET /v1/models lists yours.", param="model"
            )
        return route

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
