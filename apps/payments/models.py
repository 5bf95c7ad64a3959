"""Models of payments: the customer of each organization, its requests, and their ids at Stripe.

These models do not mirror Stripe's objects: their state is read from Stripe. Balances are only in the ledger.
"""

import pgtrigger
from django.db import models
from django.db.models import F, Q
from django.db.models.functions import Now
from django.utils.translation import gettext_noop

from apps.core.database.tenancy import OrganizationModel
from apps.core.database.transitions import choices_of, status_trigger
from apps.core.ids import IdField
from apps.core.money import NANO_PER_CENT
from apps.payments.lifecycle import (
    DISPUTE_CLOSED,
    EVENT,
    PAGE,
    REFUND,
    STANDING,
    TOPUP,
    TOPUP_IN_FLIGHT,
    DisputeStatus,
    EventStatus,
    PageStatus,
    RefundStatus,
    StandingStatus,
    TopUpStatus,
)

_STRIPE_ID = 255  # length that Stripe recommends for columns with its ids


class TopUpOrigin(models.TextChoices):
    USER = "user", "by a person"
    AUTO = "auto", "auto-recharge"


class PageKind(models.TextChoices):
    TOPUP = "topup", gettext_noop("top-up")
    CARD = "card", gettext_noop("card")
    PORTAL = "portal", gettext_noop("portal")


class ReconciliationKind(models.TextChoices):
    HOURLY = "hourly", gettext_noop("hourly")
    DAILY = "daily", gettext_noop("daily")


class StripeCustomer(OrganizationModel):
    """The Stripe customer of an organization, and the card for charges while the customer is absent."""

    id = IdField(prefix="cust")
    stripe_id = models.CharField(max_length=_STRIPE_ID, unique=True)
    payment_method_id = models.CharField(max_length=_STRIPE_ID, blank=True)
    card_brand = models.CharField(max_length=40, blank=True)
    card_last4 = models.CharField(max_length=4, blank=True)
    card_exp_month = models.PositiveSmallIntegerField(null=True)
    card_exp_year = models.PositiveSmallIntegerField(null=True)
    newest_method_id = models.CharField(
        max_length=_STRIPE_ID, blank=True, help_text="The card left last, of all pages."
    )
    newest_left_at = models.DateTimeField(null=True, help_text="When it was, by Stripe's clock.")
    is_newest_chosen = models.BooleanField(default=False, help_text="Left to be charged later, not merely paid with.")
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        constraints = [models.UniqueConstraint(fields=["organization"], name="stripe_customer_once")]

    @property
    def has_card(self) -> bool:
        return bool(self.payment_method_id)


class TopUp(OrganizationModel):
    """Credit paid for on a Stripe page, or by a charge authorized beforehand."""

    id = IdField(prefix="topup")
    origin = models.CharField(max_length=8, choices=TopUpOrigin)
    amount_cents = models.PositiveIntegerField(help_text="The credit; tax comes on top.")
    tax_cents = models.PositiveIntegerField(default=0)
    status = models.CharField(max_length=16, choices=choices_of(TOPUP), default=TopUpStatus.REQUESTED)
    requested_by = models.CharField(max_length=64)
    checkout_id = models.CharField(max_length=_STRIPE_ID, unique=True, null=True)
    invoice_id = models.CharField(max_length=_STRIPE_ID, unique=True, null=True)
    payment_intent_id = models.CharField(max_length=_STRIPE_ID, unique=True, null=True)
    pay_url = models.URLField(max_length=2000, blank=True, help_text="Where its owner confirms an automatic charge.")
    failure = models.CharField(max_length=200, blank=True)
    created_at = models.DateTimeField(db_default=Now())
    declined_at = models.DateTimeField(null=True, help_text="When the bank declined an automatic charge.")
    paid_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [
            models.CheckConstraint(condition=Q(amount_cents__gt=0), name="topup_positive"),
            models.CheckConstraint(
                condition=(Q(status=TopUpStatus.PAID) & Q(paid_at__isnull=False))
                | (~Q(status=TopUpStatus.PAID) & Q(paid_at=None)),
                name="topup_paid_at",
            ),
            models.UniqueConstraint(
                fields=["organization"],
                condition=Q(origin=TopUpOrigin.AUTO, status__in=TOPUP_IN_FLIGHT),
                name="topup_one_auto_in_flight",
            ),
        ]
        indexes = [
            models.Index(fields=["organization", "-created_at"], name="topup_newest"),
            models.Index(fields=["-created_at"], name="topup_newest_of_all"),
            models.Index(fields=["created_at"], condition=Q(status__in=TOPUP_IN_FLIGHT), name="topup_in_flight"),
        ]
        triggers = [
            status_trigger("topup_moves", TOPUP),
            pgtrigger.Protect(name="topup_kept", operation=pgtrigger.Delete),
        ]

    @property
    def credit_nano(self) -> int:
        return self.amount_cents * NANO_PER_CENT

    @property
    def tax_nano(self) -> int:
        return self.tax_cents * NANO_PER_CENT

    @property
    def reference(self) -> str:
        """Name of the payment in the ledger and of its lot."""
        return f"stripe:{self.payment_intent_id}"


