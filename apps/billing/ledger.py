"""Posting to the ledger: the one function that writes transactions, and the lock every mover of money takes first.

Credits are positive. A wallet's balance is what the organization may still spend; a hold's what is set aside.
    grant     promotional_credit -> wallet        hold      wallet -> hold
    capture   hold -> revenue                     release   hold -> wallet
    top-up    cash_clearing -> wallet             expiry    wallet -> promotional_credit | breakage
What leaves wallet and hold together leaves credit lots, in the order of apps.billing.lots.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from django.db.models import OuterRef, Subquery

from apps.billing.lots import draws_for
from apps.billing.models import AccountKind, Hold, LedgerAccount, LedgerEntry, LedgerTransaction, LotMovement
from apps.core.audit import require_transaction
from apps.core.errors import DomainError

# Accounts are opened once and never closed, so that their ids may be read before the lock is had.
_BESIDE = {
    "hold_account": Subquery(
        LedgerAccount.objects.filter(organization_id=OuterRef("organization_id"), kind=AccountKind.HOLD).values("pk")
    ),
    "revenue_account": Subquery(LedgerAccount.objects.filter(organization=None, kind=AccountKind.REVENUE).values("pk")),
}
_FLOORED = {AccountKind.WALLET: 0, AccountKind.HOLD: 0}


class UnexplainedCredit(Exception):
    """Credit came in without a lot to put it into: a bug of the caller."""


class IdempotencyMismatch(DomainError):
    """The key was used before for something else."""

    code = "idempotency_key_reused"


def lock_wallet(*, organization: Any) -> LedgerAccount:
    """Lock and return the organization's wallet; every movement of its money starts here, so that none deadlock."""
    require_transaction()
    organization_id = getattr(organization, "pk", organization)
    found = LedgerAccount.objects.select_for_update().filter(organization_id=organization_id, kind=AccountKind.WALLET)
    found = found.annotate(**_BESIDE)
    wallet = found.first()
    if wallet is None:
        account(organization=organization, kind=AccountKind.WALLET)
        wallet = found.get()
    return wallet


def lock_wallet_of_hold(*, hold_id: str) -> LedgerAccount:
    """Do as `lock_wallet` for the owner of a hold. Raises LedgerAccount.DoesNotExist when there is no such hold."""
    require_transaction()
    owner = Hold.objects.filter(pk=hold_id).values("organization_id")
    found = LedgerAccount.objects.select_for_update().filter(organization_id__in=owner, kind=AccountKind.WALLET)
    return found.annotate(**_BESIDE).get()


def beside(wallet: LedgerAccount, kind: AccountKind) -> LedgerAccount:
    """Return the owner's hold account, or the platform's revenue, for posting: its id came with the wallet's lock."""
    owner = None if kind == AccountKind.REVENUE else wallet.organization_id
    found = getattr(wallet, f"{kind}_account", None)
    return (
        LedgerAccount(pk=found, organization_id=owner, kind=kind) if found else account(organization=owner, kind=kind)
    )


def account(*, organization: Any, kind: AccountKind) -> LedgerAccount:
    """Return the account, opening it on first use. Wallet and hold may not go below zero."""
    key = {"organization_id": getattr(organization, "pk", organization), "kind": kind}
    found = LedgerAccount.objects.filter(**key).first()
    if found is None:
        fresh = LedgerAccount(**key, floor_nano=_FLOORED.get(kind))
        LedgerAccount.objects.bulk_create([fresh], ignore_conflicts=True)
        found = LedgerAccount.objects.get(**key)
    return found


def posted_before(*, idempotency_key: str, request: Mapping[str, Any]) -> LedgerTransaction | None:
    """Return the transaction already posted under the key. Raises IdempotencyMismatch when it was another request.

    Call it after `lock_wallet`: checked before the lock, two callers with one key would both find nothing.
    """
    require_transaction()
    found = LedgerTransaction.objects.filter(idempotency_key=idempotency_key).first()
    if found is not None and found.request_sha256 != _fingerprint(request):
        raise IdempotencyMismatch(f"{idempotency_key!r} was used for a different request", param="idempotency_key")
    return found


def post(
    *,
    organization: Any,
    kind: str,
    legs: Mapping[LedgerAccount, int],
    by: str,
    source: str,
    idempotency_key: str,
    request: Mapping[str, Any],
    reason: str = "",
    lots: Mapping[str, int] | None = None,
    reverses: LedgerTransaction | None = None,
) -> LedgerTransaction:
    """Write one balanced transaction; the database refuses it at commit unless its legs sum to zero.

    `lots` says what it moves in which lot; credit that leaves beyond that is drawn in the usual order. The caller holds
    the wallet's lock. Raises UnexplainedCredit.
    """
    organization_id = getattr(organization, "pk", organization)
    movements = _lot_movements(organization_id, legs, lots or {})
    transaction = LedgerTransaction.objects.create(
        organization_id=organization_id,
        kind=kind,
        idempotency_key=idempotency_key,
        request_sha256=_fingerprint(request),
        source=source,
        actor=by,
        reason=reason[:300],
        reverses=reverses,
    )
    LedgerEntry.objects.bulk_create(
        LedgerEntry(transaction=transaction, organization_id=organization_id, account=leg, amount_nano=amount)
        for leg, amount in sorted(legs.items(), key=lambda item: item[0].pk)
        if amount
    )
    LotMovement.objects.bulk_create(
        LotMovement(transaction=transaction, organization_id=organization_id, lot_id=lot_id, amount_nano=amount)
        for lot_id, amount in sorted(movements.items())
        if amount
    )
    return transaction


def _lot_movements(
    organization_id: str | None, legs: Mapping[LedgerAccount, int], lots: Mapping[str, int]
) -> dict[str, int]:
    credit = sum(amount for leg, amount in legs.items() if leg.kind in _FLOORED)
    rest = credit - sum(lots.values())
    if rest > 0:
        raise UnexplainedCredit(f"{rest} nano of credit belong to no lot")
    moved = dict(lots)
    if rest < 0:
        for lot_id, amount in draws_for(organization_id=organization_id, amount_nano=-rest, taken=lots).items():
            moved[lot_id] = moved.get(lot_id, 0) - amount
    return moved


def _fingerprint(request: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
