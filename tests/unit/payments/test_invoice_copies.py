"""The copy of a monthly invoice at Stripe has our lines to the cent, or is not finalized."""

import datetime
import logging
from typing import Any

import pytest

from apps.accounts.models import Organization
from apps.billing.invoices.statements import close_month
from apps.billing.models import Invoice
from apps.core.database.clock import db_now
from apps.payments.stripe import invoice_copies
from apps.payments.stripe.errors import StripeUnavailable
from tests.support.payments import paid_topup, spend
from tests.twins.stripe import invoices
from tests.twins.stripe.twin import _HANDLERS, Fault, Twin

pytestmark = pytest.mark.django_db


@pytest.fixture
def invoice(near_twin: Twin, organization: Organization) -> Invoice:
    """The month's invoice of a customer who ran three jobs."""
    near_twin.tax_percent = 20
    paid_topup(near_twin, organization, 5000)
    for cents in (1234, 66, 1):
        spend(organization, cents)
    month = (db_now() + datetime.timedelta(days=32)).date().replace(day=1)
    written = close_month(organization=organization, month=month)
    assert written is not None
    return written


def copies(twin: Twin) -> list[dict[str, Any]]:
    return [each for each in twin.of_kind("invoice") if each["metadata"].get("invoice_id")]


def test_a_copy_has_our_lines_and_is_paid_from_credit(near_twin: Twin, invoice: Invoice) -> None:
    for invoice_id in invoice_copies.list_uncopied():
        invoice_copies.copy_invoice(invoice_id=invoice_id, now=db_now())

    copy = copies(near_twin)[0]
    amounts = [line["amount"] for line in copy["lines"]["data"]]
    assert amounts == [*invoice.lines.order_by("position").values_list("cents", flat=True), -1301]
    assert (copy["status"], copy["total"], copy["total_taxes"]) == ("paid", 0, [])
    assert invoice_copies.list_uncopied() == []


def test_more_lines_than_stripe_takes_become_one_of_each_kind(
    near_twin: Twin, invoice: Invoice, monkeypatch: Any
) -> None:
    monkeypatch.setattr(invoice_copies, "_MAX_LINES", 2)

    invoice_copies.copy_invoice(invoice_id=invoice.pk, now=db_now())

    assert [line["amount"] for line in copies(near_twin)[0]["lines"]["data"]] == [1301, -1301]


@pytest.mark.parametrize("operation", ["/invoices", "/add_lines", "/finalize"])
def test_a_copy_whose_answer_was_lost_is_written_once(near_twin: Twin, invoice: Invoice, operation: str) -> None:
    near_twin.faults.append(Fault("after", operation, times=3))
    with pytest.raises(StripeUnavailable):
        invoice_copies.copy_invoice(invoice_id=invoice.pk, now=db_now())
    near_twin.faults.clear()

    invoice_copies.copy_invoice(invoice_id=invoice.pk, now=db_now())

    assert [copy["status"] for copy in copies(near_twin)] == ["paid"]


@pytest.mark.parametrize("operation", ["/invoices", "/add_lines", "/finalize"])
@pytest.mark.parametrize("days", [1, 40])
def test_a_copy_that_failed_is_written_once_whenever_stripe_answers_again(
    near_twin: Twin, invoice: Invoice, operation: str, days: int
) -> None:
    near_twin.faults.append(Fault("after", operation, times=3))
    with pytest.raises(StripeUnavailable):
        invoice_copies.copy_invoice(invoice_id=invoice.pk, now=db_now())
    near_twin.faults.clear()
    near_twin._kept.clear()  # keys are forgotten after a day

    assert invoice_copies.list_uncopied() == [invoice.pk]
    for hour in range(2):
        now = db_now() + datetime.timedelta(days=days, hours=hour)
        invoice_copies.copy_invoice(invoice_id=invoice.pk, now=now)

    (copy,) = copies(near_twin)
    assert (copy["status"], copy["subtotal"]) == ("paid", 0)
    invoice.refresh_from_db()
    assert invoice.external_id == copy["id"]


def test_a_draft_of_the_same_attempt_is_gone_on_with(near_twin: Twin, invoice: Invoice) -> None:
    late = db_now() + datetime.timedelta(days=3)
    near_twin.faults.append(Fault("after", "/add_lines", times=3))
    with pytest.raises(StripeUnavailable):
        invoice_copies.copy_invoice(invoice_id=invoice.pk, now=late)
    near_twin.faults.clear()

    invoice_copies.copy_invoice(invoice_id=invoice.pk, now=late + datetime.timedelta(minutes=5))

    (copy,) = copies(near_twin)
    assert [line["amount"] for line in copy["lines"]["data"]] == [1234, 66, 1, -1301]


def test_lines_that_stripe_adds_up_otherwise_are_not_finalized_and_page(
    near_twin: Twin, invoice: Invoice, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def add_one_more(twin: Twin, invoice: str, *, lines: list[Any], **rest: Any) -> Any:
        return add_lines(twin, invoice, lines=[*lines, {"amount": "1"}], **rest)

    add_lines = invoices.add_lines
    monkeypatch.setitem(_HANDLERS, "POST /v1/invoices/{invoice}/add_lines", add_one_more)

    invoice_copies.copy_invoice(invoice_id=invoice.pk, now=db_now())

    assert [copy["status"] for copy in copies(near_twin)] == ["draft"]
    assert [record.levelno for record in caplog.records if record.levelno >= logging.CRITICAL] == [logging.CRITICAL]
