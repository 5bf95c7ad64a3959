"""The ledger: append-only double entry in integer nano-USD, holds against it, and the usage it charges for."""

import pgtrigger
from django.db import models
from django.db.models import F, Q
from django.db.models.functions import Now

from apps.core.ids import IdField
from apps.core.policies import OWN_ORGANIZATION
from apps.core.tenancy import OrganizationModel

_OWN_OR_PLATFORM = f"organization_id IS NULL OR {OWN_ORGANIZATION}"


_KEEP_BALANCE = """
    UPDATE billing_ledgeraccount SET balance_nano = balance_nano + NEW.amount_nano
     WHERE id = NEW.account_id AND floor_nano IS NOT NULL;
    RETURN NULL;
"""
_ZERO_SUM = """
    SELECT sum(amount_nano) INTO total FROM billing_ledgerentry WHERE transaction_id = NEW.transaction_id;
    IF total <> 0 THEN
        RAISE EXCEPTION 'ledger transaction % does not balance: %', NEW.transaction_id, total USING ERRCODE = '23514';
    END IF;
    RETURN NULL;
"""


class AccountKind(models.TextChoices):
    """Per organization: wallet and hold. Of the platform: revenue, promotional credit, cash, rounding."""

    WALLET = "wallet"
    HOLD = "hold"
    REVENUE = "revenue"
    PROMOTIONAL_CREDIT = "promotional_credit"
    CASH_CLEARING = "cash_clearing"
    ADJUSTMENT = "adjustment"


class LedgerAccount(models.Model):
    """An account; credits are positive. Accounts with a floor keep a running balance the database guards."""

    id = IdField(prefix="acct")
    organization = models.ForeignKey("accounts.Organization", on_delete=models.PROTECT, null=True, related_name="+")
    kind = models.CharField(max_length=24, choices=AccountKind)
    balance_nano = models.BigIntegerField(default=0, help_text="Kept by trigger, only where a floor is set.")
    floor_nano = models.BigIntegerField(null=True)

    tenant_condition = _OWN_OR_PLATFORM

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["organization", "kind"], name="account_once", nulls_distinct=False),
            models.CheckConstraint(
                condition=Q(floor_nano=None) | Q(balance_nano__gte=F("floor_nano")), name="account_floor"
            ),
        ]
        triggers = [
            # Only the ledger's own trigger moves a balance.
            pgtrigger.Protect(
                name="account_balance_by_entries",
                operation=pgtrigger.UpdateOf("balance_nano", "floor_nano"),
                condition=pgtrigger.Condition("pg_trigger_depth() < 1"),
            )
        ]


class LedgerTransaction(models.Model):
    """One balanced posting. Append-only; the same idempotency key never posts twice."""

    id = IdField(prefix="txn")
    organization = models.ForeignKey("accounts.Organization", on_delete=models.PROTECT, null=True, related_name="+")
    kind = models.CharField(max_length=32)
    idempotency_key = models.CharField(max_length=200, unique=True)
    request_sha256 = models.CharField(max_length=64)
    reverses = models.OneToOneField("self", on_delete=models.PROTECT, null=True, related_name="reversed_by")
    source = models.CharField(max_length=64, help_text="The job, slice or grant it is for.")
    actor = models.CharField(max_length=64)
    reason = models.CharField(max_length=300, blank=True)
    created_at = models.DateTimeField(db_default=Now())

    is_append_only = True
    tenant_condition = OWN_ORGANIZATION

    class Meta:
        indexes = [models.Index(fields=["organization", "-created_at", "-id"], name="txn_newest")]
        triggers = [pgtrigger.Protect(name="txn_append_only", operation=pgtrigger.Update | pgtrigger.Delete)]


class LedgerEntry(models.Model):
    """One leg of a transaction; the legs of a transaction sum to zero at commit."""

    id = models.BigAutoField(primary_key=True)
    transaction = models.ForeignKey(LedgerTransaction, on_delete=models.PROTECT, related_name="entries")
    organization = models.ForeignKey("accounts.Organization", on_delete=models.PROTECT, null=True, related_name="+")
    account = models.ForeignKey(LedgerAccount, on_delete=models.PROTECT, related_name="entries")
    amount_nano = models.BigIntegerField(help_text="Credit positive, debit negative.")
    created_at = models.DateTimeField(db_default=Now())

    is_append_only = True
    tenant_condition = OWN_ORGANIZATION

    class Meta:
        constraints = [models.CheckConstraint(condition=~Q(amount_nano=0), name="entry_not_zero")]
        triggers = [
            pgtrigger.Protect(name="entry_append_only", operation=pgtrigger.Update | pgtrigger.Delete),
            pgtrigger.Trigger(
                name="entry_balance", when=pgtrigger.After, operation=pgtrigger.Insert, func=_KEEP_BALANCE
            ),
            pgtrigger.Trigger(
                name="entry_zero_sum",
                when=pgtrigger.After,
                operation=pgtrigger.Insert,
                timing=pgtrigger.Deferred,
                declare=[("total", "numeric")],
                func=_ZERO_SUM,
            ),
        ]


