"""What can have a price, and the names that customers read."""

import pytest

from apps.accounts.models import Organization
from apps.catalog.models import PriceRequest, PriceRule
from apps.core.database.clock import db_now
from apps.core.errors import InvalidValue
from apps.finetuning.pools.prices import list_skus, name_skus, price_sku
from tests.factories.catalog import make_base_model, make_listed_model
from tests.factories.finetuning import make_pool

pytestmark = pytest.mark.django_db


def price(sku: str, *, organization: Organization | None = None) -> PriceRule | PriceRequest:
    return price_sku(
        sku=sku, price_nano=5, organization=organization, tiers=(), effective_from=None, by="user_1", now=db_now()
    )


def test_a_sku_is_named_after_its_gpu_type_or_model() -> None:
    make_pool("one")
    make_base_model("tiny")

    skus = list_skus()

    assert {code: str(sku) for code, sku in skus.items()} == {
        "training:one": "Training on CPU, per GPU-hour",
        "inference:input:tiny": "Anneal demo: input tokens, per million",
        "inference:output:tiny": "Anneal demo: output tokens, per million",
        "inference:input:tiny:batch": "Anneal demo: input tokens in batches and evals, per million",
        "inference:output:tiny:batch": "Anneal demo: output tokens in batches and evals, per million",
        "warm:tiny": "Anneal demo: time kept warm, per hour",
        "storage:bytes": "Storage of files, checkpoints and adapters, per GB-month",
        "conversion:bytes": "Merging or converting a finished model, per GB",
    }


def test_pools_of_one_gpu_type_are_told_apart() -> None:
    make_pool("one")
    make_pool("two")

    names = [sku.name for sku in name_skus(["training:one", "training:two", "training:gone"]).values()]

    assert names == ["Training on CPU, pool one", "Training on CPU, pool two", "training:gone"]


@pytest.mark.parametrize(
    "sku", ["training:gone", "inference:input:listed", "inference:input:listed:batch", "inference:cached:tiny", "x", ""]
)
def test_what_does_not_exist_gets_no_price(sku: str, organization: Organization) -> None:
    make_base_model("tiny")
    make_listed_model("listed")

    for owner in (None, organization):
        with pytest.raises(InvalidValue, match="not a SKU") as refused:
            price(sku, organization=owner)
        assert refused.value.param == "sku"

    assert not PriceRule.objects.exists() and not PriceRequest.objects.exists()


def test_a_price_of_one_customer_waits_and_a_general_one_does_not(organization: Organization) -> None:
    make_base_model("tiny")

    assert isinstance(price("warm:tiny"), PriceRule)
    assert isinstance(price("warm:tiny", organization=organization), PriceRequest)
