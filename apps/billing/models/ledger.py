"""The ledger: append-only double entry in integer nano-USD, and holds."""

import datetime
from typing import Any

import pgtrigger
from django.contrib.postgres.indexes import BrinIndex
from django.db import models
from django.db.models import F, Q
from django.db.models.functions import Now
from django.utils.translation import gettext_noop

from apps.core.database.policies import OWN_ORGANIZATION
from apps.core.database.tenancy import OrganizationModel
from apps.core.ids import IdField

_OWN_OR_PLATFORM = f"organization_id IS NULL OR {OWN_ORGANIZATION}"


_KEEP_BALANCE = """
    UPDATE billing_ledgeraccount account SET balance_nano = account.balance_nano + added.nano
      FROM (SELECT account_id, sum(amount_nano)::bigint AS nano FROM new_entries GROUP BY account_id) added
     WHERE account.id = added.account_id AND account.floor_nano IS NOT NULL;
    RETURN NULL;
"""
# A transaction changes the lots by the same sum as wallet and hold together. By induction, an organization's remaining
# lots always equal its wallet and hold.
_SUMS = """
    SELECT coalesce(sum(entry.amount_nano), 0),
           coalesce(sum(entry.amount_nano) FILTER (WHERE account.kind IN ('wallet', 'hold')), 0),
           (SELECT coalesce(sum(moved.amount_nano), 0) FROM billing_lotmovement moved
             WHERE moved.transaction_id = NEW.transaction_id)
      INTO total, credit, lots
      FROM billing_ledgerentry entry JOIN billing_ledgeraccount account ON account.id = entry.account_id
     WHERE entry.transaction_id = NEW.transaction_id;
    IF total <> 0 THEN
        RAISE EXCEPTION 'ledger transaction % does not balance: %', NEW.transaction_id, total USING ERRCODE = '23514';
    END IF;
    IF credit <> lots THEN
        RAISE EXCEPTION 'ledger transaction % moves % of credit and % of lots', NEW.transaction_id, credit, lots
            USING ERRCODE = '23514';
    END IF;
    RETURN NULL;
"""
BALANCED: dict[str, Any] = {
    "func": _SUMS,
    "declare": [("total", "numeric"), ("credit", "numeric"), ("lots", "numeric")],
}


class AccountKind(models.TextChoices):
    """Account kinds. An organization has a wallet, a hold and a receivable (its debt); the platform owns the rest."""

    WALLET = "wallet"
    HOLD = "hold"
    REVENUE = "revenue"
    PROMOTIONAL_CREDIT = "promotional_credit"
    CASH_CLEARING = "cash_clearing"
    ADJUSTMENT = "adjustment"
    RECEIVABLE = "receivable"
    STRIPE_FEES = "stripe_fees"
    TAX_PAYABLE = "tax_payable"
    BREAKAGE = "breakage"
    ESTIMATE_LOSS = "estimate_loss"


class PostingKind(models.TextChoices):
    """What a ledger transaction is for, with the words that its organization reads."""

    GRANT = "grant", gettext_noop("Credit granted")
    HOLD = "hold", gettext_noop("Held")
    SETTLE = "settle", gettext_noop("Charge settled, hold released")
    REFUND = "refund", gettext_noop("Given back")
    USAGE = "usage", gettext_noop("Usage charged")
    TOPUP = "topup", gettext_noop("Paid in")
    EXPIRY = "expiry", gettext_noop("Credit expired")
    ADJUSTMENT = "adjustment", gettext_noop("Adjusted by the operator")
    REBATE = "rebate", gettext_noop("Given back for volume")
    DEBT_PAID = "debt_paid", gettext_noop("Debt paid")
    PAYMENT_REVERSED = "payment_reversed", gettext_noop("Payment taken back")
    PAYMENT_REFUNDED = "payment_refunded", gettext_noop("Paid back")
    RELEASE = "release", gettext_noop("Hold released")
    STRIPE_FEE = "stripe_fee", gettext_noop("Stripe's fee")
    ESTIMATE_LOSS = "estimate_loss", gettext_noop("Time above the firm price, at our expense")


class HoldPurpose(models.TextChoices):
    """What money is set aside for. Holds for a refund or dispute are of one lot."""

    JOB = "job", gettext_noop("job")
    INFERENCE = "inference", gettext_noop("inference slice")
    CARD_REFUND = "card_refund", gettext_noop("card refund")
    DISPUTE = "dispute", gettext_noop("disputed payment")


class HoldStatus(models.TextChoices):
    OPEN = "open", "open"
    CLOSED = "closed", "closed"


class LedgerAccount(models.Model):
    """An account; credits are positive.

    The database keeps and guards the running balance of an account with a floor.
    """

    id = IdField(prefix="acct")
    organization = models.ForeignKey("accounts.Organization", on_delete=models.PROTECT, null=True, related_name="+")
    kind = models.CharField(max_length=24, choices=AccountKind)
    balance_nano = models.BigIntegerField(default=0, help_text="Kept by trigger, only where a floor is set.")
    floor_nano = models.BigIntegerField(null=True)
    stopped_because = models.CharField(
        max_length=200, blank=True, help_text="Of a wallet nothing is spent from, jobs and requests alike: why."
    )

    # Set on a wallet that apps.billing.ledger.lock_wallet returned; read in the same query.
    hold_account_id: str | None = None
    revenue_account_id: str | None = None
    has_budgets = True
    locked_at: datetime.datetime | None = None

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

    @property
    def owner_id(self) -> str:
        """The organization whose wallet, hold or receivable it is. The platform's accounts have none."""
        assert self.organization_id is not None
        return self.organization_id


