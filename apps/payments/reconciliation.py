"""Comparison of the books with Stripe's account: hourly for the last days, daily for the last month.

First the events that never arrived are read from Stripe's list and handled, so a lost webhook is no difference. Then
the cash of each payment, refund and dispute is compared; Stripe's fees are posted from its list. A difference pages: a
critical log line, and an entry in the operators' list until it is resolved. So does a movement in another currency.
"""

import datetime
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from django.db import transaction
from django.db.models import Sum
from django.utils.translation import gettext

from apps.billing.ledger import account, post, posted_before
from apps.billing.models import AccountKind, LedgerEntry, PostingKind
from apps.core import audit
from apps.core.database.locks import lock
from apps.core.errors import NotFound
from apps.core.money import NANO_PER_CENT
from apps.payments import webhooks
from apps.payments.models import CardRefund, Reconciliation, ReconciliationDifference, ReconciliationKind, TopUp
from apps.payments.stripe import gateway
from apps.payments.stripe.objects import CashMovement

logger = logging.getLogger(__name__)

LOOK_BACK = {
    ReconciliationKind.HOURLY: datetime.timedelta(days=3),
    ReconciliationKind.DAILY: datetime.timedelta(days=35),
}
# Recent movements may be on one side only: webhooks and Stripe's list take a moment.
_SETTLES_WITHIN = datetime.timedelta(minutes=10)
# Movements between Stripe and the bank, or Stripe itself: no customer's money, and not in the books.
_NOT_CUSTOMERS = frozenset(
    {"payout", "payout_failure", "payout_cancel", "stripe_fee", "tax_fee", "topup", "topup_reversal"}
)


def reconcile(*, kind: ReconciliationKind, now: datetime.datetime) -> Reconciliation:
    """Compare, store the result, and page on each new difference. Calls Stripe. Safe to repeat."""
    since, until = now - LOOK_BACK[kind], now - _SETTLES_WITHIN
    missed = webhooks.ingest_missed(since=since, until=now)
    for event_id in webhooks.list_unhandled(now=now + datetime.timedelta(hours=1)):
        webhooks.handle_or_record(event_id=event_id)
    movements = [
        movement
        for movement in gateway.list_cash_movements(since=since, until=until)
        if movement.kind not in _NOT_CUSTOMERS
    ]
    obstacles = {movement.source_id: movement.obstacle for movement in movements if movement.obstacle}
    comparable = [movement for movement in movements if not movement.obstacle]
    theirs, ours = _sum_by_source(comparable), _ours(movements, since, until)
    with transaction.atomic():
        _post_fees(comparable)
        differing = {source for source in theirs.keys() | ours.keys() if theirs.get(source, 0) != ours.get(source, 0)}
        _record_differences(differing, ours, theirs, obstacles, now)
        return Reconciliation.objects.create(
            kind=kind, since=since, until=until, movement_count=len(movements), missed_events=missed,
            ours_cents=sum(ours.values()), theirs_cents=sum(theirs.values()),
        )  # fmt: skip


def _sum_by_source(movements: Iterable[CashMovement]) -> dict[str, int]:
    sums: dict[str, int] = defaultdict(int)
    for movement in movements:
        sums[movement.source_id] += movement.amount_cents
    return dict(sums)


# --- The books' side --------------------------------------------------------------------------------------------------


