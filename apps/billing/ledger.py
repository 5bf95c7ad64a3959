"""The ledger: the one function that posts transactions, and the wallet lock that every movement of money takes first.

Credits are positive. A wallet's balance is what the organization may still spend; a hold's balance is set aside.
    grant     promotional_credit -> wallet        hold      wallet -> hold
    capture   hold -> revenue                     release   hold -> wallet
    top-up    cash_clearing -> wallet             expiry    wallet -> promotional_credit | breakage
Credit that leaves both wallet and hold is drawn from credit lots, in the order of apps.billing.lots.
"""

import datetime
import hashlib
import json
from collections.abc import Mapping

from django.db import connection

from apps.accounts.models import Organization, key_of
from apps.billing.lots import LotsExhausted
from apps.billing.models import AccountKind, Hold, LedgerAccount, LedgerTransaction, PostingKind
from apps.core.audit import require_transaction
from apps.core.errors import DomainError

# The functions are defined in apps/billing/migrations/0001_initial.py.
_LOCK = "SELECT * FROM ledger_lock_wallet(%s)"
_LOCK_OF_HOLD = "SELECT * FROM ledger_lock_wallet((SELECT organization_id FROM billing_hold WHERE id = %s))"
_FIND = "SELECT id FROM billing_ledgertransaction WHERE idempotency_key = %s"
_POST = "SELECT ledger_post(%s, %s, %s, %s, %s, %s, %s, %s, %s::text[], %s::bigint[], %s::text[], %s::bigint[], %s)"
_OPEN = """
    INSERT INTO billing_hold (id, organization_id, purpose, source, price_rule_id, key_id, member_id, labels,
        project_id, amount_nano, captured_nano, refunded_nano, invoiced_nano, used_nano, status, expires_at)
    VALUES (%s, %s, %s, %s, %s, %s, %s, %s::jsonb, %s, %s, 0, 0, 0, 0, 'open', %s);
"""
_CLOSE = "UPDATE billing_hold SET status = 'closed', captured_nano = %s, closed_at = %s WHERE id = %s;"
_FLOORED = {AccountKind.WALLET: 0, AccountKind.HOLD: 0}


class UnexplainedCredit(Exception):
    """Credit came in without a lot to hold it: a bug of the caller."""


class IdempotencyMismatch(DomainError):
    """The key was used before for another request."""

    code = "idempotency_key_reused"


def lock_wallet(*, organization: Organization | str) -> LedgerAccount:
    """Lock and return the organization's wallet. Every movement of its money starts here, which prevents deadlocks."""
    organization_id = key_of(organization)
    wallet = _lock(organization_id)
    if wallet is None:
        account(organization=organization_id, kind=AccountKind.WALLET)
        wallet = _lock(organization_id)
    assert wallet is not None
    return wallet


def lock_wallet_of_hold(*, hold_id: str) -> LedgerAccount:
    """Lock and return the wallet of a hold's owner. Raises LedgerAccount.DoesNotExist for an unknown hold."""
    wallet = _lock(hold_id, _LOCK_OF_HOLD)
    if wallet is None:
        raise LedgerAccount.DoesNotExist(f"there is no hold {hold_id}")
    return wallet


def _lock(of: str | None, statement: str = _LOCK) -> LedgerAccount | None:
    require_transaction()
    with connection.cursor() as cursor:
        cursor.execute(statement, [of])
        row = cursor.fetchone()
    if row is None:
        return None
    wallet = LedgerAccount(
        pk=row[0], organization_id=row[1], kind=AccountKind.WALLET, balance_nano=row[2], floor_nano=row[3],
        stopped_because=row[4],
    )  # fmt: skip
    wallet.hold_account_id, wallet.revenue_account_id, wallet.has_budgets, wallet.locked_at = row[5:]
    return wallet


def beside(wallet: LedgerAccount, kind: AccountKind) -> LedgerAccount:
    """Return the owner's hold account or the platform's revenue account. The wallet's lock already read its id."""
    owner = None if kind == AccountKind.REVENUE else wallet.owner_id
    # Accounts are never closed, so an id read earlier stays valid.
    found = wallet.revenue_account_id if kind == AccountKind.REVENUE else wallet.hold_account_id
    return (
        LedgerAccount(pk=found, organization_id=owner, kind=kind) if found else account(organization=owner, kind=kind)
    )


