"""Card payments for credit: requested here, paid at Stripe, credited once according to Stripe's payment.

The webhook, the return page and the sweep all end in `sync_topup`, in the organization's turn. It fetches the present
object from Stripe, so the order and number of calls do not matter.
"""

import datetime
import logging

from django.conf import settings
from django.db import transaction
from django.db.models import Q
from django.urls import reverse
from django.utils.translation import gettext

from apps.accounts.models import Organization, key_of
from apps.accounts.shares import get_share_holder, share_of
from apps.billing.ledger import lock_wallet
from apps.billing.operations import grant_paid_credit
from apps.core import audit
from apps.core.database.clock import db_now
from apps.core.database.locks import lock
from apps.core.database.transitions import advance, try_advance
from apps.core.errors import InvalidState, InvalidValue, RateLimited
from apps.core.messages import outbox
from apps.core.money import NANO_PER_CENT
from apps.payments.customers import ensure_customer, keep_card
from apps.payments.dunning import review
from apps.payments.lifecycle import PAGE, TOPUP, TOPUP_IN_FLIGHT, PageStatus, TopUpStatus
from apps.payments.models import AutoRecharge, HostedPage, PageKind, TopUp, TopUpOrigin
from apps.payments.stripe import gateway
from apps.payments.stripe.errors import StripeRefused, StripeUnavailable
from apps.payments.stripe.objects import CURRENCY, Checkout, CheckoutStatus, InvoiceStatus, StripeInvoice

logger = logging.getLogger(__name__)

SMALLEST_CENTS, LARGEST_CENTS = 500, 1_000_000
MAX_PAGES_AN_HOUR = 20  # of an organization, together with those that share with it: each calls Stripe a few times
# Stripe forgets our keys after 24 hours: a later request would create the same page or charge a second time.
GIVEN_UP_AFTER = datetime.timedelta(hours=20)
_SYNCED_FOR = datetime.timedelta(hours=1)  # the hourly reconciliation finds later changes
_SYNCED_EVERY_SECONDS = 300
_SWEPT_AT_ONCE = 1_000
_AN_HOUR = datetime.timedelta(hours=1)


class PaymentMismatch(Exception):
    """Stripe moved another amount or currency than expected. Nothing is posted until an operator has looked."""


# --- Requests ---------------------------------------------------------------------------------------------------------


@transaction.atomic
def request_topup(*, organization: Organization | str, amount_cents: int, by: str) -> HostedPage:
    """Request the page that sells `amount_cents` of credit. Raises InvalidValue, RateLimited."""
    require_amount(amount_cents)
    topup = TopUp.objects.create(
        organization_id=key_of(organization), origin=TopUpOrigin.USER, amount_cents=amount_cents, requested_by=by
    )
    audit.record(organization=organization, by=by, action="topup.requested", target=topup.pk, amount_cents=amount_cents)
    return request_page(organization=organization, kind=PageKind.TOPUP, by=by, topup=topup)


