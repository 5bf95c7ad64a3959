"""What tests of payments do at Stripe and read in the books."""

from typing import Any

from django.db.models import Sum

from apps.accounts.models import Organization
from apps.billing.models import AccountKind, LedgerEntry
from apps.core.money import NANO_PER_CENT
from apps.payments import topups, webhooks
from apps.payments.models import TopUp
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
