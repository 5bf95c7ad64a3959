"""A finished model at the price of conversions, and a customer who orders them."""

import pytest

from apps.adapters.models import AdapterVersion
from apps.catalog.operations import set_price
from apps.core.database.clock import db_now
from apps.finetuning.models import Worker
from apps.finetuning.quotes.delivery import CONVERTER
from tests.support.api.conversions import PER_GB_NANO


@pytest.fixture
def version(version: AdapterVersion) -> AdapterVersion:
    set_price(sku="conversion:bytes", unit="bytes", price_nano=PER_GB_NANO, per=10**9, by="user_1", now=db_now())
    Worker.objects.update(software={CONVERTER: "0.1.1"})
    return version


@pytest.fixture
def shop(api_client, key, version):
    """Return a function that lists the offers by kind, or orders one at a price."""
    url, client = f"/api/v1/models/{version.model_name}/conversions", api_client(key)

    def go(kind: str = "", usd: str = "5"):
        if not kind:
            return {each["kind"]: each for each in client.get(url).json()["data"]}
        return client.post(url, {"kind": kind, "quoted_max_usd": usd}, format="json")

    return go
