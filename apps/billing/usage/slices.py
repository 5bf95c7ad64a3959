"""Slices: an organization's money that a gateway may spend without asking again.

A slice is a hold that grows while its gateway needs more, and closes when the gateway is idle or gone. A gateway spends
at most what its slice holds, so all gateways together never spend more than the wallet had.
"""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass

from django.db import transaction
from django.db.models import F, Sum, Window
from django.db.models.functions import Least, RowNumber
from django.utils.translation import gettext

from apps.accounts.models import ApiKey, Organization, key_of
from apps.billing.budgets import Attribution, BudgetExceeded, attribution_of_key, require_room, room_nano
from apps.billing.ledger import beside, lock_wallet, post
from apps.billing.models import AccountKind, Hold, HoldPurpose, LedgerAccount, PostingKind, UsageSeries
from apps.billing.operations import insufficient_balance, require_spending, settle_hold
from apps.billing.queries import open_slices, stopped_organizations
from apps.billing.tenant_batches import for_each
from apps.billing.usage.metering import list_unrated, rate_in_parts, rate_organization
from apps.billing.usage.spending import RATED
from apps.core.database.clock import db_now
from apps.core.money import dollars

SLICE_SECONDS = 60
# A slice grows by at most these parts of the wallet and of a key's own limit, or by what the current request needs, so
# that something is left for the other gateways.
_SHARE_OF_WALLET = 20
_SHARE_OF_KEY = 8


@dataclass(frozen=True)
class Slice:
    """The total that a gateway was given so far. The gateway itself tracks what it spent."""

    hold_id: str
    amount_nano: int