class Hold(OrganizationModel):
    """Money set aside: for a job up to its cap, or as a slice the gateway spends from."""

    id = IdField(prefix="hold")
    purpose = models.CharField(max_length=16, choices=[("job", "job"), ("inference", "inference slice")])
    source = models.CharField(max_length=64)
    amount_nano = models.BigIntegerField()
    captured_nano = models.BigIntegerField(default=0)
    refunded_nano = models.BigIntegerField(default=0, help_text="Of what was captured, given back later.")
    used_nano = models.BigIntegerField(default=0, help_text="Slices: cost of the usage recorded against it so far.")
    status = models.CharField(max_length=12, choices=[("open", "open"), ("closed", "closed")], default="open")
    expires_at = models.DateTimeField(null=True)
    created_at = models.DateTimeField(db_default=Now())
    closed_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=Q(amount_nano__gt=0, captured_nano__gte=0, captured_nano__lte=F("amount_nano")),
                name="hold_captured_within",
            ),
            models.CheckConstraint(
                condition=Q(refunded_nano__gte=0, refunded_nano__lte=F("captured_nano")), name="hold_refunded_within"
            ),
            models.UniqueConstraint(
                fields=["source"], condition=Q(purpose="job", status="open"), name="hold_one_open_per_job"
            ),
        ]
        indexes = [
            models.Index(
                fields=["expires_at"], condition=Q(purpose="inference", status="open"), name="hold_open_slices"
            )
        ]


class UsageEvent(OrganizationModel):
    """One metered request; its id comes from the gateway's spool, so that a replay adds nothing."""

    id = models.CharField(max_length=40, primary_key=True)
    kind = models.CharField(max_length=16, default="inference")
    key_id = models.CharField(max_length=40)
    model_name = models.CharField(max_length=200)
    adapter_version_id = models.CharField(max_length=40, blank=True)
    slice_id = models.CharField(max_length=40, blank=True, help_text="The hold it was reserved from.")
    input_price = models.ForeignKey("catalog.PriceRule", on_delete=models.PROTECT, related_name="+", null=True)
    output_price = models.ForeignKey("catalog.PriceRule", on_delete=models.PROTECT, related_name="+", null=True)
    input_tokens = models.BigIntegerField()
    cached_input_tokens = models.BigIntegerField(default=0)
    output_tokens = models.BigIntegerField()
    finish = models.CharField(max_length=16, help_text="stop, length, aborted, error; lost: the gateway died meanwhile")
    latency_ms = models.PositiveIntegerField(default=0)
    first_token_ms = models.PositiveIntegerField(null=True)
    occurred_at = models.DateTimeField()
    body_sha256 = models.CharField(max_length=64)

    is_append_only = True

    class Meta:
        indexes = [models.Index(fields=["organization", "-occurred_at"], name="usage_newest")]
        constraints = [
            models.CheckConstraint(condition=Q(input_tokens__gte=0, output_tokens__gte=0), name="usage_tokens_positive")
        ]
        triggers = [pgtrigger.Protect(name="usage_append_only", operation=pgtrigger.Update | pgtrigger.Delete)]


class UsageConflict(OrganizationModel):
    """A record that came under the id of another one: counted for nothing, kept for somebody to look at."""

    id = models.BigAutoField(primary_key=True)
    event_id = models.CharField(max_length=40)
    body = models.JSONField()
    body_sha256 = models.CharField(max_length=64)
    created_at = models.DateTimeField(db_default=Now())

    is_append_only = True

    class Meta:
        constraints = [models.UniqueConstraint(fields=["event_id", "body_sha256"], name="usage_conflict_once")]
        triggers = [pgtrigger.Protect(name="usage_conflict_append_only", operation=pgtrigger.Update | pgtrigger.Delete)]


class UsageSeries(OrganizationModel):
    """Quantity used of one SKU at one price in one day, and how much of its cost is posted."""

    sku = models.CharField(max_length=120)
    price_rule = models.ForeignKey("catalog.PriceRule", on_delete=models.PROTECT, related_name="+")
    subject = models.CharField(max_length=200, help_text="The model or job it was used for.")
    day = models.DateField()
    quantity = models.BigIntegerField(default=0)
    request_count = models.BigIntegerField(default=0)
    rated_quantity = models.BigIntegerField(default=0, help_text="How much of the quantity is paid for.")
    rated_request_count = models.BigIntegerField(default=0)
    posted_nano = models.BigIntegerField(default=0)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["organization", "price_rule", "subject", "day"], name="usage_series_once"),
            models.CheckConstraint(condition=Q(quantity__gte=0, posted_nano__gte=0), name="usage_series_positive"),
            models.CheckConstraint(
                condition=Q(rated_quantity__lte=F("quantity"), rated_request_count__lte=F("request_count")),
                name="usage_series_rated_within",
            ),
        ]
        indexes = [
            models.Index(
                fields=["organization"],
                condition=Q(request_count__gt=F("rated_request_count")),
                name="usage_series_unrated",
            )
        ]