def require_amount(amount_cents: int) -> None:
    """Raise InvalidValue unless so much is sold at once."""
    if not SMALLEST_CENTS <= amount_cents <= LARGEST_CENTS:
        raise InvalidValue(
            gettext("Choose between $%(smallest_cents)s and $%(largest_cents)s.")
            % {"smallest_cents": SMALLEST_CENTS // 100, "largest_cents": f"{LARGEST_CENTS // 100:,}"},
            param="amount_usd",
        )


@transaction.atomic
def request_page(
    *, organization: Organization | str, kind: PageKind, by: str, topup: TopUp | None = None
) -> HostedPage:
    """Request a Stripe page; a task creates it after commit.

    Raises InvalidState when payments are not set up, RateLimited after MAX_PAGES_AN_HOUR pages.
    """
    if not gateway.is_configured():
        raise InvalidState(gettext("This installation takes no payments. Its operator grants credit."))
    lock(f"pages:{get_share_holder(organization=organization)}")
    with share_of(organization) as organizations:
        recent = HostedPage.objects.filter(organization__in=organizations, created_at__gt=db_now() - _AN_HOUR).count()
    if recent >= MAX_PAGES_AN_HOUR:
        text = gettext("An organization opens at most %(most)s payment pages an hour. Try again later.")
        raise RateLimited(text % {"most": MAX_PAGES_AN_HOUR}, retry_after_seconds=600)
    page = HostedPage.objects.create(organization_id=key_of(organization), kind=kind, topup=topup, requested_by=by)
    if topup is None:
        audit.record(organization=organization, by=by, action="payment.page_requested", target=page.pk, kind=kind)
    key, payload = f"payments.page:{page.pk}", {"page_id": page.pk}
    outbox.publish(topic="payments.page", key=key, payload=payload, organization=organization)
    return page


# --- Making pages -----------------------------------------------------------------------------------------------------


def make_page(*, page_id: str) -> None:
    """Create the page at Stripe, once. Calls Stripe. Raises StripeUnavailable, after which it may be called again."""
    page = HostedPage.objects.select_related("topup").get(pk=page_id)
    if page.status != PageStatus.REQUESTED:
        return
    try:
        stripe_id, url = _make(page)
    except StripeRefused as error:
        with transaction.atomic():
            try_advance(page, to=PageStatus.FAILED, transitions=PAGE, failure=error.message[:200])
            if page.topup is not None:
                try_advance(page.topup, to=TopUpStatus.FAILED, transitions=TOPUP, failure=error.message[:200])
        return
    with transaction.atomic():
        try_advance(page, to=PageStatus.READY, transitions=PAGE, stripe_id=stripe_id, url=url)
        if page.topup is not None:
            try_advance(page.topup, to=TopUpStatus.OPEN, transitions=TOPUP, checkout_id=stripe_id)


def _make(page: HostedPage) -> tuple[str, str]:
    customer = ensure_customer(organization_id=page.organization_id)
    here = settings.PUBLIC_URL + reverse("web:billing")
    back = settings.PUBLIC_URL + reverse("web:billing_page", args=[page.pk])
    if page.kind == PageKind.PORTAL:
        url = gateway.create_portal_page(
            customer_id=customer.stripe_id,
            return_url=here,
            configuration_id=settings.STRIPE_PORTAL_CONFIGURATION,
            key=page.pk,
        )
        return "", url
    if page.topup is None:
        made = gateway.create_card_page(
            customer_id=customer.stripe_id, reference=page.pk, success_url=here, cancel_url=here, key=page.pk
        )
    else:
        made = gateway.create_topup_page(
            customer_id=customer.stripe_id,
            topup_id=page.topup.pk,
            amount_cents=page.topup.amount_cents,
            success_url=back,
            cancel_url=here,
            key=page.pk,
        )
    return made.id, made.url


# --- Synchronization with Stripe --------------------------------------------------------------------------------------


def sync_topup(*, topup_id: str) -> None:
    """Bring a top-up to Stripe's state, crediting it if it is paid. Calls Stripe. Safe to repeat."""
    topup = TopUp.objects.get(pk=topup_id)
    if topup.invoice_id:
        _apply_invoice(topup, gateway.get_invoice(invoice_id=topup.invoice_id))
    elif topup.checkout_id:
        _apply_checkout(topup, gateway.get_checkout(checkout_id=topup.checkout_id))


def sync_or_log(*, topup_id: str) -> None:
    """Sync a top-up; log what fails at Stripe or does not match, which the sweep repeats. Calls Stripe."""
    try:
        sync_topup(topup_id=topup_id)
    except (StripeUnavailable, StripeRefused, PaymentMismatch) as error:
        logger.error("syncing the top-up %s: %s", topup_id, error)


def ask_stripe(*, topup: TopUp, limited_by: str, every_seconds: int, now: datetime.datetime) -> None:
    """Have a task sync the top-up in its organization's turn, once in a period for each `limited_by`, an id."""
    key = f"payments.topup:{limited_by}:{int(now.timestamp()) // every_seconds * every_seconds}"
    payload = {"topup_id": topup.pk}
    outbox.publish(topic="payments.topup", key=key, payload=payload, organization=topup.organization_id)


def sync_checkout(*, checkout_id: str) -> bool:
    """Handle the present state of a Stripe page; return whether it is one of ours. Calls Stripe."""
    found = gateway.get_checkout(checkout_id=checkout_id)
    if not found.takes_payment:
        return _keep_card_left(found)
    topup = TopUp.objects.filter(pk=found.reference).first()
    if topup is None:
        return False
    _apply_checkout(topup, found)
    return True


def _keep_card_left(found: Checkout) -> bool:
    page = HostedPage.objects.filter(pk=found.reference).first()
    if page is None:
        return False
    if found.status == CheckoutStatus.COMPLETE and found.setup_intent_id:
        card = gateway.get_card_left(setup_intent_id=found.setup_intent_id)
        keep_card(customer=ensure_customer(organization_id=page.organization_id), card=card, cause=page.pk)
    return True


def _apply_checkout(topup: TopUp, found: Checkout) -> None:
    if found.is_paid:
        _credit(topup, found.payment_intent_id, found.subtotal_cents, found.tax_cents, found.currency, found.id)
        # Make the card paid with the one charged in future, unless the customer left a card for that.
        customer = ensure_customer(organization_id=topup.organization_id)
        if topup.payment_intent_id and not (customer.has_card and customer.is_newest_chosen):
            card = gateway.get_card_paid_with(payment_intent_id=topup.payment_intent_id)
            keep_card(customer=customer, card=card, cause=topup.pk, is_chosen=False)
        return
    if found.status == CheckoutStatus.EXPIRED:
        _end(topup, TopUpStatus.EXPIRED, "")
    elif found.status == CheckoutStatus.COMPLETE and found.payment_intent_id:
        failure = gateway.get_payment(payment_intent_id=found.payment_intent_id).failure
        if failure:
            _end(topup, TopUpStatus.FAILED, failure)


def _apply_invoice(topup: TopUp, found: StripeInvoice) -> None:
    if found.status == InvoiceStatus.PAID and found.payment_intent_ids:
        _credit(topup, found.payment_intent_ids[0], found.subtotal_cents, found.tax_cents, found.currency, None)
    elif found.status in (InvoiceStatus.VOID, InvoiceStatus.UNCOLLECTIBLE):
        _end(topup, TopUpStatus.FAILED, topup.failure or found.status)
    elif found.status == InvoiceStatus.OPEN and topup.status == TopUpStatus.REQUESTED and topup.payment_intent_id:
        _settle_if_declined(topup, topup.payment_intent_id)


def _settle_if_declined(topup: TopUp, payment_intent_id: str) -> None:
    """Have a charge ended that the bank declined after the call to Stripe had returned. Calls Stripe."""
    reason = gateway.get_payment(payment_intent_id=payment_intent_id).failure
    if reason:
        period = int(db_now().timestamp()) // _SYNCED_EVERY_SECONDS  # a later sync repeats what Stripe refused
        key, payload = f"payments.decline:{topup.pk}:{period}", {"topup_id": topup.pk, "reason": reason}
        with transaction.atomic():
            outbox.publish(topic="payments.decline", key=key, payload=payload, organization=topup.organization_id)


@transaction.atomic
def _credit(
    topup: TopUp, payment_intent_id: str, subtotal_cents: int, tax_cents: int, currency: str, checkout_id: str | None
) -> None:
    lock_wallet(organization=topup.organization_id)
    topup.refresh_from_db()
    if topup.status == TopUpStatus.PAID:
        return
    if (subtotal_cents, currency) != (topup.amount_cents, CURRENCY):
        raise PaymentMismatch(f"{topup.pk}: {subtotal_cents} {currency} for {topup.amount_cents} {CURRENCY}")
    advance(
        topup, to=TopUpStatus.PAID, transitions=TOPUP, paid_at=db_now(), tax_cents=tax_cents, failure="", pay_url="",
        payment_intent_id=payment_intent_id, checkout_id=checkout_id or topup.checkout_id,
    )  # fmt: skip
    grant_paid_credit(
        organization=topup.organization_id,
        amount_nano=topup.amount_cents * NANO_PER_CENT,
        tax_nano=tax_cents * NANO_PER_CENT,
        reference=topup.reference,
        by="stripe",
        reason="Automatic top-up" if topup.origin == TopUpOrigin.AUTO else "Top-up",
    )
    if topup.origin == TopUpOrigin.AUTO:
        AutoRecharge.objects.filter(organization_id=topup.organization_id).update(failures=0, paused_until=None)
    review(organization_id=topup.organization_id, now=db_now())


@transaction.atomic
def _end(topup: TopUp, status: TopUpStatus, failure: str) -> None:
    try_advance(
        topup, to=status, transitions=TOPUP, guard={"status__in": TOPUP_IN_FLIGHT}, failure=failure[:200], pay_url=""
    )


# --- Recovery ---------------------------------------------------------------------------------------------------------


@transaction.atomic
def sweep_topups(*, now: datetime.datetime) -> None:
    """Give up pages that were not created, and have top-ups synced whose webhooks never came. Does not call Stripe."""
    late = HostedPage.objects.filter(status=PageStatus.REQUESTED, created_at__lte=now - GIVEN_UP_AFTER)
    for page in late.select_related("topup"):
        try_advance(page, to=PageStatus.FAILED, transitions=PAGE, failure="Stripe did not answer.")
        if page.topup is not None:
            try_advance(page.topup, to=TopUpStatus.FAILED, transitions=TOPUP, failure="Stripe did not answer.")
    is_begun = Q(status__in=(TopUpStatus.OPEN, TopUpStatus.ACTION_REQUIRED))
    is_undecided = Q(status=TopUpStatus.REQUESTED, invoice_id__isnull=False)  # a charge whose bank may take its time
    begun = TopUp.objects.filter(is_begun | is_undecided, created_at__gt=now - _SYNCED_FOR)
    for topup in begun.order_by("created_at")[:_SWEPT_AT_ONCE]:
        ask_stripe(topup=topup, limited_by=topup.pk, every_seconds=_SYNCED_EVERY_SECONDS, now=now)
