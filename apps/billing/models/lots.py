"""Credit lots (kind, spending order and expiry of the credit in a balance), and the daily seals."""

import pgtrigger
from django.db import models
from django.db.models import F, Q
from django.db.models.functions import Now
from django.utils.translation import gettext_noop

from apps.billing.models.ledger import BALANCED, LedgerTransaction
from apps.core.database.tenancy import OrganizationModel
from apps.core.ids import IdField

_KEEP_REMAINING = """
    UPDATE billing_creditlot SET remaining_nano = remaining_nano + NEW.amount_nano WHERE id = NEW.lot_id;
    RETURN NULL;
"""


class LotKind(models.TextChoices):
    """Paid credit can be refunded to the card it came from; promotional credit cannot."""

    PAID = "paid", gettext_noop("Paid")
    PROMOTIONAL = "promotional", gettext_noop("Promotional")


WELCOME = "welcome:"  # a lot's reference, followed by the id of the person who founded its organization


class CreditLot(OrganizationModel):
    """Credit that came in at once. All lots of an organization add up to its wallet and holds."""

    id = IdField(prefix="lot")
    kind = models.CharField(max_length=16, choices=LotKind)
    reference = models.CharField(
        max_length=200, unique=True, null=True, help_text="What it came from, e.g. stripe:pi:<id>."
    )
    amount_nano = models.BigIntegerField()
    remaining_nano = models.BigIntegerField(default=0, help_text="Kept by trigger, from the movements.")
    held_nano = models.BigIntegerField(default=0, help_text="Of what remains, set aside to be paid back.")
    reversed_nano = models.BigIntegerField(default=0, help_text="Of the amount, paid back or taken back.")
    priority = models.PositiveSmallIntegerField(help_text="Lower is spent first; then what expires first.")
    expires_at = models.DateTimeField(null=True)
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=Q(amount_nano__gt=0, remaining_nano__gte=0, remaining_nano__lte=F("amount_nano")),
                name="lot_remaining_within",
            ),
            models.CheckConstraint(
                condition=Q(held_nano__gte=0, held_nano__lte=F("remaining_nano")), name="lot_held_within"
            ),
            models.CheckConstraint(
                condition=Q(reversed_nano__gte=0, reversed_nano__lte=F("amount_nano")), name="lot_reversed_within"
            ),
        ]
        indexes = [
            models.Index(
                fields=["organization", "priority", "expires_at"],
                condition=Q(remaining_nano__gt=0),
                name="lot_spendable",
            ),
            models.Index(fields=["expires_at"], condition=Q(remaining_nano__gt=0), name="lot_expiring"),
        ]
        triggers = [
            pgtrigger.Protect(name="lot_no_delete", operation=pgtrigger.Delete),
            pgtrigger.ReadOnly(
                name="lot_frozen", fields=["kind", "reference", "amount_nano", "priority", "expires_at", "created_at"]
            ),
            pgtrigger.Protect(
                name="lot_remaining_by_movements",
                operation=pgtrigger.UpdateOf("remaining_nano"),
                condition=pgtrigger.Condition("pg_trigger_depth() < 1"),
            ),
        ]


class LotMovement(OrganizationModel):
    """The amount that one ledger transaction put into a lot (positive) or took from it (negative)."""

    id = models.BigAutoField(primary_key=True)
    lot = models.ForeignKey(CreditLot, on_delete=models.PROTECT, related_name="movements")
    transaction = models.ForeignKey(LedgerTransaction, on_delete=models.PROTECT, related_name="lot_movements")
    amount_nano = models.BigIntegerField()

    is_append_only = True

    class Meta:
        constraints = [models.CheckConstraint(condition=~Q(amount_nano=0), name="lot_movement_not_zero")]
        triggers = [
            pgtrigger.Protect(name="lot_movement_append_only", operation=pgtrigger.Update | pgtrigger.Delete),
            pgtrigger.Trigger(
                name="lot_movement_remaining", when=pgtrigger.After, operation=pgtrigger.Insert, func=_KEEP_REMAINING
            ),
            pgtrigger.Trigger(
                name="lot_movement_match",
                when=pgtrigger.After,
                operation=pgtrigger.Insert,
                timing=pgtrigger.Deferred,
                **BALANCED,
            ),
        ]


class LedgerSeal(models.Model):
    """One UTC day of the ledger, hashed with the day before. An entry changed, added or lost later breaks the hash."""

    day = models.DateField(primary_key=True)
    entry_count = models.BigIntegerField()
    previous_sha256 = models.CharField(max_length=64, blank=True)
    sha256 = models.CharField(max_length=64)
    created_at = models.DateTimeField(db_default=Now())

    is_append_only = True
    tenancy_reason = "one chain over the books of all tenants, for operators"
    app_access = "none"

    class Meta:
        triggers = [pgtrigger.Protect(name="seal_append_only", operation=pgtrigger.Update | pgtrigger.Delete)]
