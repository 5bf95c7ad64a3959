"""Auto-recharge: charges the card when credit runs low, one charge at a time, never above the monthly cap.

A charge is an invoice with one line. It is created, compared with the order, finalized and paid. If the bank requires
confirmation, the customer gets a mail. A lost or stolen card ends the order; other declines pause it. Another card or
an explicit resume ends a pause; saving the settings does not.
"""

import datetime
import logging

from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models import Sum
from django.urls import reverse
from django.utils.translation import gettext

from apps.accounts.models import Membership, Organization, key_of
from apps.billing.ledger import lock_wallet
from apps.core import audit
from apps.core.database.clock import db_now
from apps.core.database.transitions import try_advance
from apps.core.errors import InvalidState, InvalidValue, RateLimited
from apps.core.messages import outbox
from apps.core.money import NANO_PER_CENT
from apps.payments.customers import ensure_customer, get_customer
from apps.payments.lifecycle import TOPUP, TOPUP_IN_FLIGHT, TopUpStatus
from apps.payments.models import AutoRecharge, TopUp, TopUpOrigin
from apps.payments.stripe import gateway
from apps.payments.stripe.errors import CardDeclined, StripeRefused
from apps.payments.stripe.objects import InvoiceStatus, StripeInvoice, StripeInvoiceLine
from apps.payments.topups import GIVEN_UP_AFTER, LARGEST_CENTS, PaymentMismatch, require_amount, sync_topup

logger = logging.getLogger(__name__)

# https://docs.stripe.com/declines/codes: retrying such a card is pointless or looks suspicious.
HARD_DECLINES = frozenset(
    {
        "lost_card", "stolen_card", "pickup_card", "restricted_card", "fraudulent", "expired_card", "invalid_account",
        "card_not_supported", "revocation_of_authorization", "revocation_of_all_authorizations",
        "stop_payment_order", "merchant_blacklist", "security_violation", "transaction_not_allowed",
    }
)  # fmt: skip
SOFT_FAILURES = 3
MAX_DECLINED_A_DAY = 5  # charges of an organization: neither resumes nor other cards allow more
_A_DAY = datetime.timedelta(hours=24)
_PAUSE_AFTER_ONE = datetime.timedelta(hours=1)
_PAUSE_AFTER_SOME = _A_DAY
_CONFIRM_WITHIN = datetime.timedelta(hours=72)


# --- The order --------------------------------------------------------------------------------------------------------


def get_auto_recharge(*, organization: Organization | str) -> AutoRecharge:
    """Return the organization's order; without one, an unsaved order that is off."""
    found = AutoRecharge.objects.for_organization(organization).first()
    return found or AutoRecharge(organization_id=key_of(organization))


@transaction.atomic
def set_auto_recharge(
    *,
    organization: Organization | str,
    is_enabled: bool,
    threshold_cents: int,
    amount_cents: int,
    monthly_cap_cents: int,
    by: str,
) -> AutoRecharge:
    """Set, change or end the order. A pause stays. Raises InvalidValue, and InvalidState without a card to charge."""
    require_amount(amount_cents)
    if not 0 <= threshold_cents <= LARGEST_CENTS:
        raise InvalidValue(
            gettext("Choose between $0 and $%(largest_cents)s.") % {"largest_cents": f"{LARGEST_CENTS // 100:,}"},
            param="threshold_usd",
        )
    if monthly_cap_cents < amount_cents:
        raise InvalidValue(gettext("The monthly maximum must cover at least one charge."), param="monthly_cap_usd")
    customer = get_customer(organization=organization)
    if is_enabled and (customer is None or not customer.has_card):
        raise InvalidState(gettext("Add a card first."), param="is_enabled")
    order = get_auto_recharge(organization=organization)
    order.is_enabled, order.threshold_cents = is_enabled, threshold_cents
    order.amount_cents, order.monthly_cap_cents = amount_cents, monthly_cap_cents
    order.stopped_because = ""
    AutoRecharge.objects.bulk_create([order], update_conflicts=True, unique_fields=["organization"], update_fields=[
        "is_enabled", "threshold_cents", "amount_cents", "monthly_cap_cents", "stopped_because",
    ])  # fmt: skip
    audit.record(
        organization=organization, by=by, action="auto_recharge.set", target=str(order.organization_id),
        is_enabled=is_enabled, threshold_cents=threshold_cents, amount_cents=amount_cents,
        monthly_cap_cents=monthly_cap_cents,
    )  # fmt: skip
    return order


