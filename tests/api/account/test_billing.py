"""Balance, ledger, costs, invoices and requests for credit over the API, each of the key's organization alone."""

import datetime

import pytest

from apps.billing.books.credit_requests import note_granted
from apps.billing.budgets import Attribution
from apps.billing.invoices.statements import close_month
from apps.billing.operations import grant_credit, hold, settle_hold
from apps.billing.usage.metering import UsageRecord, rate_usage, record_usage
from apps.billing.usage.slices import lease_slice
from apps.catalog.operations import set_price
from apps.catalog.queries import active_price
from apps.core.database.clock import db_now
from tests.factories.accounts import make_key
from tests.factories.money import USD, give_credit, spend

MEMBER = frozenset({"view", "inference", "job.write"})
URL = "/api/v1/billing"


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


def get(client, path: str, **query: object):
    return client.get(f"/api/v1/{path}", query).json()


@pytest.fixture
def month(organization, alice):
    """A job of two dollars, and the invoice of its month."""
    paid_by = Attribution("key_1", alice.pk, {"team": "a"})
    give_credit(organization, 10 * USD)
    spend(organization, 2 * USD, "ftjob-1", held_nano=3 * USD, attribution=paid_by)
    after = (db_now() + datetime.timedelta(days=32)).date().replace(day=1)
    return close_month(organization=organization, month=after)


def test_every_movement_of_money_is_listed(api_client, key, month, rival, charlie):
    client = api_client(key)

    first = get(client, "ledger", limit=1)
    rest = get(client, "ledger", after=first["last_id"])
    moved = [(each["source"], each["available_usd"], each["held_usd"]) for each in first["data"] + rest["data"]]
    assert moved == [("ftjob-1", "1", "-3"), ("ftjob-1", "-3", "3"), (None, "10", "0")]
    assert first["has_more"] and not rest["has_more"]
    assert get(client, "ledger", end_time=0)["data"] == []
    assert get(api_client(make_key(rival, charlie)), "ledger")["data"] == []
    assert client.get("/api/v1/prices").json()["data"] == get(api_client(make_key(rival, charlie)), "prices")["data"]


def test_costs_are_summed_by_day_subject_and_group(api_client, key, month, alice, rival, charlie):
    client, today = api_client(key), db_now().date().isoformat()

    def costs(**query: object) -> list[tuple[str | None, str | None, str]]:
        return [(each["kind"], each["group"], each["cost_usd"]) for each in get(client, "costs", **query)["data"]]

    assert costs() == [("training", today, "2")]
    assert costs(group_by="subject") == [("training", "ftjob-1", "2")]
    assert costs(group_by="member") == [(None, alice.pk, "2")]
    assert costs(group_by="key") == [(None, "key_1", "2")]
    assert costs(group_by="label") == [(None, "a", "2")] and costs(group_by="label", label="x") == [(None, None, "2")]
    assert costs(last="2020-01-31") == []
    assert get(client, "costs", first="2020-01-01", last=today)["error"]["param"] == "first"
    assert get(client, "costs", first="9999-12-31")["error"]["param"] == "first"
    assert get(client, "costs", last="0001-01-01")["total_usd"] == "0"
    assert get(client, "costs", last="9999-12-31")["total_usd"] == "0"
    assert get(api_client(make_key(rival, charlie)), "costs", group_by="subject")["total_usd"] == "0"


def test_an_invoice_is_read_and_downloaded(api_client, key, month, rival, charlie):
    client, outsider = api_client(key), api_client(make_key(rival, charlie))
    place = f"/api/v1/invoices/{month.pk}"

    assert [each["id"] for each in get(client, "invoices")["data"]] == [month.pk]
    assert (client.get(place).json()["number"], client.get(place).json()["total_usd"]) == (month.number, "2.00")
    (charge,) = client.get(f"{place}/lines").json()["data"]
    assert (charge["kind"], charge["subject"], charge["amount_usd"]) == ("training", "ftjob-1", "2.00")
    sheet, pdf = client.get(f"{place}/csv"), client.get(f"{place}/pdf")
    assert sheet.headers["Content-Type"] == "text/csv" and month.number in sheet.content.decode()
    assert month.number in pdf.headers["Content-Disposition"] and pdf.content.startswith(b"%PDF")
    for part in ("", "/lines", "/csv", "/pdf"):
        assert outsider.get(place + part).status_code == 404
        assert api_client().get(place + part).status_code == 401


def test_credit_is_asked_for_and_the_answer_read(api_client, key, organization, vera, rival, charlie):
    client, asked = api_client(key), {"amount_usd": "250", "note": "for March"}

    made = client.post("/api/v1/credit-requests", asked, format="json").json()
    assert (made["status"], made["amount_usd"], made["note"], made["answer"]) == ("open", "250", "for March", None)
    again = client.post("/api/v1/credit-requests", asked, format="json").json()
    assert again["error"]["code"] == "invalid_state"
    note_granted(organization=organization, amount_nano=5 * USD, reason="Enjoy.", by="user_op", now=db_now())
    answered = get(client, f"credit-requests/{made['id']}")
    assert (answered["status"], answered["granted_usd"], answered["answer"]) == ("granted", "5", "Enjoy.")
    assert get(client, "credit-requests")["data"] == [answered]
    viewer = api_client(make_key(organization, vera, scopes=frozenset({"view"})))
    assert viewer.post("/api/v1/credit-requests", asked, format="json").status_code == 403
    assert get(viewer, f"credit-requests/{made['id']}") == answered
    assert api_client(make_key(rival, charlie)).get(f"/api/v1/credit-requests/{made['id']}").status_code == 404


def test_the_billing_profile_is_changed_in_part(api_client, key, organization, bob):
    client = api_client(key)

    changed = client.post("/api/v1/billing/profile", {"legal_name": "Acme GmbH"}, format="json").json()
    assert (changed["legal_name"], changed["chargeback_label"]) == ("Acme GmbH", "team")
    member = api_client(make_key(organization, bob, scopes=MEMBER))
    assert get(member, "billing/profile") == changed
    assert member.post("/api/v1/billing/profile", {}, format="json").status_code == 403
