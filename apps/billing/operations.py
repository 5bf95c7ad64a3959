"""Movements of money: grants, holds, captures and releases.

Each locks the wallet, then looks for its idempotency key.
"""

import datetime
from dataclasses import dataclass

from django.db import transaction
from django.db.models import F, Sum
from django.utils.translation import gettext

from apps.accounts.models import Organization
from apps.billing.budgets import Attribution, record_spending, require_room
from apps.billing.ledger import account, beside, lock_wallet, lock_wallet_of_hold, post, posted_before
from apps.billing.lots import open_lot, returns_for
from apps.billing.models import (
    AccountKind,
    CreditLot,
    Hold,
    HoldPurpose,
    HoldStatus,
    LedgerAccount,
    LedgerTransaction,
    LotKind,
    PostingKind,
)
from apps.billing.queries import get_charged_nano
from apps.catalog.models import PriceRule
from apps.core import audit
from apps.core.database.clock import db_now
from apps.core.errors import DomainError, InvalidState, InvalidValue, QuotaExceeded
from apps.core.money import dollars


class InsufficientBalance(QuotaExceeded):
    """The wallet holds less than is required; adding credit is the fix."""


class SpendingStopped(QuotaExceeded):
    """The organization is suspended until it pays its debt; waiting does not help."""


@dataclass(frozen=True)
class Reversal:
    """How much of a paid lot was reversed. The part that was already spent is owed now."""

    transaction: LedgerTransaction
    taken_nano: int
    owed_nano: int


@transaction.atomic
def grant_credit(
    *,
    organization: Organization | str,
    amount_nano: int,
    by: str,
    reason: str,
    idempotency_key: str,
    expires_at: datetime.datetime | None = None,
    reference: str | None = None,
) -> LedgerTransaction:
    """Add promotional credit to the wallet as a separate lot, once per key. No two lots have the same `reference`."""
    if amount_nano <= 0:
        raise InvalidValue(gettext("a grant is a positive amount"), param="amount")
    wallet = lock_wallet(organization=organization)
    request = {"grant": wallet.pk, "amount_nano": amount_nano}
    if expires_at is not None:
        request["expires_at"] = expires_at.isoformat()
    if found := posted_before(organization=organization, idempotency_key=idempotency_key, request=request):
        return found
    lot = open_lot(
        organization_id=wallet.owner_id,
        kind=LotKind.PROMOTIONAL,
        amount_nano=amount_nano,
        reference=reference,
        expires_at=expires_at,
    )
    promotional = account(organization=None, kind=AccountKind.PROMOTIONAL_CREDIT)
    posted = post(
        organization=organization,
        kind=PostingKind.GRANT,
        legs={promotional: -amount_nano, wallet: amount_nano},
        by=by,
        source=wallet.pk,
        idempotency_key=idempotency_key,
        request=request,
        reason=reason,
        lots={lot.pk: amount_nano},
    )
    audit.record(organization=organization, by=by, action="credit.granted", target=posted.pk, amount_nano=amount_nano)
    return posted


@transaction.atomic
def grant_paid_credit(
    *, organization: Organization | str, amount_nano: int, reference: str, by: str, tax_nano: int = 0, reason: str = ""
) -> CreditLot:
    """Add a paid lot, once per `reference` (the payment elsewhere, e.g. `stripe:pi:<id>`), and return it.

    The cash received is `amount_nano + tax_nano`. The organization's debt is paid from the lot first. Raises
    IdempotencyMismatch when the reference was credited with another amount or to another organization.
    """
    if amount_nano <= 0 or tax_nano < 0:
        raise InvalidValue(gettext("a top-up is a positive amount"), param="amount")
    wallet = lock_wallet(organization=organization)
    request = {"top_up": wallet.pk, "amount_nano": amount_nano, "tax_nano": tax_nano}
    if posted_before(organization=organization, idempotency_key=f"topup:{reference}", request=request):
        return CreditLot.objects.get(reference=reference)
    lot = open_lot(organization_id=wallet.owner_id, kind=LotKind.PAID, amount_nano=amount_nano, reference=reference)
    post(
        organization=organization,
        kind=PostingKind.TOPUP,
        legs={
            account(organization=None, kind=AccountKind.CASH_CLEARING): -(amount_nano + tax_nano),
            account(organization=None, kind=AccountKind.TAX_PAYABLE): tax_nano,
            wallet: amount_nano,
        },
        by=by,
        source=lot.pk,
        idempotency_key=f"topup:{reference}",
        request=request,
        reason=reason,
        lots={lot.pk: amount_nano},
    )
    audit.record(organization=organization, by=by, action="credit.paid", target=lot.pk, amount_nano=amount_nano)
    collect_receivable(wallet=lock_wallet(organization=organization), by=by, cause=lot.pk)
    lot.refresh_from_db()
    return lot


