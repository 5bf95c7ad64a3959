"""Reservations never exceed what was leased, and unused money goes back."""

import asyncio
import math
import random

import pytest

from apps.billing.operations import InsufficientBalance, insufficient_balance
from apps.billing.usage.slices import Slice
from apps.core.errors import Unavailable
from apps.interfaces.gateway.metering import spending_slices as slices_module
from apps.interfaces.gateway.metering.spending_slices import SpendingSlices


class Ledger:
    """Stands where the threads to the database are: the same functions by name, over one wallet in memory."""

    def __init__(self, wallet_nano: int) -> None:
        self.wallet_nano = wallet_nano
        self.amounts: dict[str, int] = {}
        self.leases = 0
        self.is_away = False

    async def call(self, function, **arguments):
        await asyncio.sleep(0)
        if self.is_away:
            raise slices_module.DATABASE_ERRORS[0]("away")
        return getattr(self, function.__name__)(**arguments)

    def lease_slice(self, *, organization: str, required_nano: int, by: str, hold_id: str | None, key_id: str) -> Slice:
        self.leases += 1
        if self.wallet_nano < required_nano:
            raise insufficient_balance(self.wallet_nano, required_nano)
        more = max(required_nano, self.wallet_nano // 20)
        if hold_id not in self.amounts:
            hold_id = f"hold_{len(self.amounts)}"
            self.amounts[hold_id] = 0
        self.wallet_nano -= more
        self.amounts[hold_id] += more
        return Slice(hold_id, self.amounts[hold_id])

    def renew_slices(self, *, hold_ids: list[str]) -> frozenset[str]:
        return frozenset(hold_ids) & frozenset(self.amounts)

    def close_slice(self, *, hold_id: str, by: str) -> None:
        self.amounts.pop(hold_id)


async def test_money_that_is_leased_for_a_customer_who_leaves_is_there_for_the_next_request():
    ledger = Ledger(wallet_nano=10_000)
    spending_slices = SpendingSlices(ledger, name="gateway_1")
    leaving = asyncio.ensure_future(spending_slices.reserve("org_1", "key_1", 100))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.wait([leaving])

    reservation = await spending_slices.reserve("org_1", "key_1", 100)

    assert leaving.cancelled() and ledger.leases == 1
    assert ledger.amounts == {reservation.slice_id: 500}


async def test_any_mix_of_reservations_stays_within_the_wallet():
    ledger = Ledger(wallet_nano=10_000)
    chance = random.Random(5)

    async def spend(spending_slices: SpendingSlices) -> int:
        try:
            reservation = await spending_slices.reserve("org_1", "key_1", worst := chance.randint(1, 300))
        except InsufficientBalance:
            return 0
        for _ in range(chance.randrange(20)):
            await asyncio.sleep(0)
        reservation.settle(spent := chance.randint(0, worst))
        return spent

    spending_slices = SpendingSlices(ledger, name="gateway_1")
    spent = sum(await asyncio.gather(*(spend(spending_slices) for _ in range(300))))

    assert 5_000 < spent <= 10_000
    assert sum(ledger.amounts.values()) + ledger.wallet_nano == 10_000


async def test_what_another_took_while_more_was_leased_is_leased_again():
    spending_slices = SpendingSlices(Ledger(wallet_nano=1_000), name="gateway_1")
    first = await spending_slices.reserve("org_1", "key_1", 400)
    for _ in range(100):
        await asyncio.sleep(0)  # until the refill it caused is over
    first.settle(0)
    large = asyncio.ensure_future(spending_slices.reserve("org_1", "key_1", first.slice.free_nano + 100))
    await asyncio.sleep(0)  # it waits for the ledger
    await spending_slices.reserve("org_1", "key_1", first.slice.free_nano)
    await large

    assert first.slice.free_nano >= 0


async def test_requests_within_the_slice_ask_the_ledger_nothing():
    ledger = Ledger(wallet_nano=1_000_000)

    spending_slices = SpendingSlices(ledger, name="gateway_1")
    for _ in range(50):
        (await spending_slices.reserve("org_1", "key_1", 100)).settle(10)

    assert ledger.leases == 1


async def test_a_refusal_is_remembered_for_a_moment_only(monkeypatch):
    monkeypatch.setattr(slices_module, "_REFUSAL_SECONDS", math.inf)
    ledger = Ledger(wallet_nano=0)

    spending_slices = SpendingSlices(ledger, name="gateway_1")
    for _ in range(20):
        with pytest.raises(InsufficientBalance):
            await spending_slices.reserve("org_1", "key_1", 100)
    ledger.wallet_nano = 1_000
    monkeypatch.setattr(slices_module, "_REFUSAL_SECONDS", 0)
    await spending_slices.reserve("org_1", "key_1", 100)

    assert ledger.leases == 2


@pytest.mark.parametrize(("wallet_nano", "is_refused_unread"), [(0, True), (500, True), (5_000, False)])
def test_who_has_nothing_left_is_refused_before_the_request_is_read(monkeypatch, wallet_nano, is_refused_unread):
    spending_slices = SpendingSlices(Ledger(wallet_nano), name="gateway_1")
    spending_slices.require_credit("org_1", "key_1")
    with pytest.raises(InsufficientBalance):
        asyncio.run(spending_slices.reserve("org_1", "key_1", 10_000))

    if is_refused_unread:
        with pytest.raises(InsufficientBalance):
            spending_slices.require_credit("org_1", "key_1")
    spending_slices.require_credit("org_2", "key_2")
    monkeypatch.setattr(slices_module, "_REFUSAL_SECONDS", 0.0)
    spending_slices.require_credit("org_1", "key_1")


def test_a_refusal_names_amounts_that_are_not_rounded_to_nothing():
    assert str(insufficient_balance(0, 35_000)) == (
        "This needs $0.000035 and $0.00 is available. Add at least $0.000035 of credit."
    )


async def test_without_the_ledger_a_slice_serves_until_its_fence_and_no_longer(monkeypatch):
    ledger = Ledger(wallet_nano=1_000_000)

    spending_slices = SpendingSlices(ledger, name="gateway_1")
    await spending_slices.reserve("org_1", "key_1", 100)
    ledger.is_away = True
    await spending_slices.reserve("org_1", "key_1", 100)
    monkeypatch.setattr(slices_module, "FENCE_SECONDS", 0)
    with pytest.raises(Unavailable):
        await spending_slices.reserve("org_1", "key_1", 100)


async def test_a_slice_goes_back_when_its_last_request_is_recorded(monkeypatch):
    ledger = Ledger(wallet_nano=1_000)

    spending_slices = SpendingSlices(ledger, name="gateway_1")
    reservation = await spending_slices.reserve("org_1", "key_1", 100)
    reservation.settle(10)
    await spending_slices.return_idle(at_once=True)
    assert ledger.amounts
    spending_slices.record_settled(reservation.slice_id, 1)
    await spending_slices.return_idle(at_once=True)
    assert not ledger.amounts


async def test_a_slice_that_cannot_be_closed_keeps_no_other_from_going_back(caplog):
    ledger = Ledger(wallet_nano=1_000)

    spending_slices = SpendingSlices(ledger, name="gateway_1")
    for organization in ("org_1", "org_2"):
        reservation = await spending_slices.reserve(organization, "key_1", 10)
        reservation.settle(1)
        spending_slices.record_settled(reservation.slice_id, 1)
    del ledger.amounts["hold_0"]  # to close it raises KeyError
    await spending_slices.return_idle(at_once=True)
    await spending_slices.return_idle(at_once=True)

    assert not ledger.amounts
    assert [record.getMessage() for record in caplog.records] == ["slice hold_0 cannot be closed"]


async def test_a_model_that_costs_nothing_needs_no_money():
    ledger = Ledger(wallet_nano=0)

    assert (await SpendingSlices(ledger, name="gateway_1").reserve("org_1", "key_1", 0)).slice_id == ""
    assert ledger.leases == 0