@transaction.atomic
def resume_auto_recharge(*, organization: Organization | str, by: str, now: datetime.datetime) -> None:
    """End the order's pause. Raises InvalidState without one, RateLimited before `limited_until`."""
    paused = AutoRecharge.objects.for_organization(organization).filter(is_enabled=True, paused_until__gt=now)
    if not paused.update(paused_until=None):
        raise InvalidState(gettext("Auto-recharge is not paused."))
    if until := limited_until(organization=organization, now=now):
        text = gettext("%(most)s automatic charges were declined within a day, the most allowed. Try again tomorrow.")
        seconds = int((until - now).total_seconds()) + 1
        raise RateLimited(text % {"most": MAX_DECLINED_A_DAY}, retry_after_seconds=seconds)
    audit.record(organization=organization, by=by, action="auto_recharge.resumed", target=key_of(organization))


def limited_until(*, organization: Organization | str, now: datetime.datetime) -> datetime.datetime | None:
    """Return when MAX_DECLINED_A_DAY declined charges within a day no longer prevent another; None if they do not."""
    charges = TopUp.objects.filter(organization_id=key_of(organization), status=TopUpStatus.FAILED)
    declines = (
        charges.filter(declined_at__gt=now - _A_DAY).order_by("-declined_at").values_list("declined_at", flat=True)
    )
    last = declines[MAX_DECLINED_A_DAY - 1 : MAX_DECLINED_A_DAY].first()
    return last and last + _A_DAY


