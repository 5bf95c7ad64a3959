"""What tests of payments do at Stripe and read in the books."""

import datetime
from typing import Any

from django.db.models import Sum

from apps.accounts.models import Organization
from apps.billing.models import AccountKind, LedgerEntry
from apps.billing.queries import get_balance
from apps.core.database.clock import db_now
from apps.core.money import NANO_PER_CENT
from apps.payments import autorecharge, topups, webhooks
from apps.payments.customers import ensure_customer, keep_card
from apps.payments.models import AutoRecharge, TopUp
from tests.factories import money as credit
from tests.twins.stripe import money
from tests.twins.stripe.twin import Twin, signed


def open_topup(organization: Organization, cents: int) -> TopUp:
    page = topups.request_topup(organization=organization, amount_cents=cents, by="user_1")
    topups.make_page(page_id=page.pk)
    return TopUp.objects.get(page=page)


def paid_topup(twin: Twin, organization: Organization, cents: int) -> TopUp:
    topup = open_topup(organization, cents)
    money.pay_checkout(twin, topup.checkout_id or "")
    topups.sync_topup(topup_id=topup.pk)
    return TopUp.objects.get(pk=topup.pk)


def deliver(event: dict[str, Any]) -> None:
    body, signature = signed(event)
    webhooks.receive(body=body, signature=signature)
    webhooks.handle(event_id=event["id"])


def total(kind: AccountKind) -> int:
    """Return an account's balance in cents over all organizations."""
    nano = LedgerEntry.objects.filter(account__kind=kind).aggregate(nano=Sum("amount_nano"))["nano"] or 0
    assert nano % NANO_PER_CENT == 0
    return nano // NANO_PER_CENT


def spend(organization: Organization, cents: int) -> None:
    credit.spend(organization, cents * NANO_PER_CENT, f"ftjob-{cents}")


def order_auto_recharge(
    twin: Twin, organization: Organization, card: str = "pm_card_visa", **amounts: int
) -> AutoRecharge:
    """Give an order: $50 when less than $10 is left, at most $120 a month."""
    customer = ensure_customer(organization_id=organization.pk)
    keep_card(customer=customer, card=money.left(money.give_card(twin, customer.stripe_id, card)), cause="page_1")
    wanted = {"threshold_cents": 1000, "amount_cents": 5000, "monthly_cap_cents": 12000} | amounts
    return autorecharge.set_auto_recharge(organization=organization, is_enabled=True, by="user_1", **wanted)


def recharge(times: int = 1, *, now: datetime.datetime | None = None) -> None:
    """Begin what is due and carry it out, as the schedule does."""
    for _ in range(times):
        autorecharge.start_due(now=now or db_now())
        for topup in TopUp.objects.filter(origin="auto", status="requested"):
            autorecharge.charge(topup_id=topup.pk)


def available_cents(organization: Organization) -> int:
    return get_balance(organization=organization).available_nano // NANO_PER_CENT