@transaction.atomic
def reverse_paid_credit(
    *,
    organization: Organization | str,
    reference: str,
    amount_nano: int,
    by: str,
    reason: str,
    idempotency_key: str,
    tax_nano: int = 0,
) -> Reversal:
    """Reverse paid credit whose cash went back (a refund made elsewhere, a lost dispute).

    Unspent credit leaves the lot. Spent credit becomes a debt, and so does what the lot never had or lost before: the
    cash is gone in any case. Raises InvalidValue for an amount that is not positive.
    """
    wallet = lock_wallet(organization=organization)
    request = {"reverse": reference, "amount_nano": amount_nano, "tax_nano": tax_nano}
    lot = CreditLot.objects.select_for_update().get(organization_id=wallet.owner_id, reference=reference)
    if found := posted_before(organization=organization, idempotency_key=idempotency_key, request=request):
        taken = -sum(found.lot_movements.values_list("amount_nano", flat=True))
        return Reversal(found, taken, amount_nano - taken)
    if amount_nano <= 0:
        raise InvalidValue(gettext("The amount must be positive."), param="amount")
    of_lot = min(amount_nano, lot.amount_nano - lot.reversed_nano)
    taken = max(0, min(of_lot, lot.remaining_nano - lot.held_nano, wallet.balance_nano))
    posted = post(
        organization=organization,
        kind=PostingKind.PAYMENT_REVERSED,
        legs={
            wallet: -taken,
            account(organization=organization, kind=AccountKind.RECEIVABLE): taken - amount_nano,
            account(organization=None, kind=AccountKind.TAX_PAYABLE): -tax_nano,
            account(organization=None, kind=AccountKind.CASH_CLEARING): amount_nano + tax_nano,
        },
        by=by,
        source=lot.pk,
        idempotency_key=idempotency_key,
        request=request,
        reason=reason,
        lots={lot.pk: -taken},
    )
    CreditLot.objects.filter(pk=lot.pk).update(reversed_nano=F("reversed_nano") + of_lot)
    audit.record(organization=organization, by=by, action="credit.reversed", target=lot.pk, amount_nano=amount_nano)
    return Reversal(posted, taken, amount_nano - taken)


def left_to_reverse(*, organization: Organization | str, reference: str) -> int:
    """Return how many nano-USD of a paid lot were not paid back or taken back yet; 0 if there is no such lot."""
    lot = CreditLot.objects.for_organization(organization).filter(reference=reference).first()
    return lot.amount_nano - lot.reversed_nano if lot else 0


def collect_receivable(*, wallet: LedgerAccount, by: str, cause: str) -> int:
    """Pay the debt of the locked wallet's owner from the wallet; return how much was paid."""
    owed_account = account(organization=wallet.owner_id, kind=AccountKind.RECEIVABLE)
    owed = -(owed_account.entries.aggregate(nano=Sum("amount_nano"))["nano"] or 0)
    paid = min(owed, wallet.balance_nano)
    if paid <= 0:
        return 0
    post(
        organization=wallet.owner_id,
        kind=PostingKind.DEBT_PAID,
        legs={wallet: -paid, owed_account: paid},
        by=by,
        source=cause,
        idempotency_key=f"debt:{cause}",
        request={"debt": cause, "amount_nano": paid},
        reason="What was owed is paid from new credit",
    )
    return paid


