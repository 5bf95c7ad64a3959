"""Invoices, requests for credit, adjustments that may need a second operator, GPU costs, results of ledger checks."""

from enum import StrEnum

import pgtrigger
from django.db import models
from django.db.models import F, Q
from django.db.models.functions import Now

from apps.core.database.tenancy import OrganizationModel
from apps.core.database.transitions import Transitions, choices_of, status_trigger
from apps.core.ids import IdField


class LineKind(StrEnum):
    """What a line of spending or of an invoice is for. All but the last two begin the SKU of their price."""

    TRAINING = "training"
    INFERENCE = "inference"
    WARM = "warm"
    STORAGE = "storage"
    CONVERSION = "conversion"
    REBATE = "rebate"
    REFUND = "refund"


class AdjustmentKind(models.TextChoices):
    ADJUSTMENT = "adjustment", "adjustment"
    REFUND = "refund", "refund of a charge"


class AdjustmentStatus(StrEnum):
    """Where an adjustment is: only a requested one waits for a second operator."""

    REQUESTED = "requested"
    POSTED = "posted"
    REJECTED = "rejected"


ADJUSTMENT_TRANSITIONS: Transitions = {
    AdjustmentStatus.REQUESTED: frozenset({AdjustmentStatus.POSTED, AdjustmentStatus.REJECTED})
}


class CreditRequestStatus(StrEnum):
    """Where a customer's request for credit is."""

    OPEN = "open"
    GRANTED = "granted"
    DECLINED = "declined"


CREDIT_REQUEST_TRANSITIONS: Transitions = {
    CreditRequestStatus.OPEN: frozenset({CreditRequestStatus.GRANTED, CreditRequestStatus.DECLINED})
}


class Invoice(OrganizationModel):
    """One month's statement of charges, final once written. Charges that arrive later are on the next invoice."""

    id = IdField(prefix="inv")
    number = models.CharField(max_length=32, unique=True)
    month = models.DateField()
    issued_at = models.DateTimeField()
    billed_to = models.TextField(blank=True)
    total_nano = models.BigIntegerField()
    total_cents = models.BigIntegerField()
    cumulative_nano = models.BigIntegerField(help_text="Of all invoices up to this one: cents are rounded on it.")
    external_id = models.CharField(max_length=80, unique=True, null=True, help_text="Of the copy collected elsewhere.")
    paid_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["organization", "month"], name="invoice_once_a_month")]
        triggers = [
            pgtrigger.Protect(name="invoice_no_delete", operation=pgtrigger.Delete),
            pgtrigger.ReadOnly(
                name="invoice_frozen",
                fields=["number", "month", "issued_at", "billed_to", "total_nano", "total_cents", "cumulative_nano"],
            ),
        ]


class InvoiceLine(OrganizationModel):
    """One charge on an invoice: subject, quantity, price, customer's key or member, and days."""

    id = IdField(prefix="line")
    invoice = models.ForeignKey(Invoice, on_delete=models.PROTECT, related_name="lines")
    position = models.PositiveIntegerField()
    kind = models.CharField(max_length=16)
    subject = models.CharField(max_length=200)
    reference = models.CharField(max_length=64, help_text="The hold of a job; empty where a line adds up series.")
    sku = models.CharField(max_length=120, blank=True)
    price_rule = models.ForeignKey("catalog.PriceRule", on_delete=models.PROTECT, null=True, related_name="+")
    unit = models.CharField(max_length=16, blank=True)
    quantity = models.BigIntegerField()
    first_day = models.DateField()
    last_day = models.DateField()
    key_id = models.CharField(max_length=40, blank=True)
    adapter_version_id = models.CharField(max_length=40, blank=True)
    member_id = models.CharField(max_length=40, blank=True)
    label = models.CharField(max_length=512, blank=True, help_text="Of the organization's charge-back label.")
    nano = models.BigIntegerField()
    cents = models.BigIntegerField()

    is_append_only = True

    class Meta:
        constraints = [models.UniqueConstraint(fields=["invoice", "position"], name="invoice_line_once")]
        triggers = [pgtrigger.Protect(name="invoice_line_append_only", operation=pgtrigger.Update | pgtrigger.Delete)]


