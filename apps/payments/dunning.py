"""Dunning: a debtor is reminded, suspended after a week, and active again as soon as the debt is paid.

The debt is the ledger's receivable: spent credit whose payment was disputed, or refunded at Stripe. A suspended
organization gets no new holds: no job starts and no request is answered. Running jobs keep a checkpoint and pause. Its
data stays.
"""

import datetime
import logging

from django.conf import settings
from django.db import transaction
from django.db.models import Sum
from django.urls import reverse

from apps.accounts.models import Membership, Organization, key_of
from apps.billing.ledger import lock_wallet
from apps.billing.models import AccountKind, LedgerEntry
from apps.billing.operations import collect_receivable, set_spending
from apps.core import audit
from apps.core.database.transitions import advance
from apps.core.ids import new_id
from apps.core.messages import outbox
from apps.core.money import dollars
from apps.payments.lifecycle import STANDING, StandingStatus
from apps.payments.models import Standing

logger = logging.getLogger(__name__)

NOTICES_AFTER = (datetime.timedelta(0), datetime.timedelta(days=3), datetime.timedelta(days=5))
SUSPENDED_AFTER = datetime.timedelta(days=7)


def review_standings(*, now: datetime.datetime) -> None:
    """Set the standing of every organization that has or had a debt. Safe to repeat."""
    owing = _owing()
    known = Standing.objects.exclude(status=StandingStatus.ACTIVE).values_list("organization_id", flat=True)
    for organization_id in sorted({*owing, *known}):
        review(organization_id=organization_id, now=now)


@transaction.atomic
def review(*, organization_id: str, now: datetime.datetime) -> Standing | None:
    """Review one organization under its wallet's lock; return its standing, None if it never had a debt."""
    wallet = lock_wallet(organization=organization_id)
    collect_receivable(wallet=wallet, by="system", cause=new_id("review"))
    owed = owed_nano(organization=organization_id)
    row = Standing.objects.filter(organization_id=organization_id).first()
    if not owed:
        if row is not None and row.status != StandingStatus.ACTIVE:
            set_spending(organization=row.organization_id, stopped_because="")
            _move(row, StandingStatus.ACTIVE, now, 0)
        return row
    if row is None:
        row = Standing.objects.create(organization_id=organization_id, since_at=now)
    if row.status == StandingStatus.ACTIVE:
        _move(row, StandingStatus.GRACE, now, owed)
    if row.status == StandingStatus.GRACE and now - row.since_at >= SUSPENDED_AFTER:
        _suspend(row, now, owed)
    elif row.status == StandingStatus.GRACE:
        _remind(row, now, owed)
    elif row.status == StandingStatus.SUSPENDED:
        set_spending(organization=row.organization_id, stopped_because=_request_payment(owed))
    return row


def owed_nano(*, organization: Organization | str) -> int:
    """Return the organization's debt now."""
    organization_id = key_of(organization)
    return _owing(organization_id).get(organization_id, 0)


def _owing(organization_id: str | None = None) -> dict[str, int]:
    """Return the debts by organization."""
    entries = LedgerEntry.objects.filter(account__kind=AccountKind.RECEIVABLE)
    if organization_id is not None:
        entries = entries.filter(organization_id=organization_id)
    sums = entries.values("organization_id").annotate(nano=Sum("amount_nano")).filter(nano__lt=0)
    return {str(row["organization_id"]): -row["nano"] for row in sums}


def _suspend(row: Standing, now: datetime.datetime, owed_nano: int) -> None:
    why = _request_payment(owed_nano)
    set_spending(organization=row.organization_id, stopped_because=why)
    _move(row, StandingStatus.SUSPENDED, now, owed_nano)
    _mail(row, "Your organization is suspended", f"{why} Running jobs keep a checkpoint and pause. Your data is kept.")
    outbox.publish(
        topic="payments.suspended",
        key=f"payments.suspended:{row.pk}:{now.isoformat()}",
        payload={"organization_id": row.organization_id},
    )


def _request_payment(owed_nano: int) -> str:
    return f"You owe {dollars(owed_nano)}. Top up to continue."


def _remind(row: Standing, now: datetime.datetime, owed_nano: int) -> None:
    due = sum(now - row.since_at >= after for after in NOTICES_AFTER)
    if due <= row.notices_sent:
        return
    row.notices_sent = due
    row.save(update_fields=["notices_sent"])
    last_day = row.since_at + SUSPENDED_AFTER
    _mail(
        row,
        f"{dollars(owed_nano)} is owed",
        "A payment was taken back after its credit was spent. "
        f"Top up by {last_day:%-d %B %Y}, or jobs and requests stop.",
    )


def _move(row: Standing, to: StandingStatus, now: datetime.datetime, owed_nano: int) -> None:
    advance(row, to=to, transitions=STANDING, since_at=now, notices_sent=0)
    audit.record(
        organization=row.organization_id, by="system", action=f"standing.{to}", target=row.pk, owed_nano=owed_nano
    )
    logger.warning("%s is %s: it owes %d nano", row.organization_id, to, owed_nano)


def _mail(row: Standing, subject: str, body: str) -> None:
    link = f"Open billing: {settings.PUBLIC_URL}{reverse('web:billing')}"
    owners = Membership.objects.people().filter(organization_id=row.organization_id, role="owner")
    for owner in owners.select_related("user"):
        payload = {"kind": "plain", "to": owner.user.email, "subject": subject, "body": f"{body}\n\n{link}"}
        key = f"mail:standing:{row.pk}:{row.since_at.isoformat()}:{row.status}:{row.notices_sent}:{owner.pk}"
        outbox.publish(topic="mail", key=key[:200], payload=payload, organization=row.organization_id)
