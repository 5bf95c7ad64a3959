"""Hourly checks of the books against themselves. A check that finds a difference pages.

Each check is one statement over one snapshot of the database, so concurrent changes never appear as differences.
"""

import datetime
import logging
from collections import defaultdict
from dataclasses import dataclass

from django.db import connection
from django.db.models import F, OuterRef, Subquery, Sum
from django.utils.translation import gettext_noop

from apps.billing.models import AccountKind, LedgerAccount, LedgerCheck, LedgerEntry, UsageSeries
from apps.core.money import rated

logger = logging.getLogger(__name__)

_KEPT = 20
_CHECKED = datetime.timedelta(days=35)
# name -> rows that differ: id, value on one side, value on the other
CHECKS = {
    gettext_noop("every transaction sums to zero"): """
        SELECT transaction_id, sum(amount_nano), 0 FROM billing_ledgerentry GROUP BY 1 HAVING sum(amount_nano) <> 0
    """,
    gettext_noop("a balance is the sum of its entries"): """
        SELECT account.id, account.balance_nano, coalesce(sum(entry.amount_nano), 0)
          FROM billing_ledgeraccount account LEFT JOIN billing_ledgerentry entry ON entry.account_id = account.id
         WHERE account.floor_nano IS NOT NULL GROUP BY account.id
        HAVING account.balance_nano <> coalesce(sum(entry.amount_nano), 0)
    """,
    gettext_noop("lots are wallet and hold"): """
        SELECT organization_id, balance, coalesce(lots.remaining, 0) FROM (
            SELECT organization_id, sum(balance_nano) AS balance FROM billing_ledgeraccount
             WHERE kind IN ('wallet', 'hold') GROUP BY 1) accounts
          FULL JOIN (SELECT organization_id, sum(remaining_nano) AS remaining FROM billing_creditlot GROUP BY 1) lots
               USING (organization_id)
         WHERE balance IS DISTINCT FROM coalesce(lots.remaining, 0)
    """,
    gettext_noop("the hold account is the open holds"): """
        SELECT organization_id, balance, coalesce(holds.open, 0) FROM (
            SELECT organization_id, balance_nano AS balance FROM billing_ledgeraccount WHERE kind = 'hold') accounts
          FULL JOIN (SELECT organization_id, sum(amount_nano - captured_nano) AS open FROM billing_hold
                      WHERE status = 'open' GROUP BY 1) holds USING (organization_id)
         WHERE coalesce(balance, 0) <> coalesce(holds.open, 0)
    """,
    gettext_noop("series are their events"): """
        WITH events AS (
            SELECT organization_id, price_id, day, sum(tokens) AS tokens FROM (
                SELECT organization_id, input_price_id AS price_id, (occurred_at AT TIME ZONE 'UTC')::date AS day,
                       input_tokens AS tokens FROM billing_usageevent WHERE occurred_at >= %(since)s
                UNION ALL
                SELECT organization_id, output_price_id, (occurred_at AT TIME ZONE 'UTC')::date, output_tokens
                  FROM billing_usageevent WHERE occurred_at >= %(since)s) each
             WHERE price_id IS NOT NULL GROUP BY 1, 2, 3),
        series AS (
            SELECT organization_id, price_rule_id AS price_id, day, sum(quantity) AS tokens FROM billing_usageseries
             WHERE day >= %(since)s AND sku LIKE 'inference:%%' GROUP BY 1, 2, 3)
        SELECT organization_id || ' ' || price_id || ' ' || day, series.tokens, events.tokens
          FROM series FULL JOIN events USING (organization_id, price_id, day)
         WHERE coalesce(series.tokens, 0) <> coalesce(events.tokens, 0)
    """,
    gettext_noop("what series posted is in the ledger"): """
        SELECT series.id, series.posted_nano, coalesce(posted.nano, 0) FROM billing_usageseries series
          LEFT JOIN (SELECT source, sum(entry.amount_nano) AS nano FROM billing_ledgerentry entry
                       JOIN billing_ledgertransaction txn ON txn.id = entry.transaction_id
                       JOIN billing_ledgeraccount account ON account.id = entry.account_id
                      WHERE txn.kind = 'usage' AND account.kind = 'revenue' GROUP BY 1) posted
            ON posted.source = 'usage:' || series.id
         WHERE series.day >= %(since)s AND series.posted_nano <> coalesce(posted.nano, 0)
    """,
}


LAST_CHECK = gettext_noop("rated series cost what was posted")  # recorded once all others are


@dataclass(frozen=True)
class CheckOutcome:
    name: str
    differences: list[tuple[object, ...]]