class HostedPage(OrganizationModel):
    """A Stripe page that a member requested. Its address is created outside the web request."""

    id = IdField(prefix="page")
    kind = models.CharField(max_length=8, choices=PageKind)
    topup = models.OneToOneField(TopUp, on_delete=models.PROTECT, null=True, related_name="page")
    status = models.CharField(max_length=12, choices=choices_of(PAGE), default=PageStatus.REQUESTED)
    stripe_id = models.CharField(max_length=_STRIPE_ID, blank=True)
    url = models.URLField(max_length=2000, blank=True)
    failure = models.CharField(max_length=200, blank=True)
    requested_by = models.CharField(max_length=64)
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        triggers = [status_trigger("hosted_page_moves", PAGE)]
        indexes = [
            models.Index(fields=["created_at"], condition=Q(status=PageStatus.REQUESTED), name="hosted_page_waiting")
        ]


class CardRefund(OrganizationModel):
    """Unspent paid credit refunded to the card it came from. Above a limit a second operator must approve it."""

    id = IdField(prefix="refund")
    topup = models.ForeignKey(TopUp, on_delete=models.PROTECT, related_name="refunds")
    credit_cents = models.PositiveIntegerField()
    tax_cents = models.PositiveIntegerField(default=0)
    status = models.CharField(max_length=12, choices=choices_of(REFUND), default=RefundStatus.REQUESTED)
    hold_id = models.CharField(max_length=40, blank=True, help_text="Empty when it was made at Stripe, not here.")
    stripe_id = models.CharField(max_length=_STRIPE_ID, unique=True, null=True)
    reason = models.CharField(max_length=300)
    needs_approval = models.BooleanField(db_default=False)
    requested_by = models.CharField(max_length=64)
    approved_by = models.CharField(max_length=64, null=True)
    failure = models.CharField(max_length=200, blank=True)
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        constraints = [
            models.CheckConstraint(condition=Q(credit_cents__gt=0), name="card_refund_positive"),
            models.CheckConstraint(
                condition=Q(needs_approval=False)
                | Q(status__in=[RefundStatus.WAITING, RefundStatus.FAILED])
                | Q(approved_by__isnull=False) & ~Q(approved_by=F("requested_by")),
                name="card_refund_by_two",
            ),
        ]
        indexes = [
            models.Index(fields=["-created_at", "-id"], name="card_refund_newest_of_all"),
            models.Index(fields=["created_at"], condition=Q(status=RefundStatus.REQUESTED), name="card_refund_waiting"),
        ]
        triggers = [
            status_trigger("card_refund_moves", REFUND),
            pgtrigger.Protect(name="card_refund_kept", operation=pgtrigger.Delete),
            pgtrigger.ReadOnly(name="card_refund_frozen", fields=["credit_cents", "needs_approval", "requested_by"]),
        ]

    @property
    def credit_nano(self) -> int:
        return self.credit_cents * NANO_PER_CENT


class CardDispute(OrganizationModel):
    """A cardholder's claim against a payment. What Stripe withdrew for it has left the wallet or is owed."""

    id = IdField(prefix="dispute")
    topup = models.ForeignKey(TopUp, on_delete=models.PROTECT, related_name="disputes")
    stripe_id = models.CharField(max_length=_STRIPE_ID, unique=True)
    status = models.CharField(max_length=40, help_text="Stripe's own word.")
    reason = models.CharField(max_length=80, blank=True)
    amount_cents = models.PositiveIntegerField()
    movements_seen = models.PositiveSmallIntegerField(default=0, help_text="Cash movements posted so far, in order.")
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        triggers = [pgtrigger.Protect(name="card_dispute_kept", operation=pgtrigger.Delete)]

    @property
    def amount_nano(self) -> int:
        return self.amount_cents * NANO_PER_CENT

    @property
    def state(self) -> str:
        """The status under the name that pages use: "lost" has another meaning for workers."""
        return "dispute_lost" if self.status == DisputeStatus.LOST else self.status

    @property
    def is_closed(self) -> bool:
        return self.status in DISPUTE_CLOSED


