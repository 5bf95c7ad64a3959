"""GET /api/v1/billing: the balance and charges of the key's organization, without figures of other organizations."""

import datetime

import pytest

from apps.billing.operations import grant_credit, hold, settle_hold
from apps.billing.usage.metering import UsageRecord, rate_usage, record_usage
from apps.billing.usage.slices import lease_slice
from apps.catalog.operations import set_price
from apps.catalog.queries import active_price
from apps.core.database.clock import db_now
from tests.factories.accounts import make_key

URL = "/api/v1/billing"
USD = 1_000_000_000


@pytest.fixture
def spent(organization):
    """Ten dollars: two trained away of three held, one request of a million tokens each way, one not charged yet."""
    grant_credit(organization=organization, amount_nano=10 * USD, by="system", reason="test", idempotency_key="grant")
    held = hold(
        organization=organization,
        purpose="job",
        source="ftjob-1",
        amount_nano=3 * USD,
        by="system",
        idempotency_key="h",
    )
    settle_hold(hold_id=held.pk, capture_nano=2 * USD, by="system")
    record_usage(records=[make_record(organization, "use_1")])
    rate_usage()
    record_usage(records=[make_record(organization, "use_2")])
    lease_slice(organization=organization, required_nano=USD, by="gateway_1")


def make_record(organization, record_id: str) -> UsageRecord:
    prices = {
        way: active_price(sku=f"inference:{way}:tiny")
        or set_price(
            sku=f"inference:{way}:tiny", unit="tokens", price_nano=500_000_001, per=1_000_000, by="system", now=db_now()
        )
        for way in ("input", "output")
    }
    return UsageRecord(
        id=record_id,
        organization_id=organization.pk,
        key_id="key_1",
        model_name="tiny",
        adapter_version_id="",
        slice_id="",
        input_price_id=prices["input"].pk,
        output_price_id=prices["output"].pk,
        input_tokens=1_000_000,
        cached_input_tokens=0,
        output_tokens=1_000_000,
        finish="stop",
        latency_ms=1,
        first_token_ms=1,
        occurred_at=datetime.datetime(2026, 11, 3, tzinfo=datetime.UTC),
    )


@pytest.mark.slow
def test_the_owner_sees_balance_spending_and_books_that_balance(api_client, key, spent):
    answer = api_client(key).get(URL)

    assert answer.json() == {
        "object": "billing",
        "available_usd": "5.999999998",
        "held_usd": "1",
        "ledger_sum_nano": 0,
        "tokens_billed": 2_000_000,
        "unrated_requests": 1,
        "inference_usd": "1.000000002",
        "training_usd": "2",
    }


@pytest.mark.slow
def test_an_outsider_sees_only_her_own_zeros(api_client, rival, charlie, spent):
    answer = api_client(make_key(rival, charlie)).get(URL).json()

    assert (answer["available_usd"], answer["tokens_billed"], answer["unrated_requests"]) == ("0", 0, 0)
    assert (answer["inference_usd"], answer["training_usd"], answer["ledger_sum_nano"]) == ("0", "0", 0)


def test_it_takes_a_key_with_the_scope_view(api_client, organization, alice):
    narrow = make_key(organization, alice, scopes=frozenset({"inference"}))

    assert api_client(narrow).get(URL).status_code == 403
    assert api_client().get(URL).status_code == 401
