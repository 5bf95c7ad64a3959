"""Prices of one customer, of a coming month and of volume; no two at one time."""

import datetime

import pytest
from django.db import IntegrityError, ProgrammingError, transaction
from hypothesis import given
from hypothesis import strategies as st

from apps.accounts.models import Organization
from apps.catalog.models import PriceRequest, PriceRule
from apps.catalog.operations import set_price
from apps.catalog.price_requests import approve_price, is_gift, list_waiting_prices, reject_price, request_price
from apps.catalog.pricing import STORAGE_SKU, Tier, tiered_nano
from apps.catalog.queries import active_price, list_active_prices
from apps.core.errors import InvalidState, InvalidValue, PermissionDenied
from apps.core.money import rated

NOW = datetime.datetime(2026, 11, 21, 12, tzinfo=datetime.UTC)
DAY = datetime.timedelta(days=1)
SKU = "inference:input:m"


def price(nano: int, **fields) -> PriceRule:
    return set_price(
        **({"sku": SKU, "unit": "tokens", "price_nano": nano, "per": 1_000_000, "by": "user_1", "now": NOW} | fields)
    )


@pytest.mark.django_db
def test_a_customers_own_price_is_theirs_alone(organization: Organization, rival: Organization) -> None:
    general, own = price(100), price(70, organization=organization, approved_by="user_2")

    assert active_price(sku=SKU, organization=organization, now=NOW) == own
    assert active_price(sku=SKU, organization=rival, now=NOW) == general
    assert list_active_prices(prefix="inference:", organization=organization, now=NOW)[0] == own
    assert list_active_prices(prefix="inference:", now=NOW)[0] == general


@pytest.mark.django_db
def test_batches_pay_half_of_each_price_rounded_up_and_never_nothing(organization: Organization, settings) -> None:
    price(101, tiers=[Tier(10, 50), Tier(20, 1)])
    general = price_of_batches()
    assert (general.price_nano, [tier["price_nano"] for tier in general.tiers]) == (51, [25, 1])
    price(0, organization=organization, approved_by="user_2")
    own = price_of_batches(organization)
    assert (own.price_nano, own.organization_id, own.approved_by) == (0, organization.pk, "user_2")

    set_price(sku=f"{SKU}:batch", unit="tokens", price_nano=90, per=1_000_000, by="user_1", now=NOW + DAY)
    assert price_of_batches(now=NOW + DAY).price_nano == 90
    settings.BATCH_REDUCTION_PERCENT = 20
    price(1_000, now=NOW + 2 * DAY)
    assert price_of_batches(now=NOW + 2 * DAY).price_nano == 800
    assert not active_price(sku=f"{SKU}:batch:batch", now=NOW + 2 * DAY)


def price_of_batches(organization: Organization | None = None, *, now: datetime.datetime = NOW) -> PriceRule:
    found = active_price(sku=f"{SKU}:batch", organization=organization, now=now)
    assert found
    return found


def ask(organization: Organization | None, **fields) -> PriceRequest:
    asked = {"sku": SKU, "price_nano": 0, "per": 1_000_000, "tiers": (), "effective_from": None}
    return request_price(organization=organization, by="user_1", now=NOW, **(asked | fields))


@pytest.mark.django_db
@pytest.mark.parametrize("is_own", [True, False])
def test_a_customers_own_price_or_a_price_of_nothing_for_everybody_waits_for_a_second_operator(
    organization: Organization, is_own: bool
) -> None:
    customer = organization if is_own else None
    general, wanted = price(100), ask(customer)

    with pytest.raises(PermissionDenied):
        approve_price(request_id=wanted.pk, by="user_1", now=NOW)
    assert active_price(sku=SKU, organization=customer, now=NOW) == general
    approve_price(request_id=wanted.pk, by="user_2", now=NOW + DAY)
    with pytest.raises(InvalidState):
        reject_price(request_id=wanted.pk, by="user_2", now=NOW + DAY)

    found = active_price(sku=SKU, organization=customer, now=NOW + DAY)
    assert found and (found.price_nano, found.created_by, found.approved_by) == (0, "user_1", "user_2")
    assert found.organization == customer


@pytest.mark.django_db
def test_a_rejected_price_never_counts(organization: Organization) -> None:
    wanted = ask(organization, effective_from=NOW + DAY)

    reject_price(request_id=wanted.pk, by="user_1", now=NOW)

    with pytest.raises(InvalidState):
        approve_price(request_id=wanted.pk, by="user_2", now=NOW)
    assert not PriceRule.objects.exists() and not list_waiting_prices()


@pytest.mark.django_db
@pytest.mark.parametrize("approved_by", [None, "user_1"])
def test_the_database_itself_wants_two_people_for_a_customers_price(organization: Organization, approved_by) -> None:
    with pytest.raises(IntegrityError, match="price_own_by_two"), transaction.atomic():
        price(0, organization=organization, approved_by=approved_by)