def _ours(movements: Sequence[CashMovement], since: datetime.datetime, until: datetime.datetime) -> dict[str, int]:
    """Return the cash moved in the books for every object that Stripe lists, and for payments it does not list."""
    keys = _keys_by_source(movements)
    # The cash that came in (positive) or went out under each idempotency key.
    rows = LedgerEntry.objects.filter(
        transaction__idempotency_key__in={key for named in keys.values() for key in named},
        account__kind=AccountKind.CASH_CLEARING,
    )
    sums = rows.values("transaction__idempotency_key").annotate(nano=Sum("amount_nano"))
    cash = {row["transaction__idempotency_key"]: -row["nano"] // NANO_PER_CENT for row in sums}
    ours = {source: sum(cash.get(key, 0) for key in named) for source, named in keys.items()}
    return ours | _credited_without_cash(keys, since, until)


def _keys_by_source(movements: Sequence[CashMovement]) -> dict[str, set[str]]:
    """Return, by Stripe's id, the keys under which its cash may be posted: see topups, refunds and disputes."""
    keys: dict[str, set[str]] = defaultdict(set)
    for movement in movements:
        source = movement.source_id
        keys[source] |= {f"topup:stripe:{source}", f"stripe:{source}", f"topup:stripe:{source}:returned"}
        keys[source] |= {f"stripe:{movement.id}", f"topup:stripe:{movement.id}"}
    for refund in CardRefund.objects.filter(stripe_id__in=list(keys)).exclude(hold_id=""):
        keys[refund.stripe_id or ""].add(f"settle:{refund.hold_id}")
    return dict(keys)


def _credited_without_cash(
    listed: Mapping[str, object], since: datetime.datetime, until: datetime.datetime
) -> dict[str, int]:
    """Return credited payments that Stripe does not list, unless Stripe took them at another time."""
    credited = TopUp.objects.filter(paid_at__gte=since, paid_at__lt=until).exclude(payment_intent_id__in=list(listed))
    found = {}
    for topup in credited:
        total = topup.amount_cents + topup.tax_cents
        payment = gateway.get_payment(payment_intent_id=topup.payment_intent_id or "")
        if payment.received_cents != total:
            found[payment.id] = total
    return found


# --- Fees and differences ---------------------------------------------------------------------------------------------


def _post_fees(movements: Iterable[CashMovement]) -> None:
    """Post Stripe's fee for each movement, once."""
    lock("stripe fees")
    for movement in movements:
        request = {"fee": movement.id, "cents": movement.fee_cents}
        key = f"stripe-fee:{movement.id}"
        if not movement.fee_cents or posted_before(organization=None, idempotency_key=key, request=request):
            continue
        fee_nano = movement.fee_cents * NANO_PER_CENT
        post(
            organization=None,
            kind=PostingKind.STRIPE_FEE,
            legs={
                account(organization=None, kind=AccountKind.STRIPE_FEES): -fee_nano,
                account(organization=None, kind=AccountKind.CASH_CLEARING): fee_nano,
            },
            by="system",
            source=movement.id,
            idempotency_key=key,
            request=request,
        )


def _record_differences(
    differing: Iterable[str],
    ours: Mapping[str, int],
    theirs: Mapping[str, int],
    obstacles: Mapping[str, str],
    now: datetime.datetime,
) -> None:
    """Store and page each new or changed difference; close those that disappeared.

    `obstacles` are why Stripe's side of some objects, which counts as 0, cannot be compared.
    """
    named = {*differing, *obstacles}
    for source in sorted(named):
        amounts = {"ours_cents": ours.get(source, 0), "theirs_cents": theirs.get(source, 0)}
        note = obstacles.get(source, "")
        found, is_new = ReconciliationDifference.objects.get_or_create(
            source_id=source, defaults=amounts | {"note": note}
        )
        has_changed = any(getattr(found, name) != cents for name, cents in amounts.items())
        if has_changed:
            reopened = {"resolved_at": None, "resolved_by": "", "note": note}
            ReconciliationDifference.objects.filter(pk=found.pk).update(**amounts, **reopened)
        if is_new or has_changed:
            logger.critical("the books and Stripe differ on %s: %s %s", source, amounts, note)
    agreeing = (ours.keys() | theirs.keys()) - named
    ReconciliationDifference.objects.filter(source_id__in=agreeing, resolved_at=None).update(
        resolved_at=now, resolved_by="system", note="They agree now."
    )


def list_differences(*, limit: int = 50) -> list[ReconciliationDifference]:
    """Return the newest unresolved differences, at most `limit`."""
    return list(ReconciliationDifference.objects.filter(resolved_at=None).order_by("-found_at")[:limit])


def list_reconciliations(*, limit: int = 20) -> list[Reconciliation]:
    return list(Reconciliation.objects.order_by("-created_at")[:limit])


@transaction.atomic
def resolve_difference(*, difference_id: str, by: str, note: str, now: datetime.datetime) -> None:
    """Close a difference with a note on what was done. Raises NotFound."""
    changed = ReconciliationDifference.objects.filter(pk=difference_id, resolved_at=None).update(
        resolved_at=now, resolved_by=by, note=note[:300]
    )
    if not changed:
        raise NotFound(gettext("No such open difference."))
    audit.record(organization=None, by=by, action="difference.resolved", target=difference_id, note=note)