class StripeEvent(models.Model):
    """The inbox: each event once, by Stripe's id. Handling it asks Stripe for the object's present state."""

    id = models.CharField(max_length=_STRIPE_ID, primary_key=True)
    type = models.CharField(max_length=80)
    api_version = models.CharField(max_length=40, blank=True)
    object_id = models.CharField(max_length=_STRIPE_ID)
    object_type = models.CharField(max_length=80)
    customer_id = models.CharField(
        max_length=_STRIPE_ID,
        blank=True,
        db_default="",
        help_text="The customer in whose turn it is handled; empty: all such events share one turn.",
    )
    created_at = models.DateTimeField(help_text="By Stripe's clock.")
    received_at = models.DateTimeField(db_default=Now())
    status = models.CharField(max_length=12, choices=choices_of(EVENT), default=EventStatus.RECEIVED)
    attempts = models.PositiveSmallIntegerField(default=0)
    last_error = models.CharField(max_length=300, blank=True)

    tenancy_reason = "whose it is shows only when its object is fetched"
    app_access = "add"

    class Meta:
        indexes = [
            models.Index(fields=["received_at"], condition=Q(status=EventStatus.RECEIVED), name="stripe_event_waiting")
        ]
        triggers = [
            status_trigger("stripe_event_moves", EVENT),
            pgtrigger.ReadOnly(
                name="stripe_event_frozen", fields=["id", "type", "object_id", "object_type", "created_at"]
            ),
        ]


class Reconciliation(models.Model):
    """One comparison of the books with Stripe's list of cash movements, over a half-open period."""

    id = IdField(prefix="recon")
    kind = models.CharField(max_length=8, choices=ReconciliationKind)
    since = models.DateTimeField()
    until = models.DateTimeField()
    movement_count = models.PositiveIntegerField()
    ours_cents = models.BigIntegerField(help_text="What the books say moved, gross.")
    theirs_cents = models.BigIntegerField(help_text="What Stripe says moved, gross.")
    missed_events = models.PositiveIntegerField(default=0, help_text="Webhooks that never came, read from its list.")
    created_at = models.DateTimeField(db_default=Now())

    is_append_only = True
    tenancy_reason = "over the books of all tenants, for operators"
    app_access = "none"

    class Meta:
        indexes = [models.Index(fields=["-created_at"], name="reconciliation_newest")]
        triggers = [pgtrigger.Protect(name="reconciliation_append_only", operation=pgtrigger.Update | pgtrigger.Delete)]


class ReconciliationDifference(models.Model):
    """One object on which the books and Stripe disagree; open until an operator resolves it or it disappears."""

    id = IdField(prefix="diff")
    source_id = models.CharField(max_length=_STRIPE_ID, unique=True, help_text="Payment, refund or dispute at Stripe.")
    ours_cents = models.BigIntegerField()
    theirs_cents = models.BigIntegerField()
    found_at = models.DateTimeField(db_default=Now())
    resolved_at = models.DateTimeField(null=True)
    resolved_by = models.CharField(max_length=64, blank=True)
    note = models.CharField(max_length=300, blank=True)

    tenancy_reason = "lists objects that belong to no organization yet; for operators"
    app_access = "none"

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=Q(resolved_at=None, resolved_by="") | (Q(resolved_at__isnull=False) & ~Q(resolved_by="")),
                name="difference_resolved_pair",
            )
        ]
        indexes = [models.Index(fields=["-found_at"], condition=Q(resolved_at=None), name="difference_open")]


class AutoRecharge(OrganizationModel):
    """A standing order to charge the card when credit runs low, up to a cap per calendar month (UTC)."""

    id = IdField(prefix="recharge")
    is_enabled = models.BooleanField(default=False)
    threshold_cents = models.PositiveIntegerField(default=1000)
    amount_cents = models.PositiveIntegerField(default=5000)
    monthly_cap_cents = models.PositiveIntegerField(default=20000)
    failures = models.PositiveSmallIntegerField(default=0, help_text="Charges declined in a row.")
    paused_until = models.DateTimeField(null=True)
    stopped_because = models.CharField(max_length=200, blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["organization"], name="auto_recharge_once"),
            models.CheckConstraint(
                condition=Q(amount_cents__gt=0, monthly_cap_cents__gte=models.F("amount_cents")),
                name="auto_recharge_cap_covers_one",
            ),
        ]
        indexes = [models.Index(fields=["id"], condition=Q(is_enabled=True), name="auto_recharge_enabled")]


class Standing(OrganizationModel):
    """Whether an organization pays its debts. Without a row, it never had one."""

    id = IdField(prefix="standing")
    status = models.CharField(max_length=12, choices=choices_of(STANDING), default=StandingStatus.ACTIVE)
    since_at = models.DateTimeField()
    notices_sent = models.PositiveSmallIntegerField(default=0, help_text="Of this debt.")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["organization"], name="standing_once")]
        triggers = [status_trigger("standing_moves", STANDING)]


class MeterMirror(OrganizationModel):
    """How much of a usage series was sent to Stripe's meter, and the sum being sent.

    The sum is stored before it is sent, so a lost answer is requested again with the same numbers.
    """

    series = models.OneToOneField("billing.UsageSeries", on_delete=models.PROTECT, related_name="+", primary_key=True)
    sent_quantity = models.BigIntegerField(default=0)
    sending_quantity = models.BigIntegerField(default=0, help_text="The sum the last event brings the meter to.")