@pytest.mark.django_db
def test_a_coming_price_takes_over_at_its_moment_and_another_fits_in_before_it() -> None:
    first = price(100)
    coming = price(300, effective_from=NOW + 10 * DAY)
    between = price(200, effective_from=NOW + 5 * DAY)

    found = [active_price(sku=SKU, now=NOW + days * DAY) for days in (1, 5, 9, 10, 99)]
    assert found == [first, between, between, coming, coming]
    price(90, sku=f"{SKU}:batch", effective_from=NOW + 7 * DAY)
    with pytest.raises(InvalidValue, match=f"Another price of {SKU}:batch already"):
        price(300, effective_from=NOW + 7 * DAY)
    assert active_price(sku=SKU, now=NOW + 7 * DAY) == between


@pytest.mark.django_db
def test_what_was_used_keeps_its_price() -> None:
    with pytest.raises(InvalidValue, match="in the past"):
        price(1, effective_from=NOW - DAY)


@pytest.mark.django_db
def test_the_database_keeps_two_prices_from_one_moment() -> None:
    rule = price(100, effective_from=NOW + DAY)

    with pytest.raises(IntegrityError), transaction.atomic():
        PriceRule.objects.create(
            sku=SKU, unit="tokens", price_nano=1, per=1, created_by="x", effective_from=NOW, effective_to=NOW + 2 * DAY
        )
    assert rule.effective_to is None


@pytest.mark.django_db
@pytest.mark.parametrize("tiers", [[Tier(0, 50)], [Tier(10, 200)], [Tier(10, 50), Tier(5, 40)], [Tier(10, -1)]])
def test_tiers_go_up_in_volume_and_down_in_price(tiers: list[Tier]) -> None:
    with pytest.raises(InvalidValue):
        price(100, sku=STORAGE_SKU, unit="byte_hours", tiers=tiers)


@given(
    quantity=st.integers(0, 10**12),
    prices=st.lists(st.integers(0, 10**9), min_size=1, max_size=4),
    bounds=st.lists(st.integers(1, 10**12), min_size=3, max_size=3, unique=True),
)
def test_each_band_of_a_month_costs_its_own_price(quantity: int, prices: list[int], bounds: list[int]) -> None:
    first, *rest = sorted(prices, reverse=True)
    tiers = [Tier(bound, nano) for bound, nano in zip(sorted(bounds), rest, strict=False)]

    cost = tiered_nano(quantity=quantity, price_nano=first, per=7, tiers=tiers)

    ends = [*(tier.from_units for tier in tiers), max(quantity, 10**13)]
    bands = zip([0, *ends], ends, [first, *(tier.price_nano for tier in tiers)], strict=False)
    exact = sum(max(min(quantity, end) - begin, 0) * nano for begin, end, nano in bands)
    assert abs(cost * 7 - exact) <= 7
    assert cost <= rated(quantity=quantity, price_nano=first, per=7)


@pytest.mark.django_db
@pytest.mark.parametrize("approved_by", [None, "user_1"])
def test_the_database_itself_wants_two_people_for_a_price_of_nothing(approved_by) -> None:
    with pytest.raises(ProgrammingError, match="Cannot insert"), transaction.atomic():
        price(0, approved_by=approved_by)


def gives(nano: int, *tiers: Tier, now: datetime.datetime = NOW, sku: str = SKU) -> bool:
    return is_gift(
        organization=None, sku=sku, price_nano=nano, per=1_000_000, tiers=tiers, effective_from=None, now=now
    )


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("nano", "tiers", "gift"),
    [(0, [], True), (9, [Tier(10, 0)], True), (9, [Tier(10, 1)], False), (100, [Tier(10, 49)], True)],
)
def test_a_volume_that_costs_next_to_nothing_is_a_gift_too(nano: int, tiers: list[Tier], gift: bool) -> None:
    if nano == 100:
        price(100)
    assert gives(nano, *tiers, now=NOW + DAY) is gift


@pytest.mark.django_db
def test_a_price_below_half_of_one_of_the_last_month_is_a_gift_however_many_steps_lead_to_it() -> None:
    price(100, tiers=[Tier(10, 30)])

    assert gives(1, now=NOW + DAY) and gives(49, Tier(10, 30), now=NOW + DAY)
    assert gives(100, Tier(10, 14), now=NOW + DAY)
    assert gives(100, Tier(5, 30), now=NOW + DAY), "the low tier would begin earlier"
    assert not gives(50, Tier(10, 15), now=NOW + DAY)
    price(50, tiers=[Tier(10, 15)], now=NOW + DAY)
    assert gives(25, Tier(10, 15), now=NOW + 2 * DAY)
    assert not gives(25, Tier(10, 15), now=NOW + 32 * DAY)


@pytest.mark.django_db
def test_a_price_of_two_operators_is_what_later_ones_are_compared_with() -> None:
    price(100)
    price(10, now=NOW + DAY, approved_by="user_2")

    assert not gives(20, now=NOW + 2 * DAY) and gives(4, now=NOW + 2 * DAY)


@pytest.mark.django_db
def test_the_first_price_of_a_sku_is_compared_with_others_of_its_unit() -> None:
    price(1000, now=NOW - 40 * DAY)

    assert gives(9, sku="inference:input:new") and not gives(10, sku="inference:input:new")
    assert not gives(1, sku="storage:bytes"), "nothing else has this unit"
