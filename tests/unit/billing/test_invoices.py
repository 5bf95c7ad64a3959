"""Every charge is on one invoice, cents never drift, late usage follows, and any line leads to what it was for."""

import csv
import datetime
import io
import re
import zlib
from typing import Any

import pytest
from django.core import mail
from django.db import DatabaseError, transaction
from django.utils.translation import override
from hypothesis import given, settings
from hypothesis import strategies as st

from apps.accounts.login.key_operations import IssuedKey, issue_member_token
from apps.accounts.models import Membership, Notification, Organization, User
from apps.billing.budget_settings import set_budget, set_key_labels
from apps.billing.budgets import Attribution, get_states
from apps.billing.invoices import statements
from apps.billing.invoices.files import CSV_HEADER, csv_rows, pdf_of
from apps.billing.invoices.statements import cents_of, close_month, close_months, sum_by_label
from apps.billing.models import CreditLot, Hold, Invoice, InvoiceLine, StorageSample, UsageSeries
from apps.billing.operations import grant_credit, grant_paid_credit, refund_source
from apps.billing.queries import get_balance, get_ledger_sum_nano
from apps.billing.usage import labels
from apps.billing.usage.charge_details import find_charge, list_hours, list_postings
from apps.billing.usage.metering import rate_usage, record_usage
from apps.billing.usage.storage import post_rebates, record_storage
from apps.billing.usage.sums import Group, sum_by_group
from apps.catalog.models import PriceRule
from apps.catalog.operations import set_price
from apps.catalog.pricing import GB_MONTH_BYTE_HOURS, STORAGE_SKU, Tier
from apps.core.database.clock import db_now
from apps.core.messages import outbox
from apps.core.money import NANO_PER_CENT, rated
from tests.factories.money import USD, give_credit, spend
from tests.factories.usage import list_spending, make_record, sum_by

OCTOBER, NOVEMBER = datetime.date(2026, 10, 1), datetime.date(2026, 11, 1)
IN_OCTOBER = datetime.datetime(2026, 10, 7, 12, 30, tzinfo=datetime.UTC)
LONG_AGO = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


@pytest.fixture
def rich(organization: Organization) -> Organization:
    give_credit(organization, 1000 * USD)
    return organization


def test_an_invoice_is_mailed_to_owners_who_want_it(rich, alice: User, ann: User):
    train(rich, 5 * USD)
    invoice = close_month(organization=rich, month=OCTOBER)
    assert invoice is not None
    outbox.deliver_due(lane="mail")

    [message] = mail.outbox
    assert message.to == [alice.email] and message.subject == f"Invoice {invoice.number} for October 2026"
    assert "$5.00" in message.body and f"/invoices/{invoice.pk}" in message.body
    assert Notification.objects.get().path == f"/invoices/{invoice.pk}"


def price(sku: str, nano: int, *, unit: str = "tokens", per: int = 1_000_000, **fields: Any) -> PriceRule:
    return set_price(sku=sku, unit=unit, price_nano=nano, per=per, by="user_1", now=LONG_AGO, **fields)


def use(organization: Organization, rule: PriceRule, tokens: int, *, number: int = 1, **fields: Any) -> None:
    values = {
        "id": f"use_{number:026}", "organization_id": organization.pk, "key_id": "", "model_name": "m", "slice_id": "",
        "input_price_id": rule.pk, "output_price_id": None, "input_tokens": tokens, "output_tokens": 0,
        "occurred_at": IN_OCTOBER,
    }  # fmt: skip
    record_usage(records=[make_record(**values | fields)])
    rate_usage()


def train(organization: Organization, nano: int, source: str = "ftjob-1", **whose: Any) -> Hold:
    held = spend(organization, nano, source, held_nano=2 * nano, attribution=Attribution(**whose))
    Hold.objects.filter(pk=held.pk).update(closed_at=IN_OCTOBER)
    return held


