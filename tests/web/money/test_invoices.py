"""Billing pages: balance, budgets, invoices with files, prices, why anything was charged; and the operator's books."""

import datetime

import pytest

from apps.accounts.models import ApiKey
from apps.billing.books.adjustments import request_adjustment
from apps.billing.books.reconciliation import reconcile
from apps.billing.budgets import Attribution
from apps.billing.invoices import files
from apps.billing.invoices.statements import close_month
from apps.billing.models import Adjustment, BillingProfile, Budget, InvoiceLine, KeyLabel, PoolCost, UsageSeries
from apps.billing.operations import grant_credit, hold, settle_hold
from apps.billing.queries import get_balance
from apps.billing.usage.metering import rate_usage
from apps.billing.usage.storage import record_storage
from apps.catalog.operations import set_price
from apps.catalog.queries import active_price
from apps.core.database.clock import db_now
from apps.core.ids import new_id
from tests.factories.accounts import make_user
from tests.factories.catalog import make_base_model
from tests.factories.finetuning import make_pool
from tests.support.pages import csv_rows, text

USD = 1_000_000_000


@pytest.fixture
def rich(organization):
    grant_credit(
        organization=organization, amount_nano=50 * USD, by="system", reason="", idempotency_key=organization.pk
    )
    return organization


@pytest.fixture
def invoice(rich):
    held = hold(
        organization=rich, purpose="job", source="ftjob-1", amount_nano=9 * USD, by="system", idempotency_key="h",
        attribution=Attribution(labels={"team": "search"}),
    )  # fmt: skip
    settle_hold(hold_id=held.pk, capture_nano=4 * USD, by="system")
    return close_month(
        organization=rich, month=(db_now().date().replace(day=1) + datetime.timedelta(days=32)).replace(day=1)
    )


def test_the_page_shows_credit_holds_and_forecast_to_every_member(rich, client_for, vera):
    hold(organization=rich, purpose="job", source="ftjob-1", amount_nano=9 * USD, by="system", idempotency_key="h")

    page = text(client_for(vera).get("/invoices"))

    assert "$41.00" in page and "$9.00" in page and "ftjob-1" in page
    assert "forecast" in page


def test_only_an_owner_changes_the_profile(rich, client_for, alice, bob):
    body = {"legal_name": "Acme GmbH", "address": "Weg 1", "chargeback_label": "cost-centre"}

    assert client_for(bob).post("/invoices", body).status_code == 403
    assert client_for(alice).post("/invoices", body).status_code == 302

    profile = BillingProfile.objects.get()
    assert (profile.legal_name, profile.chargeback_label, profile.is_daily_report_wanted) == (
        "Acme GmbH",
        "cost-centre",
        False,
    )


@pytest.mark.slow
def test_an_invoice_has_its_lines_its_split_and_both_files(invoice, client_for, vera, charlie, rival):
    browser = client_for(vera)

    page = text(browser.get(f"/invoices/{invoice.pk}"))
    table = b"".join(browser.get(f"/invoices/{invoice.pk}/csv").streaming_content).decode()
    pdf = browser.get(f"/invoices/{invoice.pk}/pdf")

    assert "$4.00" in page and "search" in page
    assert "ftjob-1" in table and "4.00" in table
    assert pdf.content.startswith(b"%PDF-") and pdf["Content-Type"] == "application/pdf"
    for suffix in ("", "/csv", "/pdf"):
        assert client_for(charlie).get(f"/invoices/{invoice.pk}{suffix}").status_code == 404


