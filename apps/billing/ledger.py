"""Posting to the ledger: the one function that writes transactions, and the lock every mover of money takes first.

Credits are positive. A wallet's balance is what the organization may still spend; a hold's what is set aside.
    grant     promotional_credit -> wallet        hold      wallet -> hold
    capture   hold -> revenue                     release   hold -> wallet
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from apps.billing.models import AccountKind, LedgerAccount, LedgerEntry, LedgerTransaction
from apps.core.audit import require_transaction
from apps.core.errors import DomainError

_FLOORED = {AccountKind.WALLET: 0, AccountKind.HOLD: 0}


class IdempotencyMismatch(DomainError):
    """The key was used before for something else."""

    code = "idempotency_key_reused"


def lock_wallet(*, organization: Any) -> LedgerAccount:
    """Lock and return the organization's wallet; every movement of its money starts here, so that none deadlock."""
    require_transaction()
    wallet = account(organization=organization, kind=AccountKind.WALLET)
    return LedgerAccount.objects.select_for_update().get(pk=wallet.pk)


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
) -> LedgerTransaction:
    """Write one balanced transaction; the database refuses it at commit unless its legs sum to zero."""
    organization_id = getattr(organization, "pk", organization)
    transaction = LedgerTransaction.objects.create(
        organization_id=organization_id,
        kind=kind,
        idempotency_key=idempotency_key,
        request_sha256=_fingerprint(request),
        source=source,
        actor=by,
        reason=reason,
    )
    LedgerEntry.objects.bulk_create(
        LedgerEntry(transaction=transaction, organization_id=organization_id, account=leg, amount_nano=amount)
        for leg, amount in sorted(legs.items(), key=lambda item: item[0].pk)
        if amount
    )
    return transaction


def _fingerprint(request: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