def account(*, organization: Organization | str | None, kind: AccountKind) -> LedgerAccount:
    """Return the account, opening it on first use. Wallet and hold cannot go below zero."""
    key = {"organization_id": key_of(organization), "kind": kind}
    found = LedgerAccount.objects.filter(**key).first()
    if found is None:
        fresh = LedgerAccount(**key, floor_nano=_FLOORED.get(kind))
        LedgerAccount.objects.bulk_create([fresh], ignore_conflicts=True)
        found = LedgerAccount.objects.get(**key)
    return found


def posted_before(
    *, organization: Organization | str | None, idempotency_key: str, request: Mapping[str, object]
) -> LedgerTransaction | None:
    """Return the transaction already posted under the key.

    Raises IdempotencyMismatch when it belongs to another request or another organization; that posting is never
    returned. Call it after `lock_wallet`: before the lock, two callers with one key would both find nothing.
    """
    require_transaction()
    with connection.cursor() as cursor:
        cursor.execute(_FIND, [idempotency_key])
        row = cursor.fetchone()
    if row is None:
        return None
    found = LedgerTransaction.objects.get(pk=row[0])
    if found.organization_id != key_of(organization) or found.request_sha256 != _fingerprint(request):
        raise IdempotencyMismatch(f"{idempotency_key!r} was used for a different request", param="idempotency_key")
    return found


def post(
    *,
    organization: Organization | str | None,
    kind: PostingKind,
    legs: Mapping[LedgerAccount, int],
    by: str,
    source: str,
    idempotency_key: str,
    request: Mapping[str, object],
    reason: str = "",
    lots: Mapping[str, int] | None = None,
    opens: Hold | None = None,
    closes: Hold | None = None,
) -> LedgerTransaction:
    """Write one balanced transaction; the database refuses it at commit unless its legs sum to zero.

    `lots` names how much it moves in which lot; other credit that leaves is drawn in the usual order. `opens` is a hold
    to insert and `closes` a hold to save as closed, both in the same database call. The caller holds the wallet's lock.
    Raises UnexplainedCredit, LotsExhausted.
    """
    require_transaction()
    organization_id = key_of(organization)
    moved = {lot_id: nano for lot_id, nano in (lots or {}).items() if nano}
    draw_nano = sum(moved.values()) - sum(nano for leg, nano in legs.items() if leg.kind in _FLOORED)
    if draw_nano < 0:
        raise UnexplainedCredit(f"{-draw_nano} nano of credit belong to no lot")
    transaction = LedgerTransaction(
        organization_id=organization_id,
        kind=kind,
        idempotency_key=idempotency_key,
        request_sha256=_fingerprint(request),
        source=source,
        actor=by,
        reason=reason[:300],
    )
    given = [
        transaction.pk, organization_id, kind, idempotency_key, transaction.request_sha256, source, by,
        transaction.reason, [leg.pk for leg, nano in legs.items() if nano],
        [nano for nano in legs.values() if nano], list(moved), list(moved.values()), draw_nano,
    ]  # fmt: skip
    before, of_hold = _with_hold(opens, closes)
    with connection.cursor() as cursor:
        cursor.execute(before + _POST, [*of_hold, *given])
        while cursor.description is None:  # the statement about the hold returns no rows
            cursor.nextset()
        (short_nano,) = cursor.fetchone()
    if short_nano:
        raise LotsExhausted(f"{organization_id}: {short_nano} of {draw_nano} nano are in no lot")
    transaction._state.adding = False
    return transaction


def _with_hold(opens: Hold | None, closes: Hold | None) -> tuple[str, tuple[int | str | datetime.datetime | None, ...]]:
    if opens is not None:
        labels = json.dumps(opens.labels)
        return _OPEN, (
            opens.pk, opens.organization_id, opens.purpose, opens.source, opens.price_rule_id, opens.key_id,
            opens.member_id, labels, opens.project_id, opens.amount_nano, opens.expires_at,
        )  # fmt: skip
    if closes is not None:
        return _CLOSE, (closes.captured_nano, closes.closed_at, closes.pk)
    return "", ()


def _fingerprint(request: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