@pytest.mark.slow
def test_an_invoice_shows_its_lines_in_pages_and_its_pdf_the_first_ones(invoice, client_for, vera, monkeypatch):
    monkeypatch.setattr("apps.billing.invoices.files._MOST_LINES", 1)
    InvoiceLine.objects.bulk_create(
        InvoiceLine(
            organization=invoice.organization, invoice=invoice, position=number, kind="training", quantity=0,
            subject=f"ftjob-{number:03}", label=f"team-{number}", reference="", first_day=invoice.month,
            last_day=invoice.month, nano=0, cents=0,
        )
        for number in range(2, 121)
    )  # fmt: skip
    browser, subjects, url = client_for(vera), [], f"/invoices/{invoice.pk}"
    while url:
        page = browser.get(url)
        assert len(page.context["lines"]) <= 50 and len(page.context["labels"]) <= 101
        subjects += [item["line"].subject for item in page.context["lines"]]
        url = page.context["next"]

    assert subjects == ["ftjob-1", *(f"ftjob-{number:03}" for number in range(2, 121))]
    assert page.context["previous"] and browser.get(f"{page.context['previous']}").context["next"]
    assert len(csv_rows(browser.get(f"/invoices/{invoice.pk}/csv"))) == 120
    words = []
    monkeypatch.setattr(files, "_line", lambda pdf, text, **of: words.append(text))
    browser.get(f"/invoices/{invoice.pk}/pdf")
    assert "119 more lines, $0.00 together: the CSV has all lines." in words


def test_an_expired_key_is_offered_for_no_budget(rich, key, client_for, alice):
    owner = client_for(alice)
    assert f'<option value="{key.key.pk}"' in owner.get("/budgets").content.decode()

    ApiKey.objects.filter(pk=key.key.pk).update(expires_at=db_now())

    assert f'<option value="{key.key.pk}"' not in owner.get("/budgets").content.decode()


@pytest.mark.slow
def test_a_budget_is_set_shown_and_ended(rich, key, client_for, alice, bob):
    body = {
        "scope": "key", "key": key.key.pk, "limit_usd": "12.50", "mode": "block", "thresholds": "50, 100",
    }  # fmt: skip
    assert client_for(bob).post("/budgets", body).status_code == 403

    owner = client_for(alice)
    assert owner.post("/budgets", body).status_code == 302
    page = text(owner.get("/budgets"))
    budget = Budget.objects.get()

    assert (budget.target, budget.thresholds) == (key.key.pk, [50, 100])
    assert "$12.50" in page and key.key.name in page
    assert "reached</div>" not in page
    hold(
        organization=rich, purpose="job", source="ftjob-1", amount_nano=12_500_000_000, by="system",
        idempotency_key="h", attribution=Attribution(key_id=key.key.pk),
    )  # fmt: skip
    page = text(owner.get("/budgets"))
    assert "reached</div>" in page and 'class="over"' in page
    ending = {"budget": budget.pk, "confirm": key.key.name}
    assert "$12.50 a month no longer applies" in text(owner.get(f"/budgets/end?budget={budget.pk}"))
    assert owner.post("/budgets/end", ending).status_code == 302
    assert owner.post("/budgets/end", ending).status_code == 404


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"scope": "label", "label": "team"}, "name=value"),
        ({"scope": "label"}, "Enter a label"),
        ({"scope": "key"}, "Choose an API key."),
        ({"scope": "member"}, "Choose a member."),
        ({"scope": "organization", "thresholds": "half"}, "Whole percentages"),
        ({"scope": "member", "member": "user_unknown"}, "valid choice"),
    ],
)
def test_a_budget_that_makes_no_sense_is_refused_at_its_field(fields, words, rich, client_for, alice):
    body = {"limit_usd": "1", "mode": "block", "thresholds": "50"} | fields

    answer = client_for(alice).post("/budgets", body)

    assert answer.status_code == 422 and words in text(answer)


def test_a_key_gets_labels(rich, key, client_for, alice):
    answer = client_for(alice).post("/budgets/key-labels", {"key": key.key.pk, "labels": "team=search, stage=live"})

    assert answer.status_code == 302
    assert dict(KeyLabel.objects.values_list("name", "value")) == {"team": "search", "stage": "live"}


def test_the_price_book_shows_what_this_customer_pays(rich, rival, client_for, vera, charlie):
    make_base_model("m")
    for owner, nano in ((None, 3 * USD), (rich, 2 * USD)):
        set_price(
            sku="inference:input:m", unit="tokens", price_nano=nano, per=1_000_000, by="u", now=db_now(),
            organization=owner, approved_by="u2" if owner else None,
        )  # fmt: skip
    set_price(sku="warm:m", unit="warm_ms", price_nano=USD, per=3_600_000, by="u", now=db_now())

    ours, theirs = (text(client_for(person).get("/prices")) for person in (vera, charlie))

    assert all("Anneal demo: time kept warm" in page and "hour loaded" in page for page in (ours, theirs))
    assert "Anneal demo: input tokens" in ours and "inference:input" not in ours
    assert "$2.00" in ours and "your own price" in ours and "$3.00" not in ours
    assert "$3.00" in theirs and "$2.00" not in theirs


