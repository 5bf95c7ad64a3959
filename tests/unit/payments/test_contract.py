"""The contract covers the whole package, accepts what is right and refuses each kind of mistake."""

import pytest
import stripe

from apps.payments.stripe import client
from tests.twins.stripe import contract


def complaints(name: str, form: str) -> list[str]:
    operation = contract.find(*name.split())
    assert operation is not None
    return [str(found) for found in contract.check(operation, contract.decode(form))]


def test_every_operation_of_the_package_is_read_with_its_parameters() -> None:
    found = contract.operations()

    assert len(found) > 600
    assert [each.name for each in found if each.params is None] == []


def test_the_version_we_pin_is_the_one_the_package_was_made_for() -> None:
    assert stripe.api_version == client.API_VERSION
    assert stripe.VERSION.startswith("16.1.")


@pytest.mark.parametrize(
    ("operation", "form"),
    [
        ("POST /v1/invoices", "customer=c&currency=usd&auto_advance=false&automatic_tax[enabled]=true&metadata[a]=b"),
        ("POST /v1/invoices/in_1/add_lines", "lines[0][description]=a&lines[0][amount]=-5&lines[1][amount]=7"),
        ("POST /v1/checkout/sessions", "mode=setup&customer=c&success_url=https://a&currency=usd"),
        ("GET /v1/events", "created[gte]=5&created[lt]=9&limit=100"),
        ("GET /v1/balance_transactions", "expand[0]=data.source&limit=10"),
    ],
)
def test_a_right_request_passes(operation: str, form: str) -> None:
    assert complaints(operation, form) == []


@pytest.mark.parametrize(
    ("operation", "form", "wrong"),
    [
        ("POST /v1/invoices", "custmer=c", "parameter_unknown: custmer"),
        (
            "POST /v1/invoices",
            "automatic_tax[on]=true&automatic_tax[enabled]=true",
            "parameter_unknown: automatic_tax[on]",
        ),
        ("POST /v1/invoices", "automatic_tax[liability][type]=self", "parameter_missing: automatic_tax[enabled]"),
        (
            "POST /v1/invoices",
            "pending_invoice_items_behavior=exclud",
            "parameter_invalid: pending_invoice_items_behavior",
        ),
        ("POST /v1/invoices", "days_until_due=soon", "parameter_invalid: days_until_due"),
        ("POST /v1/invoices", "auto_advance=no", "parameter_invalid: auto_advance"),
        ("POST /v1/invoices/in_1/add_lines", "lines[0][amont]=5", "parameter_unknown: lines[0][amont]"),
        ("POST /v1/invoices/in_1/add_lines", "expand[0]=x", "parameter_missing: lines"),
        ("POST /v1/invoiceitems", "customer=c&price=price_1", "parameter_unknown: price"),
    ],
)
def test_a_mistake_is_named(operation: str, form: str, wrong: str) -> None:
    assert wrong in complaints(operation, form)


@pytest.mark.parametrize("name", ["POST /v1/subscription_items/si_1/usage_records", "POST /v1/invoces"])
def test_what_the_package_cannot_ask_is_no_operation(name: str) -> None:
    assert contract.find(*name.split()) is None