def charged_this_month_cents(*, organization: Organization | str, now: datetime.datetime) -> int:
    """Return the automatic charges of the month of `now`, without tax, including those in flight."""
    begin = now.astimezone(datetime.UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    charges = TopUp.objects.filter(
        organization_id=key_of(organization), origin="auto", created_at__gte=begin,
        status__in=(TopUpStatus.PAID, *TOPUP_IN_FLIGHT),
    )  # fmt: skip
    return charges.aggregate(cents=Sum("amount_cents"))["cents"] or 0


# --- Charging ---------------------------------------------------------------------------------------------------------


def start_due(*, now: datetime.datetime) -> int:
    """Start a charge for each organization whose credit ran low; return how many started. Does not call Stripe."""
    enabled = AutoRecharge.objects.filter(is_enabled=True).order_by("pk").values_list("organization_id", flat=True)
    return sum(_start_if_due(organization_id, now) for organization_id in list(enabled))


def _start_if_due(organization_id: str, now: datetime.datetime) -> bool:
    try:
        with transaction.atomic():
            wallet = lock_wallet(organization=organization_id)
            order = AutoRecharge.objects.select_for_update().get(organization_id=organization_id)
            is_low = wallet.balance_nano < order.threshold_cents * NANO_PER_CENT
            if not is_low or not _may_charge(order, now):
                return False
            topup = TopUp.objects.create(
                organization_id=organization_id, origin=TopUpOrigin.AUTO, amount_cents=order.amount_cents,
                requested_by="system",
            )  # fmt: skip
            outbox.publish(
                topic="payments.charge", key=f"payments.charge:{topup.pk}", payload={"topup_id": topup.pk},
                organization=organization_id,
            )  # fmt: skip
    except IntegrityError:  # one is in flight already: the constraint prevents a second
        return False
    return True


def _may_charge(order: AutoRecharge, now: datetime.datetime) -> bool:
    if not order.is_enabled or (order.paused_until is not None and order.paused_until > now):
        return False
    if TopUp.objects.filter(organization_id=order.organization_id, origin="auto", status__in=TOPUP_IN_FLIGHT).exists():
        return False
    if limited_until(organization=order.organization_id, now=now):
        return False
    charged = charged_this_month_cents(organization=order.organization_id, now=now)
    return charged + order.amount_cents <= order.monthly_cap_cents


def charge(*, topup_id: str) -> None:
    """Charge the card for one automatic top-up, unless it is too old to be repeated safely.

    Calls Stripe; each step happens once. Raises StripeUnavailable, after which it may be called again.
    """
    topup = TopUp.objects.get(pk=topup_id)
    if topup.status != TopUpStatus.REQUESTED or topup.origin != TopUpOrigin.AUTO:
        return
    if topup.created_at <= db_now() - GIVEN_UP_AFTER:
        _settle_late(topup)
        return
    if topup.declined_at:  # counted, and not voided yet
        settle_decline(topup_id=topup.pk, reason=topup.failure)
        return
    if why := _no_longer_ordered(topup):
        _give_up(topup, why)
        return
    try:
        invoice = _written_invoice(topup)
        gateway.pay_invoice(invoice_id=invoice.id, key=f"{topup.pk}:pay")
    except CardDeclined as declined:
        _handle_decline(topup, declined.reason)
        return
    except StripeRefused as error:
        _give_up(topup, error.message)
        _stop(topup.organization_id, error.message)
        return
    except PaymentMismatch as error:  # the draft stays at Stripe, unpaid, for operators to inspect
        logger.critical("an automatic charge was stopped: %s", error)
        _give_up(topup, "The invoice total did not match.")
        return
    sync_topup(topup_id=topup.pk)


def _no_longer_ordered(topup: TopUp) -> str:
    """Return why a started charge must not be made after all: the order may have changed. Empty when it may."""
    order = get_auto_recharge(organization=topup.organization_id)
    if not order.is_enabled:
        return "Auto-recharge was turned off."
    charged = charged_this_month_cents(organization=topup.organization_id, now=db_now())  # includes this charge
    if charged > order.monthly_cap_cents:
        return "The monthly maximum was lowered."
    return ""


def _written_invoice(topup: TopUp) -> StripeInvoice:
    """Return the finalized invoice of a charge. Raises PaymentMismatch instead of finalizing another amount."""
    customer = ensure_customer(organization_id=topup.organization_id)
    made = gateway.create_invoice(
        customer_id=customer.stripe_id, metadata={"topup_id": topup.pk}, description="Automatic top-up",
        days_until_due=None, key=f"{topup.pk}:invoice",
    )  # fmt: skip
    TopUp.objects.filter(pk=topup.pk, invoice_id=None).update(invoice_id=made.id)
    line = StripeInvoiceLine(description="Credit", amount_cents=topup.amount_cents, key=topup.pk)
    filled = gateway.add_invoice_lines(invoice_id=made.id, lines=[line], key=f"{topup.pk}:lines")
    if filled.subtotal_cents != topup.amount_cents:
        raise PaymentMismatch(f"{topup.pk}: the invoice says {filled.subtotal_cents}, not {topup.amount_cents}")
    finalized = gateway.finalize_invoice(invoice_id=made.id, key=f"{topup.pk}:finalize")
    if finalized.payment_intent_ids:
        TopUp.objects.filter(pk=topup.pk).update(payment_intent_id=finalized.payment_intent_ids[0])
    return finalized


def _handle_decline(topup: TopUp, reason: str) -> None:
    topup.refresh_from_db()
    if reason == "authentication_required":
        _ask_owner(topup)
        return
    _count_decline(topup, reason)
    gateway.void_invoice(invoice_id=topup.invoice_id or "")
    _give_up(topup, reason)


@transaction.atomic
def _count_decline(topup: TopUp, reason: str) -> None:
    """Pause or stop the order, once for a charge: a repeated call and the webhook of the void change nothing."""
    undecided = TopUp.objects.filter(pk=topup.pk, declined_at=None).exclude(status=TopUpStatus.PAID)
    if not undecided.update(declined_at=db_now(), failure=reason[:200]):
        return
    if reason in HARD_DECLINES:
        _stop(topup.organization_id, f"The bank declined the card: {reason}.")
    else:
        _pause(topup.organization_id, reason)


def settle_decline(*, topup_id: str, reason: str) -> None:
    """End a charge that the bank declined after the call to Stripe had returned. Calls Stripe. Safe to repeat."""
    topup = TopUp.objects.get(pk=topup_id)
    if topup.status != TopUpStatus.REQUESTED:
        return
    try:
        _handle_decline(topup, reason)
    except StripeRefused as error:  # it may have been paid meanwhile: the sync shows
        logger.warning("%s was not voided: %s", topup.pk, error)
        sync_topup(topup_id=topup.pk)


def _ask_owner(topup: TopUp) -> None:
    """Mail the owners the page where they can confirm the charge, which is dropped after three days."""
    url = gateway.get_invoice(invoice_id=topup.invoice_id or "").hosted_url
    with transaction.atomic():
        if try_advance(topup, to=TopUpStatus.ACTION_REQUIRED, transitions=TOPUP, pay_url=url):
            _mail_owners(
                topup.organization_id, f"confirm:{topup.pk}", "Please confirm an automatic top-up",
                f"Your bank wants you to confirm a charge of ${topup.amount_cents / 100:.2f}:\n{url}\n"
                "Without that it is dropped after three days.",
            )  # fmt: skip


def _pause(organization_id: str, reason: str) -> None:
    with transaction.atomic():
        order = AutoRecharge.objects.select_for_update().get(organization_id=organization_id)
        order.failures += 1
        pause = _PAUSE_AFTER_SOME if order.failures >= SOFT_FAILURES else _PAUSE_AFTER_ONE
        order.paused_until = db_now() + pause
        order.save(update_fields=["failures", "paused_until"])
        if order.failures == SOFT_FAILURES:
            _mail_owners(
                organization_id, f"declined:{order.pk}:{order.paused_until.isoformat()}",
                "Automatic top-ups keep being declined",
                f"Your bank declined the card {SOFT_FAILURES} times ({reason}). It is tried again in a day."
                f"\n\n{_here()}",
            )  # fmt: skip


def _stop(organization_id: str, why: str) -> None:
    with transaction.atomic():
        stopped = AutoRecharge.objects.filter(organization_id=organization_id, is_enabled=True).update(
            is_enabled=False, stopped_because=why[:200], paused_until=db_now() + _PAUSE_AFTER_SOME
        )
        if stopped:
            audit.record(
                organization=organization_id, by="system", action="auto_recharge.stopped", target=organization_id,
                why=why,
            )  # fmt: skip
            _mail_owners(
                organization_id, f"stopped:{organization_id}:{db_now().isoformat()}", "Automatic top-ups were stopped",
                f"{why}\n\nAdd another card and turn them on again.\n\n{_here()}",
            )  # fmt: skip


def _give_up(topup: TopUp, why: str) -> None:
    with transaction.atomic():
        try_advance(topup, to=TopUpStatus.FAILED, transitions=TOPUP, failure=why[:200])


def _mail_owners(organization_id: str, key: str, subject: str, body: str) -> None:
    owners = Membership.objects.people().filter(organization_id=organization_id, role="owner").select_related("user")
    for owner in owners:
        payload = {"kind": "plain", "to": owner.user.email, "subject": subject, "body": body}
        key_of_mail = f"mail:{key}:{owner.pk}"[:200]
        outbox.publish(topic="mail", key=key_of_mail, payload=payload, organization=organization_id)


def _here() -> str:
    return f"Open billing: {settings.PUBLIC_URL}{reverse('web:billing')}"


# --- Recovery ---------------------------------------------------------------------------------------------------------


def _settle_late(topup: TopUp) -> None:
    """End a charge whose keys Stripe has forgotten, according to its invoice. Calls Stripe; never charges again."""
    if not topup.invoice_id:
        _give_up(topup, "Stripe did not answer.")
        return
    found = gateway.get_invoice(invoice_id=topup.invoice_id)
    if found.status == InvoiceStatus.DRAFT:
        _give_up(topup, "Stripe did not answer.")
    elif found.status == InvoiceStatus.OPEN:
        _drop(topup)
    else:
        sync_topup(topup_id=topup.pk)


@transaction.atomic
def sweep_charges(*, now: datetime.datetime) -> None:
    """Have the charges ended that were not made or not confirmed in time, each in its organization's turn, once a day.

    The bank may decide after the call to Stripe has returned, so the message that started a charge may be sent already.
    """
    charges = TopUp.objects.filter(origin=TopUpOrigin.AUTO)
    late = charges.filter(status=TopUpStatus.REQUESTED, created_at__lte=now - GIVEN_UP_AFTER)
    unconfirmed = charges.filter(status=TopUpStatus.ACTION_REQUIRED, created_at__lt=now - _CONFIRM_WITHIN)
    for topup in late | unconfirmed:
        outbox.publish(
            topic="payments.charge" if topup.status == TopUpStatus.REQUESTED else "payments.drop",
            key=f"payments.{topup.status}:{topup.pk}:{now.date()}",
            payload={"topup_id": topup.pk},
            organization=topup.organization_id,
        )


def drop_unconfirmed(*, topup_id: str) -> None:
    """Void a charge that was not confirmed. Calls Stripe. Raises StripeUnavailable, after which it may be repeated."""
    _drop(TopUp.objects.get(pk=topup_id))


def _drop(topup: TopUp) -> None:
    try:
        gateway.void_invoice(invoice_id=topup.invoice_id or "")
    except StripeRefused as error:  # it may have been paid, or the bank still decides: the sync shows
        logger.warning("%s was not voided: %s", topup.pk, error)
    sync_topup(topup_id=topup.pk)