@pytest.mark.slow
def test_a_job_is_explained_down_to_the_seconds_of_its_attempts(floor, claim, client_for, vera):
    job = floor.job()
    claim().start().succeed(floor.base_model, seconds=20.0)
    job.refresh_from_db()

    page = text(client_for(vera).get(f"/why/{job.hold_id}"))

    assert "20.000 GPU seconds" in page and job.pk in page
    assert job.price_rule_id in page and "Training on CPU, per GPU-hour" in page
    assert "Charge settled, hold released" in page


# --- operators --------------------------------------------------------------------------------------------------------


def test_above_the_limit_a_second_operator_approves(rich, client_for, olga):
    first, second = client_for(olga), client_for(make_user("otto", is_operator=True))
    body = {"amount_usd": "150", "reason": "a bad week", "once": new_id("adj")}

    assert first.post(f"/staff/organizations/{rich.pk}/adjust", body).status_code == 302
    wanted = Adjustment.objects.get()
    first.post(f"/staff/adjustments/{wanted.pk}", {"decision": "approve"})
    assert get_balance(organization=rich).available_nano == 50 * USD
    assert "Approve" not in text(first.get("/staff/books")) and "Approve" in text(second.get("/staff/books"))

    second.post(f"/staff/adjustments/{wanted.pk}", {"decision": "approve"})
    assert get_balance(organization=rich).available_nano == 200 * USD


def test_the_books_show_balances_debts_and_checks(rich, client_for, olga):
    request_adjustment(organization=rich, amount_nano=5 * USD, reason="thanks", by=olga.pk, now=db_now())
    reconcile(now=db_now())

    page = text(client_for(olga).get("/staff/books"))

    assert "$55.00" in page and "thanks" in page
    assert "Lots are wallet and hold" in page and "No debts" in page


def test_the_margin_counts_what_gpus_cost(db, client_for, olga):
    pool = make_pool()
    console = client_for(olga)

    assert "cost not set" in text(console.get("/staff/margin"))
    body = {"pool": pool.pk, "cost_usd": "1.25", "from_day": db_now().date().isoformat()}
    assert console.post("/staff/margin", body).status_code == 302

    assert PoolCost.objects.get().nano_per_gpu_hour == 1_250_000_000
    assert "$1.25/h" in text(console.get("/staff/margin"))
    assert console.get("/staff/margin?month=nonsense").status_code == 200


@pytest.mark.slow
def test_a_price_shows_what_it_would_change_before_it_is_set(floor, claim, client_for, olga):
    floor.job()
    console = client_for(olga)
    body = {"sku": "training:local-cpu", "price_usd": "7.20"}

    shown = console.post("/staff/prices", body)

    assert "1 quoted job keeps the price quoted" in text(shown)
    other = body | {"price_usd": "9", "confirmed": shown.context["form"].previewed()}
    assert "Set this price" in text(console.post("/staff/prices", other)), "another figure is previewed again"
    assert active_price(sku="training:local-cpu").price_nano == 3_600_000_000
    console.post("/staff/prices", body | {"confirmed": shown.context["form"].previewed()})
    assert active_price(sku="training:local-cpu").price_nano == 7_200_000_000


def test_a_line_of_the_ledger_leads_to_why_and_storage_is_explained_as_storage(rich, client_for, vera):
    set_price(sku="storage:bytes", unit="byte_hours", price_nano=1, per=1000, by="u", now=db_now())
    record_storage(organization=rich, byte_count=40 * 10**9, at=db_now())
    rate_usage()
    series = UsageSeries.objects.get()

    usage = text(client_for(vera).get("/usage"))
    assert f'/why/series-{series.pk}">Storage<' in usage and "input tokens" not in usage
    page = text(client_for(vera).get(f"/why/series-{series.pk}"))

    assert "40.0 GBh of files, checkpoints, models" in page
    assert "Requests are added up" not in page