@transaction.atomic
def hold(
    *,
    organization: Organization | str,
    purpose: HoldPurpose,
    source: str,
    amount_nano: int,
    by: str,
    idempotency_key: str,
    expires_at: datetime.datetime | None = None,
    attribution: Attribution | None = None,
    price_rule: PriceRule | None = None,
) -> Hold:
    """Set `amount_nano` aside for `source`. Raises InsufficientBalance, BudgetExceeded, SpendingStopped.

    The same key returns the same hold. `attribution` selects the budgets it counts under; `price_rule` prices the
    usage.
    """
    wallet = lock_wallet(organization=organization)
    request = {"hold": source, "purpose": purpose, "amount_nano": amount_nano}
    if found := posted_before(organization=organization, idempotency_key=idempotency_key, request=request):
        return Hold.objects.get(pk=found.source)
    require_spending(wallet)
    if wallet.balance_nano < amount_nano:
        raise insufficient_balance(wallet.balance_nano, amount_nano)
    whose = attribution or Attribution()
    if wallet.has_budgets:
        require_room(organization=wallet.owner_id, attribution=whose, amount_nano=amount_nano)
    created = Hold(
        organization_id=wallet.owner_id,
        purpose=purpose,
        source=source,
        price_rule=price_rule,
        key_id=whose.key_id,
        member_id=whose.member_id,
        labels=dict(whose.labels),
        project_id=whose.project_id,
        amount_nano=amount_nano,
        expires_at=expires_at,
    )
    post(
        organization=organization,
        kind=PostingKind.HOLD,
        legs={wallet: -amount_nano, beside(wallet, AccountKind.HOLD): amount_nano},
        by=by,
        source=created.pk,
        idempotency_key=idempotency_key,
        request=request,
        opens=created,
    )
    return created


@transaction.atomic
def settle_hold(*, hold_id: str, capture_nano: int, by: str, reason: str = "") -> Hold:
    """Charge `capture_nano` of the hold, return the rest to the wallet and close it.

    Settling a closed hold again with the same amount changes nothing. Raises DomainError, InvalidState.
    """
    wallet = lock_wallet_of_hold(hold_id=hold_id)
    found = Hold.objects.get(pk=hold_id)
    if found.status == HoldStatus.CLOSED:
        if found.captured_nano != capture_nano:
            raise InvalidState(gettext("hold %(hold_id)s was settled at another amount") % {"hold_id": hold_id})
        return found
    if not found.captured_nano <= capture_nano <= found.amount_nano:
        raise DomainError(
            gettext("hold %(hold_id)s holds %(amount_nano)s nano, not %(capture_nano)s")
            % {"hold_id": hold_id, "amount_nano": found.amount_nano, "capture_nano": capture_nano},
            code="capture_above_hold",
        )
    charge = capture_nano - found.captured_nano
    rest = found.amount_nano - capture_nano
    held, revenue = beside(wallet, AccountKind.HOLD), beside(wallet, AccountKind.REVENUE)
    if found.purpose == HoldPurpose.JOB and wallet.has_budgets:  # budgets count requests when their series are charged
        record_spending(organization=found.organization_id, charges=[(Attribution.of_hold(found), charge)])
    found.status, found.captured_nano, found.closed_at = HoldStatus.CLOSED, capture_nano, wallet.locked_at
    if charge or rest:
        post(
            organization=found.organization_id,
            kind=PostingKind.SETTLE,
            legs={held: -(charge + rest), revenue: charge, wallet: rest},
            by=by,
            source=found.source,
            idempotency_key=f"settle:{hold_id}",
            request={"settle": hold_id, "capture_nano": capture_nano},
            reason=reason,
            closes=found,
        )
    else:
        found.save(update_fields=["status", "captured_nano", "closed_at"])
    return found