def test_a_month_is_invoiced_once_line_by_line_and_split_by_label(
    rich, key: IssuedKey, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(statements, "_LINES_AT_ONCE", 1)
    monkeypatch.setattr(labels, "_ROWS_AT_ONCE", 1)
    set_key_labels(organization=rich, key_id=key.key.pk, labels={"team": "search"}, by="user_1")
    use(rich, price("inference:input:m", 2 * USD), 3_000_000, key_id=key.key.pk)
    held = train(rich, 5 * USD, labels={"team": "ads"})

    invoice, again = (close_month(organization=rich, month=OCTOBER) for _ in range(2))

    assert invoice == again
    assert (invoice.total_nano, invoice.total_cents) == (11 * USD, 1100)
    lines = list(invoice.lines.order_by("position"))
    assert [(line.kind, line.nano, line.label) for line in lines] == [
        ("training", 5 * USD, "ads"),
        ("inference", 6 * USD, "search"),
    ]
    assert (lines[0].reference, lines[1].quantity, lines[1].key_id) == (held.pk, 3_000_000, key.key.pk)
    assert sum_by_label(invoice) == ({"search": 600, "ads": 500}, None)
    assert sum_by_label(invoice, most=1) == ({"search": 600}, 500)


def test_a_judge_is_charged_to_the_label_of_its_jobs_key_in_budgets_invoices_and_exports(
    rich, key: IssuedKey, alice: User
):
    set_key_labels(organization=rich, key_id=key.key.pk, labels={"team": "search"}, by=alice.pk)
    membership = Membership.objects.get(organization=rich, user=alice)
    judge = issue_member_token(membership=membership, now=db_now(), name="judge", made_with=key.key).key.pk
    playground = issue_member_token(membership=membership, now=db_now()).key.pk
    rule = price("inference:input:m", 2 * USD)
    for number, key_id in enumerate((key.key.pk, judge, playground), 1):
        use(rich, rule, 1_000_000, number=number, key_id=key_id)
    budget = set_budget(
        organization=rich, scope="label", target="team=search", limit_nano=USD, mode="alert", by=alice.pk, now=db_now()
    )
    october = {"organization": rich, "first": OCTOBER, "last": NOVEMBER}

    spent = get_states(organization=rich, budgets=[budget], now=IN_OCTOBER)[budget.pk][0]
    exported = sum_by(list_spending(**october), lambda line: line.labels.get("team", ""))
    summed = sum_by_group(**october, group=Group.LABEL, label="team", most=9).largest
    invoice = close_month(organization=rich, month=OCTOBER)

    assert (spent, exported, summed) == (4 * USD, {"search": 4 * USD, "": 2 * USD}, {"search": 4 * USD, "": 2 * USD})
    assert sum_by_label(invoice) == ({"search": 400, "": 200}, None)


def test_late_usage_and_late_refunds_are_on_the_next_invoice_with_their_own_days(rich):
    rule = price("inference:input:m", 2 * USD)
    train(rich, 5 * USD)
    use(rich, rule, 1_000_000)
    close_month(organization=rich, month=OCTOBER)

    use(rich, rule, 500_000, number=2)
    refund_source(organization=rich, source="ftjob-1", by="system", reason="our fault")
    later = close_month(organization=rich, month=NOVEMBER)

    assert [(line.kind, line.nano, line.first_day.month) for line in later.lines.order_by("position")] == [
        ("refund", -5 * USD, 10),
        ("inference", 1 * USD, 10),
    ]
    assert later.total_cents == -400


def test_months_close_two_days_after_they_end_and_an_idle_organization_gets_nothing(rich, rival, monkeypatch):
    train(rich, 5 * USD)

    early = datetime.datetime(2026, 11, 2, 23, tzinfo=datetime.UTC)
    assert close_months(now=early) == 0
    assert close_months(now=early + datetime.timedelta(hours=2)) == 1
    monkeypatch.setattr(statements, "close_month", lambda **of: pytest.fail(f"{of} has nothing to invoice"))
    assert close_months(now=early + datetime.timedelta(hours=3)) == 0
    assert Invoice.objects.get().organization == rich


@pytest.mark.slow
@settings(max_examples=settings().max_examples // 4)
@given(months=st.lists(st.lists(st.integers(1, 5 * NANO_PER_CENT), max_size=4), min_size=1, max_size=6))
def test_cents_of_any_number_of_months_stay_within_half_a_cent_of_the_ledger(
    django_db_setup, django_db_blocker, months
):
    with django_db_blocker.unblock(), transaction.atomic():
        organization = Organization.objects.create(name="Cents", slug="cents")
        grant_credit(organization=organization, amount_nano=1000 * USD, by="system", reason="", idempotency_key="cents")
        spent = 0
        for number, parts in enumerate(months):
            for part, nano in enumerate(parts):
                train(organization, nano, f"ftjob-{number}-{part}")
                spent += nano
            close_month(organization=organization, month=datetime.date(2026 + number, 12, 1))
            cents = sum(Invoice.objects.values_list("total_cents", flat=True))
            assert abs(cents * NANO_PER_CENT - spent) <= NANO_PER_CENT // 2
        assert sum(InvoiceLine.objects.values_list("cents", flat=True)) == cents_of(spent)
        transaction.set_rollback(True)


def test_an_invoice_is_frozen(rich):
    train(rich, 5 * USD)
    invoice = close_month(organization=rich, month=OCTOBER)

    for change in (
        lambda: Invoice.objects.filter(pk=invoice.pk).update(total_cents=1),
        lambda: InvoiceLine.objects.update(nano=1),
        lambda: invoice.delete(),
    ):
        with pytest.raises(DatabaseError), transaction.atomic():
            change()


@pytest.mark.slow
def test_the_files_hold_every_line_and_cents_that_add_up(rich):
    use(rich, price("inference:input:m", 333_333_333), 1_234_567)
    train(rich, 1_234_567_891, labels={"team": "Суперкоманда"})
    invoice = close_month(organization=rich, month=OCTOBER)

    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(CSV_HEADER)
    writer.writerows(csv_rows(invoice))
    rows = list(csv.DictReader(io.StringIO(text.getvalue())))
    pdf = pdf_of(invoice)

    assert sum(round(float(row["amount_usd"]) * 100) for row in rows) == invoice.total_cents
    assert rows[0]["label"] == "Суперкоманда"
    assert pdf.startswith(b"%PDF-") and len(pdf) > 1000


@pytest.mark.parametrize(
    ("language", "texts"),
    [
        (
            "en",
            ["Invoice ", "October 2026, issued ", "Kind", "training", "nothing is due with", "Total $"],
        ),
        ("de", ["Rechnung ", "Oktober 2026, ausgestellt am ", "Art", "Training", "nichts zu zahlen", "Summe $"]),
    ],
)
def test_the_pdf_is_in_the_language_of_its_reader(rich, language: str, texts: list[str]) -> None:
    train(rich, 1_234_567_891)
    invoice = close_month(organization=rich, month=OCTOBER)
    with override(language):
        pdf = pdf_of(invoice)

    streams = re.findall(rb"stream\r?\n(.*?)\r?\nendstream", pdf, re.DOTALL)
    shown = "".join(zlib.decompress(each).decode("latin-1") for each in streams if each[:1] == b"x")
    assert [text for text in texts if text not in shown] == []


# --- storage and volume -----------------------------------------------------------------------------------------------


def test_storage_is_sampled_once_an_hour_and_charged_by_the_byte_hour(rich):
    rule = price(STORAGE_SKU, USD // 10, unit="byte_hours", per=GB_MONTH_BYTE_HOURS)
    for minute in (1, 31):
        record_storage(organization=rich, byte_count=73 * 10**9, at=IN_OCTOBER.replace(minute=minute))
    record_storage(organization=rich, byte_count=73 * 10**9, at=IN_OCTOBER + datetime.timedelta(hours=1))

    rate_usage()

    series = UsageSeries.objects.get()
    assert (StorageSample.objects.count(), series.quantity) == (2, 146 * 10**9)
    assert series.posted_nano == rated(quantity=146 * 10**9, price_nano=rule.price_nano, per=rule.per) == USD // 50


def test_storage_without_a_price_costs_nothing(rich):
    assert not record_storage(organization=rich, byte_count=10**9, at=IN_OCTOBER)


def test_a_months_volume_beyond_a_tier_is_given_back_as_it_grows_and_once(rich):
    rule = price("inference:input:m", 10 * USD, tiers=[Tier(1_000_000, 4 * USD)])
    use(rich, rule, 1_500_000)

    posted = [post_rebates(now=IN_OCTOBER), post_rebates(now=IN_OCTOBER)]
    use(rich, rule, 500_000, number=2, key_id="key_2")
    posted.append(post_rebates(now=IN_OCTOBER))

    assert posted == [3 * USD, 0, 3 * USD]
    assert get_balance(organization=rich).available_nano == (1000 - 14) * USD
    assert get_ledger_sum_nano() == 0
    invoice = close_month(organization=rich, month=OCTOBER)
    assert invoice.total_nano == 14 * USD


def test_a_months_volume_goes_on_at_a_new_price(rich):
    first = price("inference:input:m", 10 * USD, tiers=[Tier(1_000_000, 4 * USD)])
    use(rich, first, 600_000)
    new = {"unit": "tokens", "price_nano": 20 * USD, "per": 1_000_000, "tiers": [Tier(1_000_000, 5 * USD)]}
    second = set_price(sku=first.sku, by="user_1", now=db_now(), **new)
    posted = []
    for number, (rule, tokens) in enumerate(((second, 600_000), (first, 100_000))):  # the last one arrives late
        use(rich, rule, tokens, number=2 + number)
        posted.append(post_rebates(now=IN_OCTOBER))

    assert posted == [3 * USD, 3 * USD // 2]  # 200,000 and 100,000 tokens above the tier, for $5 instead of $20
    assert get_balance(organization=rich).available_nano == (1000 - 19) * USD + 9 * USD // 2


def test_a_rebate_returns_to_the_lots_that_paid_last(organization):
    for number in (1, 2):
        grant_paid_credit(organization=organization, amount_nano=10 * USD, reference=f"stripe:pi:{number}", by="stripe")
    first, second = CreditLot.objects.order_by("created_at")
    rule = price("inference:input:m", 10 * USD, tiers=[Tier(1_000_000, 4 * USD)])
    left = []
    for number, tokens in enumerate((1_000_000, 400_000, 200_000)):  # of the second lot from the second use on
        use(organization, rule, tokens, number=number, key_id=f"key_{number}")
        post_rebates(now=IN_OCTOBER)
        left.append(dict(CreditLot.objects.values_list("pk", "remaining_nano")))

    assert [each.pop(first.pk) for each in left] == [0, 0, 0]
    assert left == [{second.pk: each * USD // 10} for each in (100, 84, 76)]


# --- why --------------------------------------------------------------------------------------------------------------


def test_a_line_leads_to_the_hours_of_its_tokens_and_to_the_postings_of_its_job(rich, rival):
    rule = price("inference:input:m", 2 * USD)
    for number, hour in enumerate((1, 1, 5)):
        use(rich, rule, 100, number=number, occurred_at=IN_OCTOBER.replace(hour=hour))
    held = train(rich, 5 * USD)
    invoice = close_month(organization=rich, month=OCTOBER)
    of_job, of_tokens = invoice.lines.order_by("position")

    tokens = find_charge(organization=rich, reference=of_tokens.pk)
    job = find_charge(organization=rich, reference=of_job.pk)

    hours = list_hours(organization=rich, charge=tokens)
    assert [(hour.at.hour, hour.requests, hour.quantity) for hour in hours] == [(1, 2, 200), (5, 1, 100)]
    assert job.hold == held
    assert [posted.kind for posted in list_postings(organization=rich, hold=held)] == ["hold", "settle"]
    series = UsageSeries.objects.get()
    assert find_charge(organization=rich, reference=f"series-{series.pk}").nano == series.posted_nano
    for reference in (of_job.pk, held.pk, f"series-{series.pk}", "series-x", "line_none", "../etc"):
        assert find_charge(organization=rival, reference=reference) is None


def test_a_closed_book_is_never_reopened_by_the_clock(rich):
    """An invoice keeps the price of its time, also after a price change."""
    rule = price("inference:input:m", 2 * USD)
    use(rich, rule, 1_000_000)
    close_month(organization=rich, month=OCTOBER)
    set_price(sku=rule.sku, unit="tokens", price_nano=9 * USD, per=1_000_000, by="user_1", now=db_now())

    assert rate_usage() == 0
    assert close_month(organization=rich, month=NOVEMBER) is None
    assert InvoiceLine.objects.get().price_rule == rule