class LedgerTransaction(models.Model):
    """One balanced posting. Append-only; the same idempotency key never posts twice."""

    id = IdField(prefix="txn")
    organization = models.ForeignKey("accounts.Organization", on_delete=models.PROTECT, null=True, related_name="+")
    kind = models.CharField(max_length=32, choices=PostingKind)
    idempotency_key = models.CharField(max_length=200, unique=True)
    request_sha256 = models.CharField(max_length=64)
    source = models.CharField(max_length=64, help_text="The job, slice or grant it is for.")
    actor = models.CharField(max_length=64)
    reason = models.CharField(max_length=300, blank=True)
    created_at = models.DateTimeField(db_default=Now())

    is_append_only = True
    tenant_condition = OWN_ORGANIZATION

    class Meta:
        indexes = [
            models.Index(fields=["organization", "-created_at", "-id"], name="txn_newest"),
            # Most transactions are of usage, and are not searched by their source.
            models.Index(fields=["source"], condition=~Q(kind=PostingKind.USAGE), name="txn_source"),
            models.Index(
                fields=["created_at"], condition=Q(kind=PostingKind.ESTIMATE_LOSS), name="txn_estimate_losses"
            ),
        ]
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
        indexes = [BrinIndex(fields=["created_at"], name="entry_by_time")]
        triggers = [
            pgtrigger.Protect(name="entry_append_only", operation=pgtrigger.Update | pgtrigger.Delete),
            pgtrigger.Trigger(
                name="entry_balance",
                when=pgtrigger.After,
                operation=pgtrigger.Insert,
                level=pgtrigger.Statement,
                referencing=pgtrigger.Referencing(new="new_entries"),
                func=_KEEP_BALANCE,
            ),
            pgtrigger.Trigger(
                name="entry_zero_sum",
                when=pgtrigger.After,
                operation=pgtrigger.Insert,
                timing=pgtrigger.Deferred,
                **BALANCED,
            ),
        ]


class Hold(OrganizationModel):
    """Money set aside: for a job up to its spend cap, for a conversion, as a gateway's slice, or from one lot.

    A hold of one lot is for a refund or dispute.
    """

    id = IdField(prefix="hold")
    purpose = models.CharField(max_length=16, choices=HoldPurpose)
    lot = models.ForeignKey("billing.CreditLot", on_delete=models.PROTECT, null=True, related_name="+")
    source = models.CharField(max_length=64)
    price_rule = models.ForeignKey("catalog.PriceRule", on_delete=models.PROTECT, null=True, related_name="+")
    key_id = models.CharField(max_length=40, blank=True, help_text="Slices: the key that spends it.")
    member_id = models.CharField(max_length=40, blank=True, help_text="Who started the job, or made the key.")
    project_id = models.CharField(
        max_length=40, blank=True, db_default="", help_text="Of the job or key; empty: it is older than projects."
    )
    labels = models.JSONField(default=dict, help_text="Metadata labels it is charged back by, as they were then.")
    amount_nano = models.BigIntegerField()
    captured_nano = models.BigIntegerField(default=0)
    refunded_nano = models.BigIntegerField(default=0, help_text="Of what was captured, given back later.")
    invoiced_nano = models.BigIntegerField(default=0, help_text="Of what was captured less refunds, on invoices.")
    used_nano = models.BigIntegerField(default=0, help_text="Slices: cost of the usage recorded against it so far.")
    status = models.CharField(max_length=12, choices=HoldStatus, default=HoldStatus.OPEN)
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
                fields=["source"],
                condition=Q(purpose=HoldPurpose.JOB, status=HoldStatus.OPEN),
                name="hold_one_open_per_job",
            ),
            models.CheckConstraint(
                condition=Q(lot=None, purpose__in=[HoldPurpose.JOB, HoldPurpose.INFERENCE])
                | Q(lot__isnull=False, purpose__in=[HoldPurpose.CARD_REFUND, HoldPurpose.DISPUTE]),
                name="hold_of_lot",
            ),
        ]
        indexes = [
            models.Index(
                fields=["expires_at"],
                condition=Q(purpose=HoldPurpose.INFERENCE, status=HoldStatus.OPEN),
                name="hold_open_slices",
            ),
            models.Index(
                fields=["organization", "-created_at", "-id"], condition=Q(status=HoldStatus.OPEN), name="hold_open"
            ),
            # Slices are many; these find the holds of jobs among them.
            models.Index(fields=["source"], condition=Q(purpose=HoldPurpose.JOB), name="hold_of_job"),
            # What jobs cost in a month is added up from these two indexes alone, of one organization and of all.
            models.Index(
                fields=["organization", "closed_at"],
                include=["source", "price_rule", "captured_nano", "refunded_nano"],
                condition=Q(purpose=HoldPurpose.JOB, status=HoldStatus.CLOSED),
                name="hold_of_jobs_closed",
            ),
            models.Index(
                fields=["closed_at"],
                include=["price_rule", "captured_nano", "refunded_nano"],
                condition=Q(purpose=HoldPurpose.JOB, status=HoldStatus.CLOSED),
                name="hold_closed_of_all",
            ),
        ]