@transaction.atomic
def record_estimate_loss(*, hold_id: str, total_nano: int, by: str) -> None:
    """Post the part of a job's time that its firm price left unpaid, once the hold is settled.

    It is revenue at the list price, given up as estimate loss, so it moves no credit. `total_nano` is the job's sum so
    far: later settlements post the difference, which may be negative.
    """
    wallet = lock_wallet_of_hold(hold_id=hold_id)
    found = Hold.objects.get(pk=hold_id)
    lost = account(organization=None, kind=AccountKind.ESTIMATE_LOSS)
    before = lost.entries.filter(
        organization_id=wallet.owner_id,
        transaction__source=found.source,
        transaction__kind=PostingKind.ESTIMATE_LOSS,
    )
    more_nano = total_nano + (before.aggregate(nano=Sum("amount_nano"))["nano"] or 0)
    if more_nano:
        post(
            organization=wallet.owner_id,
            kind=PostingKind.ESTIMATE_LOSS,
            legs={lost: -more_nano, beside(wallet, AccountKind.REVENUE): more_nano},
            by=by,
            source=found.source,
            idempotency_key=f"estimate_loss:{hold_id}",
            request={"estimate_loss": hold_id, "total_nano": total_nano},
        )


@transaction.atomic
def refund_source(*, organization: Organization | str, source: str, by: str, reason: str, keep_nano: int = 0) -> int:
    """Refund what was charged for `source` beyond `keep_nano` and not refunded yet, last first; return the amount.

    Amounts that an operator refunded count as charged, and stay refunded.
    """
    wallet = lock_wallet(organization=organization)
    holds = Hold.objects.filter(
        organization_id=wallet.owner_id,
        purpose=HoldPurpose.JOB,
        source=source,
        status=HoldStatus.CLOSED,
        captured_nano__gt=F("refunded_nano"),
    ).order_by("-pk")
    left = max(get_charged_nano(source=source) - keep_nano, 0)
    total = 0
    for found in holds:
        amount_nano = min(found.captured_nano - found.refunded_nano, left - total)
        if not amount_nano:
            break
        before = f":{found.refunded_nano}" if found.refunded_nano else ""
        post(
            organization=organization,
            kind=PostingKind.REFUND,
            legs={account(organization=None, kind=AccountKind.REVENUE): -amount_nano, wallet: amount_nano},
            by=by,
            source=found.source,
            idempotency_key=f"refund:{found.pk}{before}",
            request={"refund": found.pk, "amount_nano": amount_nano},
            reason=reason,
            lots=returns_for(
                organization_id=wallet.owner_id, sources=[found.source], amount_nano=amount_nano, now=db_now()
            ),
        )
        record_spending(organization=found.organization_id, charges=[(Attribution.of_hold(found), -amount_nano)])
        found.refunded_nano += amount_nano
        found.save(update_fields=["refunded_nano"])
        total += amount_nano
    return total


def require_spending(wallet: LedgerAccount) -> None:
    """Raise SpendingStopped when the owner of the locked wallet is suspended."""
    if wallet.stopped_because:
        raise SpendingStopped(
            gettext("This organization is suspended: %(stopped_because)s") % {"stopped_because": wallet.stopped_because}
        )


@transaction.atomic
def set_spending(*, organization: Organization | str, stopped_because: str) -> None:
    """Stop the organization's spending for a reason shown to its members; an empty reason allows spending again."""
    wallet = lock_wallet(organization=organization)
    LedgerAccount.objects.filter(pk=wallet.pk).update(stopped_because=stopped_because[:200])


def insufficient_balance(balance_nano: int, required_nano: int) -> InsufficientBalance:
    """Return the error, with the missing amount."""
    return InsufficientBalance(
        gettext(
            "This needs %(required_nano)s and %(balance_nano)s is available. Add at least %(required_nano_2)s "
            "of credit."
        )
        % {
            "required_nano": dollars(required_nano),
            "balance_nano": dollars(balance_nano),
            "required_nano_2": dollars(required_nano - balance_nano),
        },
        balance_nano=balance_nano,
        required_nano=required_nano,
    )