def reconcile(*, now: datetime.datetime) -> list[CheckOutcome]:
    """Run and record every check, and log a critical line for each one that finds a difference."""
    since = now.astimezone(datetime.UTC).date() - _CHECKED
    outcomes = [CheckOutcome(name, _differences(statement, since)) for name, statement in CHECKS.items()]
    outcomes.append(CheckOutcome(LAST_CHECK, _misrated(since)))
    for outcome in outcomes:
        first = [[str(value) for value in row] for row in outcome.differences[:_KEPT]]
        LedgerCheck.objects.create(name=outcome.name, difference_count=len(outcome.differences), differences=first)
        if first:
            logger.critical("reconciliation: %s: %d differ, first %s", outcome.name, len(outcome.differences), first[0])
    return outcomes


# DISTINCT ON would read every outcome that was ever stored; this reads one of each name.
_NEWEST_CHECKS = """
    WITH RECURSIVE named AS (
        (SELECT name FROM billing_ledgercheck ORDER BY name LIMIT 1)
        UNION ALL
        SELECT (SELECT name FROM billing_ledgercheck WHERE name > named.name ORDER BY name LIMIT 1)
          FROM named WHERE named.name IS NOT NULL)
    SELECT newest.* FROM named CROSS JOIN LATERAL (
        SELECT * FROM billing_ledgercheck WHERE name = named.name ORDER BY checked_at DESC, id DESC LIMIT 1) AS newest
     ORDER BY newest.name
"""


def list_newest_checks() -> list[LedgerCheck]:
    """Return the newest outcome of each check."""
    return list(LedgerCheck.objects.raw(_NEWEST_CHECKS))


def _differences(statement: str, since: datetime.date) -> list[tuple[object, ...]]:
    with connection.cursor() as cursor:
        cursor.execute(statement, {"since": since})
        return cursor.fetchall()


def _misrated(since: datetime.date) -> list[tuple[object, ...]]:
    """Rate fully rated series again: the same price rule must give the same amount."""
    rows = UsageSeries.objects.filter(day__gte=since).select_related("price_rule")
    found: list[tuple[object, ...]] = []
    for row in rows.iterator(chunk_size=2000):
        due = rated(quantity=row.rated_quantity, price_nano=row.price_rule.price_nano, per=row.price_rule.per)
        is_paid = row.rated_quantity == row.quantity and row.rated_request_count == row.request_count
        if is_paid and due != row.posted_nano:
            found.append((row.pk, row.posted_nano, due))
    return found


# --- Receivables ------------------------------------------------------------------------------------------------------

AGES_DAYS = (30, 60, 90)


@dataclass(frozen=True)
class Receivable:
    """The debt of one organization by age: up to 30 days, up to 60, up to 90, older."""

    organization_id: str
    by_age_nano: tuple[int, ...]
    uncharged_nano: int  # usage recorded that the wallet could not pay for yet

    @property
    def total_nano(self) -> int:
        return sum(self.by_age_nano) + self.uncharged_nano


def list_receivables(*, now: datetime.datetime) -> list[Receivable]:
    """Return every organization that owes something, largest debt first. Payments settle the oldest debt first."""
    owed: dict[str, list[tuple[datetime.datetime, int]]] = defaultdict(list)
    # Accounts of debts that are not settled. Their entries are few among those of the ledger.
    posted = LedgerEntry.objects.filter(account=OuterRef("pk")).order_by().values("account")
    accounts = LedgerAccount.objects.filter(kind=AccountKind.RECEIVABLE)
    owing = accounts.annotate(nano=Subquery(posted.annotate(nano=Sum("amount_nano")).values("nano")))
    in_debt = list(owing.filter(nano__lt=0).values_list("pk", flat=True))
    entries = LedgerEntry.objects.filter(account__in=in_debt).order_by("id")
    for owner, at, nano in entries.values_list("organization_id", "created_at", "amount_nano"):
        debts = owed[str(owner)]
        if nano < 0:
            debts.append((at, -nano))
        while nano > 0 and debts:
            first_at, first = debts.pop(0)
            if first > nano:
                debts.insert(0, (first_at, first - nano))
            nano -= min(first, nano)
    uncharged = _uncharged()
    rows = [
        Receivable(owner, _by_age(owed.get(owner, []), now), uncharged.get(owner, 0)) for owner in {*owed, *uncharged}
    ]
    return sorted((row for row in rows if row.total_nano), key=lambda row: -row.total_nano)


def _by_age(debts: list[tuple[datetime.datetime, int]], now: datetime.datetime) -> tuple[int, ...]:
    sums = [0] * (len(AGES_DAYS) + 1)
    for at, nano in debts:
        sums[sum((now - at).days >= days for days in AGES_DAYS)] += nano
    return tuple(sums)


def _uncharged() -> dict[str, int]:
    # Each quantity comes with a request, so the index of unrated requests finds it.
    waiting = UsageSeries.objects.filter(quantity__gt=F("rated_quantity"), request_count__gt=F("rated_request_count"))
    sums: dict[str, int] = defaultdict(int)
    for row in waiting.select_related("price_rule"):
        due = rated(quantity=row.quantity, price_nano=row.price_rule.price_nano, per=row.price_rule.per)
        sums[row.organization_id] += due - row.posted_nano
    return dict(sums)