@transaction.atomic
def lease_slice(
    *, organization: Organization | str, required_nano: int, by: str, hold_id: str | None = None, key_id: str = ""
) -> Slice:
    """Set at least `required_nano` more aside for the gateway `by`, to be spent with one key.

    The amount is added to the gateway's slice if that is open, otherwise a new slice is opened. Raises
    InsufficientBalance when the wallet has less, BudgetExceeded when a budget or the key's own limit has less,
    SpendingStopped.
    """
    wallet = lock_wallet(organization=organization)
    require_spending(wallet)
    if wallet.balance_nano < required_nano:
        raise insufficient_balance(wallet.balance_nano, required_nano)
    whose = attribution_of_key(organization=wallet.owner_id, key_id=key_id)
    require_room(organization=wallet.owner_id, attribution=whose, amount_nano=required_nano)
    more = max(required_nano, wallet.balance_nano // _SHARE_OF_WALLET)
    if room := room_nano(organization=wallet.owner_id, attribution=whose):
        more = min(more, room[0])
    if limited := _limit_of_key(wallet, key_id):
        limit_nano, left_nano = limited
        if left_nano < required_nano:
            raise BudgetExceeded(
                gettext("This request needs %(amount)s. The limit of its key is %(limit)s, of which %(left)s is left.")
                % {"amount": dollars(required_nano), "limit": dollars(limit_nano), "left": dollars(left_nano)}
            )
        more = min(more, max(required_nano, left_nano // _SHARE_OF_KEY))
    found = _lock_open(wallet, hold_id) if hold_id else None
    grown = _grow(found, more) if found else _open(organization, more, by, whose)
    post(
        organization=wallet.owner_id,
        kind=PostingKind.HOLD,
        legs={wallet: -more, beside(wallet, AccountKind.HOLD): more},
        by=by,
        source=grown.pk,
        idempotency_key=f"slice:{grown.pk}:{grown.amount_nano}",
        request={"slice": grown.pk, "amount_nano": grown.amount_nano},
    )
    return Slice(hold_id=grown.pk, amount_nano=grown.amount_nano)


@transaction.atomic
def take_limit(*, organization: Organization | str, key_id: str) -> int:
    """Take from a key what it may still spend of its own limit, and return it in nano-USD; 0 without a limit.

    The key goes on with what its open slices hold.
    """
    limited = _limit_of_key(lock_wallet(organization=organization), key_id)
    if limited is None:
        return 0
    ApiKey.objects.for_organization(organization).filter(pk=key_id).update(spend_limit_nano=limited[0] - limited[1])
    return limited[1]


def _limit_of_key(wallet: LedgerAccount, key_id: str) -> tuple[int, int] | None:
    """Return a key's own limit and what is left of it; None without a limit.

    What it used counts from when a gateway reported it, charged or not. Until then its reservation is in a slice.
    """
    keys = ApiKey.objects.for_organization(wallet.owner_id).filter(pk=key_id).exclude(spend_limit_nano=None)
    found = keys.values_list("spend_limit_nano", "created_at").first()
    if found is None:
        return None
    limit_nano, created_at = found
    assert limit_nano is not None  # those without one are excluded
    set_aside = open_slices().filter(organization_id=wallet.owner_id, key_id=key_id)
    unused_nano = F("amount_nano") - Least("used_nano", "amount_nano")
    aside_nano = set_aside.aggregate(nano=Sum(unused_nano, default=0))["nano"]
    since = created_at.astimezone(datetime.UTC).date()
    series = UsageSeries.objects.filter(organization_id=wallet.owner_id, key_id=key_id, day__gte=since)
    used_nano = int(series.aggregate(nano=Sum(RATED, default=0))["nano"])
    return limit_nano, max(limit_nano - aside_nano - used_nano, 0)


def _lock_open(wallet: LedgerAccount, hold_id: str) -> Hold | None:
    of_wallet = open_slices().filter(organization_id=wallet.owner_id)
    return of_wallet.select_for_update().filter(pk=hold_id).first()


def _grow(found: Hold, more: int) -> Hold:
    found.amount_nano += more
    found.expires_at = _expiry()
    found.save(update_fields=["amount_nano", "expires_at"])
    return found


def _open(organization: Organization | str, amount_nano: int, by: str, whose: Attribution) -> Hold:
    return Hold.objects.create(
        organization_id=key_of(organization),
        purpose=HoldPurpose.INFERENCE,
        source=by,
        key_id=whose.key_id,
        member_id=whose.member_id,
        labels=dict(whose.labels),
        project_id=whose.project_id,
        amount_nano=amount_nano,
        expires_at=_expiry(),
    )


def _expiry() -> datetime.datetime:
    return db_now() + datetime.timedelta(seconds=SLICE_SECONDS)


@transaction.atomic
def renew_slices(*, hold_ids: Sequence[str]) -> frozenset[str]:
    """Extend the open slices by another minute and return their ids. The others must not be spent from.

    Slices of an organization whose spending was stopped are not extended.
    """
    renewed = open_slices().filter(pk__in=hold_ids).exclude(organization_id__in=stopped_organizations())
    kept = frozenset(renewed.order_by("pk").select_for_update().values_list("pk", flat=True))
    Hold.objects.filter(pk__in=kept).update(expires_at=_expiry())
    return kept


def close_slice(*, hold_id: str, by: str) -> None:
    """Charge what was recorded and return the rest to the wallet. Closing it again changes nothing.

    With more to charge than a few seconds allow, it stays open until it expires.
    """
    organization_id = Hold.objects.values_list("organization_id", flat=True).get(pk=hold_id)
    _close(organization_id, hold_id, by=by, reason="slice returned")


def close_expired_holds(*, limit: int = 100) -> int:
    """Close slices that are no longer renewed and return the rest to the wallets; return how many were closed.

    Organizations take turns, with the slice that expired first. Holds of jobs end with their job.
    """
    turn = Window(RowNumber(), partition_by=F("organization_id"), order_by="expires_at")
    expired = open_slices().filter(expires_at__lt=db_now()).annotate(turn=turn).order_by("turn", "expires_at")
    rows = expired.values_list("organization_id", "pk")[:limit]
    return for_each(rows, _close_expired, name="slices that no gateway renews are closed", now=db_now())


def _close_expired(row: tuple[str, str]) -> bool:
    return _close(*row, by="system", reason="slice expired", only_expired=True)


def _close(organization_id: str, hold_id: str, *, by: str, reason: str, only_expired: bool = False) -> bool:
    """Close a slice; return whether that was possible now.

    Usage is charged first: once released, the money could be spent on something else. It is charged in parts, because
    the wallet is locked meanwhile, and only that of the slice's key, because no other is recorded in it.
    """
    key_id = Hold.objects.values_list("key_id", flat=True).get(pk=hold_id)
    if not rate_in_parts(organization_id=organization_id, key_id=key_id)[1]:
        return False
    with transaction.atomic():
        wallet = lock_wallet(organization=organization_id)
        rate_organization(wallet=wallet, series=list_unrated(wallet=wallet, key_id=key_id))
        found = _lock_open(wallet, hold_id)
        if found is None or (only_expired and (found.expires_at is None or found.expires_at >= db_now())):
            return False  # another process closed or renewed it
        settle_hold(hold_id=hold_id, capture_nano=found.captured_nano, by=by, reason=reason)
    return True
