"""Ids, money, errors, audit: the small values everything else is built of."""

from decimal import Decimal

import pytest
from django.conf import settings
from hypothesis import given
from hypothesis import strategies as st

from apps.accounts.models import Organization
from apps.core import audit
from apps.core.audit import NoTransaction
from apps.core.errors import DomainError, NotFound, QuotaExceeded, RateLimited
from apps.core.http.asgi import error_headers
from apps.core.ids import new_id, new_ulid, ulid_of
from apps.core.models import AuditEntry
from apps.core.money import dollars, nano_to_usd, rated, usd_decimal, usd_to_nano

quantities = st.integers(0, 10**12)
prices = st.integers(0, 10**12)
pers = st.integers(1, 10**9)


def test_ids_sort_by_time_and_never_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = []
    for second in range(100):
        monkeypatch.setattr("apps.core.ids.time.time", lambda second=second: 1_700_000_000 + second)
        ids.append(new_id("ds"))

    assert ids == sorted(ids)
    assert len({new_ulid() for _ in range(1000)}) == 1000


def test_the_ulid_of_an_id() -> None:
    identifier = new_id("ftjob", "-")

    assert identifier == f"ftjob-{ulid_of(identifier)}"
    with pytest.raises(ValueError, match="ULID"):
        ulid_of("ftjob-short")


@given(quantities, prices, pers)
def test_a_price_is_exact_to_half_a_nano(quantity: int, price: int, per: int) -> None:
    exact = Decimal(quantity) * price / per

    assert abs(rated(quantity=quantity, price_nano=price, per=per) - exact) <= Decimal("0.5")


@given(st.lists(st.integers(0, 10**6), max_size=30), prices, pers)
def test_posting_differences_of_cumulative_prices_adds_up(parts: list[int], price: int, per: int) -> None:
    posted, total = 0, 0
    for part in parts:
        total += part
        difference = rated(quantity=total, price_nano=price, per=per) - posted
        assert difference >= 0
        posted += difference

    assert posted == rated(quantity=sum(parts), price_nano=price, per=per)


@given(st.integers(-(10**18), 10**18))
def test_dollars_and_nano_dollars_are_the_same_money(nano: int) -> None:
    assert usd_to_nano(nano_to_usd(nano)) == nano


@given(st.integers(-(10**18), 10**18))
def test_an_amount_is_written_exactly_and_in_plain_digits(nano: int) -> None:
    for written in (usd_decimal(nano), dollars(nano).replace("$", "").replace(",", "")):
        assert set(written) <= set("-.0123456789")
        assert usd_to_nano(Decimal(written)) == nano


@pytest.mark.parametrize(
    ("nano", "decimal", "words"),
    [
        (100, "0.0000001", "$0.0000001"),
        (0, "0", "$0.00"),
        (2_500_000_000, "2.5", "$2.50"),
        (-70_000_000, "-0.07", "-$0.07"),
        (100_000_000_000_000, "100000", "$100,000.00"),
    ],
)
def test_amounts_in_the_api_and_in_messages(nano: int, decimal: str, words: str) -> None:
    assert (usd_decimal(nano), dollars(nano)) == (decimal, words)


def test_a_tenth_decimal_is_refused() -> None:
    with pytest.raises(ValueError, match="nine decimals"):
        usd_to_nano(Decimal("0.0000000001"))


def test_an_error_carries_openais_members_its_help_and_its_own_data() -> None:
    error = QuotaExceeded("No credit left.", param="model", balance_nano=3)

    assert error.as_openai() == {
        "error": {
            "message": "No credit left.", "type": "insufficient_quota", "param": "model",
            "code": "insufficient_quota", "balance_nano": 3,
            "doc_url": f"{settings.PUBLIC_URL}/help/errors#insufficient_quota",
        }
    }  # fmt: skip


@pytest.mark.parametrize(
    ("error", "headers"),
    [
        (QuotaExceeded("x"), {"x-should-retry": "false"}),
        (RateLimited("x", retry_after_seconds=9), {"Retry-After": "9"}),
        (NotFound("x"), {}),
    ],
)
def test_an_error_tells_a_client_whether_to_try_again(error: DomainError, headers: dict[str, str]) -> None:
    assert error_headers(error) == headers


def test_an_audit_entry_says_who_did_what(organization: Organization) -> None:
    audit.record(organization=organization, by="user_1", action="a.b", target="x_1", before=1)

    entry = AuditEntry.objects.get(target="x_1")
    assert (entry.organization, entry.actor, entry.action, entry.details) == (
        organization, "user_1", "a.b", {"before": 1},
    )  # fmt: skip


@pytest.mark.django_db(transaction=True)
def test_nothing_is_audited_outside_of_a_transaction() -> None:
    with pytest.raises(NoTransaction):
        audit.record(organization=None, by="system", action="a.b", target="x_1")
