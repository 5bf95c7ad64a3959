"""Low balances: a notice when an organization has less credit than it spent in the last days.

It is given once each time the balance becomes low, and at most once a day.
"""

import datetime
from functools import partial

from django.db import transaction
from django.db.models import F, Sum
from django.utils.translation import gettext

from apps.accounts.notices.events import announce
from apps.accounts.notices.notifications import MANAGERS
from apps.billing.models import BillingProfile, Hold, HoldPurpose, HoldStatus, UsageSeries
from apps.billing.queries import get_balances
from apps.billing.tenant_batches import for_each
from apps.core.money import NANO_PER_CENT, dollars

DAYS = 3
_DAY = datetime.timedelta(days=1)


def warn_low_balances(*, now: datetime.datetime) -> int:
    """Give notice of the balances that became low; return how many. Those that recovered are watched again."""
    spent = _list_spending(now)
    balances = get_balances(organizations=list(spent))
    low = {each: nano for each, nano in spent.items() if balances[each].available_nano < nano}
    recovered = BillingProfile.objects.filter(low_balance_at__lte=now - _DAY).exclude(organization_id__in=low)
    recovered.update(low_balance_at=None)
    noticed = BillingProfile.objects.exclude(low_balance_at=None).values_list("organization_id", flat=True)
    due = [(each, nano, balances[each].available_nano) for each, nano in low.items() if each not in set(noticed)]
    return for_each(due, partial(_warn, now=now), name="low balances are noticed", now=now)


def _list_spending(now: datetime.datetime) -> dict[str, int]:
    """Return what each organization spent since DAYS ago. Requests count by day, jobs when they were charged."""
    since = now - DAYS * _DAY
    series = UsageSeries.objects.filter(day__gte=since.astimezone(datetime.UTC).date())
    holds = Hold.objects.filter(purpose=HoldPurpose.JOB, status=HoldStatus.CLOSED, closed_at__gte=since)
    spent: dict[str, int] = {}
    for rows, nano in ((series, F("posted_nano")), (holds, F("captured_nano") - F("refunded_nano"))):
        sums = rows.values("organization_id").annotate(nano=Sum(nano)).filter(nano__gt=0).order_by()
        for organization_id, total in sums.values_list("organization_id", "nano"):
            spent[organization_id] = spent.get(organization_id, 0) + total
    return spent


@transaction.atomic
def _warn(row: tuple[str, int, int], *, now: datetime.datetime) -> int:
    organization_id, spent_nano, available_nano = row
    profile, _ = BillingProfile.objects.get_or_create(organization_id=organization_id)
    if not BillingProfile.objects.filter(pk=profile.pk, low_balance_at=None).update(low_balance_at=now):
        return 0
    announce(
        organization=organization_id,
        type="balance.low",
        subject=organization_id,
        title=lambda: (
            gettext("Your balance is low: %(available)s")
            % {"available": dollars(available_nano // NANO_PER_CENT * NANO_PER_CENT)}
        ),
        path="/credit",
        key=f"low-balance:{organization_id}:{now:%Y-%m-%dT%H:%M}",
        roles=MANAGERS,
        mail=("billing.low_balance", {"organization_id": organization_id, "spent_nano": spent_nano}),
        data={"available_nano": available_nano},
    )
    return 1