class CreditRequest(OrganizationModel):
    """A member's request for credit. The next credit that an operator gives the organization answers it."""

    id = IdField(prefix="creq")
    status = models.CharField(
        max_length=12, choices=choices_of(CREDIT_REQUEST_TRANSITIONS), default=CreditRequestStatus.OPEN
    )
    amount_nano = models.BigIntegerField()
    note = models.CharField(max_length=300, blank=True)
    granted_nano = models.BigIntegerField(null=True)
    answer = models.CharField(max_length=300, blank=True, help_text="The operator's reason, which the customer reads.")
    requested_by = models.CharField(max_length=64)
    requested_at = models.DateTimeField(db_default=Now())
    decided_by = models.CharField(max_length=64, null=True)
    decided_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["organization"], condition=Q(status=CreditRequestStatus.OPEN), name="credit_request_one_open"
            ),
            models.CheckConstraint(condition=Q(amount_nano__gt=0), name="credit_request_positive"),
            models.CheckConstraint(
                condition=Q(status=CreditRequestStatus.OPEN, decided_at=None)
                | (~Q(status=CreditRequestStatus.OPEN) & Q(decided_at__isnull=False)),
                name="credit_request_decided_pair",
            ),
        ]
        indexes = [models.Index(fields=["organization", "-requested_at"], name="credit_request_newest")]
        triggers = [status_trigger("credit_request_status", CREDIT_REQUEST_TRANSITIONS)]


class Adjustment(OrganizationModel):
    """Credit that an operator gives or takes, or a refund of a charge.

    Above a limit a second operator must approve it.
    """

    id = IdField(prefix="adj")
    kind = models.CharField(max_length=12, choices=AdjustmentKind)
    source = models.CharField(max_length=64, blank=True, help_text="Refunds: the job that was charged.")
    amount_nano = models.BigIntegerField()
    reason = models.CharField(max_length=300)
    status = models.CharField(
        max_length=12, choices=choices_of(ADJUSTMENT_TRANSITIONS), default=AdjustmentStatus.REQUESTED
    )
    needs_approval = models.BooleanField()
    requested_by = models.CharField(max_length=64)
    requested_at = models.DateTimeField(db_default=Now())
    decided_by = models.CharField(max_length=64, null=True)
    decided_at = models.DateTimeField(null=True)
    transaction = models.OneToOneField(
        "billing.LedgerTransaction", on_delete=models.PROTECT, null=True, related_name="adjustment"
    )

    class Meta:
        constraints = [
            models.CheckConstraint(condition=~Q(amount_nano=0), name="adjustment_not_zero"),
            models.CheckConstraint(
                condition=~Q(status=AdjustmentStatus.POSTED, needs_approval=True, decided_by=F("requested_by")),
                name="adjustment_by_two",
            ),
            models.CheckConstraint(
                condition=Q(status=AdjustmentStatus.REQUESTED, decided_at=None, decided_by=None)
                | Q(
                    status__in=[AdjustmentStatus.POSTED, AdjustmentStatus.REJECTED],
                    decided_at__isnull=False,
                    decided_by__isnull=False,
                ),
                name="adjustment_decided_pair",
            ),
        ]
        triggers = [
            status_trigger("adjustment_status", ADJUSTMENT_TRANSITIONS),
            pgtrigger.Protect(name="adjustment_no_delete", operation=pgtrigger.Delete),
            pgtrigger.ReadOnly(
                name="adjustment_frozen",
                fields=["kind", "source", "amount_nano", "reason", "needs_approval", "requested_by"],
            ),
        ]


class PoolCost(models.Model):
    """The operator's cost of one GPU hour in a pool, from a day on."""

    pool_name = models.CharField(max_length=40)
    nano_per_gpu_hour = models.BigIntegerField()
    from_day = models.DateField()
    set_by = models.CharField(max_length=64)

    tenancy_reason = "the operator's own costs"
    app_access = "none"

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["pool_name", "from_day"], name="pool_cost_once"),
            models.CheckConstraint(condition=Q(nano_per_gpu_hour__gte=0), name="pool_cost_positive"),
        ]


class LedgerCheck(models.Model):
    """One comparison of the books with themselves: the count of rows that differ, and the first of them."""

    id = models.BigAutoField(primary_key=True)
    name = models.CharField(max_length=64)
    checked_at = models.DateTimeField(db_default=Now())
    difference_count = models.PositiveIntegerField()
    differences = models.JSONField(default=list, help_text="The first twenty: what, ours, theirs.")

    is_append_only = True
    tenancy_reason = "reads the books of all tenants, for operators"
    app_access = "none"

    class Meta:
        indexes = [models.Index(fields=["name", "-checked_at"], name="ledger_check_newest")]
        triggers = [pgtrigger.Protect(name="ledger_check_append_only", operation=pgtrigger.Update | pgtrigger.Delete)]
