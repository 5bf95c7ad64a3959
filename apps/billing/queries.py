"""Queries on balances, the ledger, usage and invoices."""

import datetime
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from django.db.models import F, OuterRef, Q, QuerySet, Subquery, Sum
from django.db.models.functions import Coalesce
from django.utils.translation import gettext

from apps.accounts.models import Organization, key_of
from apps.billing.lots import spendable_lots
from apps.billing.models import (
    WELCOME,
    AccountKind,
    Adjustment,
    AdjustmentKind,
    AdjustmentStatus,
    CreditLot,
    Hold,
    HoldPurpose,
    HoldStatus,
    Invoice,
    LedgerAccount,
    LedgerEntry,
    LedgerTransaction,
    UsageEvent,
    UsageSeries,
)
from apps.core.database.clock import begin_of_day
from apps.core.errors import NotFound

_KEPT = F("captured_nano") - F("refunded_nano")
_INPUT_SKUS = "inference:input:"  # every request has one input line, so counting these counts each request once


@dataclass(frozen=True)
class Balance:
    available_nano: int
    held_nano: int


def get_charged_nano(*, source: str) -> int:
    """Return the charges for the job or conversion `source` so far, as `get_charged` does."""
    return get_charged(sources=[source])[source]


def get_charged(*, sources: Collection[str]) -> Counter[str]:
    """Return the nano-USD charged for each job or conversion so far, less our own refunds.

    What an operator refunded counts as charged, or the job's next settlement would charge it again.
    """
    returned = Adjustment.objects.filter(
        organization=OuterRef("organization_id"),
        source=OuterRef("source"),
        kind=AdjustmentKind.REFUND,
        status=AdjustmentStatus.POSTED,
    ).values("source")
    returned_nano = Coalesce(Subquery(returned.annotate(nano=Sum("amount_nano")).values("nano")), 0)
    holds = Hold.objects.filter(purpose=HoldPurpose.JOB, source__in=sources).values("organization_id", "source")
    sums = holds.annotate(nano=Sum(_KEPT), returned_nano=returned_nano).values_list("source", "nano", "returned_nano")
    return Counter({source: nano + returned_nano for source, nano, returned_nano in sums})


def get_balance(*, organization: Organization | str) -> Balance:
    organization_id = key_of(organization)
    return get_balances(organizations=[organization_id])[organization_id]


def get_balances(*, organizations: Collection[str]) -> dict[str, Balance]:
    """Return the balance of each organization."""
    accounts = LedgerAccount.objects.filter(organization_id__in=organizations)
    nano = {
        (owner, kind): amount for owner, kind, amount in accounts.values_list("organization_id", "kind", "balance_nano")
    }
    return {
        each: Balance(nano.get((each, AccountKind.WALLET), 0), nano.get((each, AccountKind.HOLD), 0))
        for each in organizations
    }


def with_credit() -> QuerySet[LedgerAccount, str]:
    """Return the ids of the organizations whose balance is above zero."""
    wallets = LedgerAccount.objects.filter(kind=AccountKind.WALLET, balance_nano__gt=0)
    return wallets.values_list("organization_id", flat=True)


def with_past_credit(*, organizations: Collection[str]) -> set[str]:
    """Return those of the organizations that ever paid in or were granted credit by an operator."""
    lots = CreditLot.objects.filter(organization_id__in=organizations)
    lots = lots.exclude(reference__startswith=WELCOME)  # anyone who signs up has it
    return set(lots.values_list("organization_id", flat=True).distinct().order_by())


def stopped_organizations() -> QuerySet[LedgerAccount, str]:
    """Return the ids of the organizations that may not spend until they pay their debt."""
    stopped = LedgerAccount.objects.filter(kind=AccountKind.WALLET).exclude(stopped_because="")
    return stopped.values_list("organization_id", flat=True)


def stop_reasons(*, organizations: Collection[str]) -> dict[str, str]:
    """Return why organizations may not spend until they pay their debt; those that may have no entry."""
    wallets = LedgerAccount.objects.filter(kind=AccountKind.WALLET, organization_id__in=organizations)
    return dict(wallets.exclude(stopped_because="").values_list("organization_id", "stopped_because"))


def list_transactions(*, organization: Organization | str) -> QuerySet[LedgerTransaction]:
    """Return the organization's transactions, newest first, with their entries and accounts."""
    rows = LedgerTransaction.objects.filter(organization_id=key_of(organization))
    return rows.order_by("-created_at", "-id").prefetch_related("entries__account")


def own_amounts(posted: LedgerTransaction) -> Counter[str]:
    """Return the nano that a transaction of `list_transactions` moved in its organization's accounts, by their kind."""
    moved: Counter[str] = Counter()
    for entry in posted.entries.all():
        if entry.organization_id == posted.organization_id:
            moved[entry.account.kind] += entry.amount_nano
    return moved


def get_ledger_sum_nano() -> int:
    """Return the sum of every entry visible to the caller. Any value but zero means the books are broken."""
    return LedgerEntry.objects.aggregate(total=Sum("amount_nano"))["total"] or 0


@dataclass(frozen=True)
class Spending:
    """An organization's charges. `tokens_billed` and `inference_nano` exclude usage that is not rated yet."""

    tokens_billed: int
    unrated_requests: int
    inference_nano: int
    training_nano: int


def get_spending(*, organization: Organization | str, since: datetime.date | None = None) -> Spending:
    """Return the charges for requests from this UTC day on and for jobs settled since then; None: all charges so far.

    All charges take as long as the organization is old, so pages ask for those of a month.
    """
    organization_id = key_of(organization)
    series = UsageSeries.objects.filter(organization_id=organization_id, sku__startswith="inference:")
    holds = Hold.objects.filter(organization_id=organization_id, purpose=HoldPurpose.JOB)
    if since is not None:
        series = series.filter(day__gte=since)
        holds = holds.filter(status=HoldStatus.CLOSED, closed_at__gte=begin_of_day(since))
    sums = series.aggregate(
        tokens=Sum("rated_quantity"),
        posted=Sum("posted_nano"),
        unrated=Sum(F("request_count") - F("rated_request_count"), filter=Q(sku__startswith=_INPUT_SKUS)),
    )
    training = holds.aggregate(nano=Sum(_KEPT))
    return Spending(
        tokens_billed=sums["tokens"] or 0,
        unrated_requests=sums["unrated"] or 0,
        inference_nano=sums["posted"] or 0,
        training_nano=training["nano"] or 0,
    )


def sources_of_holds(*, organization: Organization | str, ids: Collection[str]) -> dict[str, str]:
    """Return the source of each hold, a job or a gateway, by the hold's id."""
    holds = Hold.objects.for_organization(organization).filter(pk__in=list(ids))
    return dict(holds.values_list("pk", "source"))


def list_usage(*, organization: Organization | str, since: datetime.date) -> QuerySet[UsageSeries]:
    """Return the organization's usage by day, newest first, then by model and SKU."""
    rows = UsageSeries.objects.filter(organization_id=key_of(organization), day__gte=since)
    return rows.select_related("price_rule").order_by("-day", "subject", "sku", "pk")


def has_used_an_adapter(*, organization: Organization | str) -> bool:
    """Return whether an adapter of the organization ever answered a request."""
    series = UsageSeries.objects.for_organization(organization)
    return series.exclude(adapter_version_id="").filter(request_count__gt=0).exists()


def list_recorded_ids(*, ids: Collection[str]) -> frozenset[str]:
    """Return which of these requests are recorded."""
    return frozenset(UsageEvent.objects.filter(pk__in=ids).values_list("pk", flat=True))


def list_lots(*, organization: Organization | str) -> QuerySet[CreditLot]:
    """Return the lots with credit left, in spending order."""
    return spendable_lots(organization_id=key_of(organization))


def list_open_holds(*, organization: Organization | str) -> QuerySet[Hold]:
    """Return the open holds, newest first."""
    return Hold.objects.for_organization(organization).filter(status=HoldStatus.OPEN).order_by("-created_at", "-pk")


def open_slices() -> QuerySet[Hold]:
    """Return the slices that gateways may spend from now, of all organizations."""
    return Hold.objects.filter(purpose=HoldPurpose.INFERENCE, status=HoldStatus.OPEN)


def list_invoices(*, organization: Organization | str) -> QuerySet[Invoice]:
    """Return the organization's invoices, newest month first."""
    return Invoice.objects.for_organization(organization).order_by("-month")


def get_invoice(*, organization: Organization | str, id: str) -> Invoice:
    """Return one invoice. Raises NotFound."""
    invoice = list_invoices(organization=organization).select_related("organization").filter(pk=id).first()
    if invoice is None:
        raise NotFound(gettext("No such invoice."), param="invoice_id")
    return invoice


def sum_lots(*, organizations: Collection[str]) -> dict[tuple[str, str], int]:
    """Return the remaining credit of each organization, by lot kind; without any it has no entry."""
    left = CreditLot.objects.filter(organization_id__in=organizations, remaining_nano__gt=0)
    rows = left.values("organization_id", "kind").annotate(nano=Sum("remaining_nano")).order_by()
    return {(row["organization_id"], row["kind"]): row["nano"] for row in rows}
