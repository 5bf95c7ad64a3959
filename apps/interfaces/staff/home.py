"""The operator's first page: what needs a decision, the load of each pool, what waits and why, failures, revenue."""

import datetime
from dataclasses import dataclass

from django.db.models import Count, Q
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.translation import gettext, ngettext_lazy
from django.views.decorators.http import require_safe

from apps.billing.books.reconciliation import list_newest_checks
from apps.billing.budgets import month_of
from apps.billing.models import Adjustment, AdjustmentStatus, CreditRequest, CreditRequestStatus
from apps.billing.usage.traffic import TrafficSum, list_hours_of_all, sum_traffic, total_of
from apps.catalog.models import PriceRequest
from apps.core.database.clock import db_now
from apps.core.messages.outbox import list_failing
from apps.finetuning.lifecycle import JobStatus
from apps.finetuning.models import FineTuningJob
from apps.finetuning.pools.margins import list_margins
from apps.finetuning.queries import list_pools
from apps.finetuning.usage.occupancy import held_hours_by_day
from apps.finetuning.usage.quotas import reasons_to_wait
from apps.interfaces.staff.access import operator_view
from apps.interfaces.staff.live import is_poll, render_live
from apps.interfaces.staff.machines.pools import list_loads
from apps.payments.lifecycle import RefundStatus
from apps.payments.models import CardRefund
from apps.serving.ready_replicas import ready_replicas, standing_replicas

_SHOWN = 8
_RECENT = datetime.timedelta(hours=24)
_HOUR = datetime.timedelta(hours=1)
_USE_DAYS = 14

# What is counted in `_alerts`, in its order: icon, tone, words, and the page with its query.
_ALERTS = (
    (
        "wallet", "",
        ngettext_lazy("%(count)s request for credit", "%(count)s requests for credit", "count"),
        "staff:books", "",
    ),
    (
        "receipt", "",
        ngettext_lazy("%(count)s adjustment to approve", "%(count)s adjustments to approve", "count"),
        "staff:books", "",
    ),
    (
        "tag", "",
        ngettext_lazy("%(count)s price to approve", "%(count)s prices to approve", "count"),
        "staff:price_list", "",
    ),
    (
        "credit-card", "",
        ngettext_lazy("%(count)s card refund to approve", "%(count)s card refunds to approve", "count"),
        "staff:payment_list", "",
    ),
    (
        "server", "warn",
        ngettext_lazy(
            "%(count)s replica with an address to accept", "%(count)s replicas with an address to accept", "count"
        ),
        "staff:replica_list", "",
    ),
    (
        "clock", "warn",
        ngettext_lazy(
            "%(count)s job paused far above its quote", "%(count)s jobs paused far above their quote", "count"
        ),
        "staff:job_list", "?status=paused",
    ),
    (
        "ban", "bad",
        ngettext_lazy("%(count)s replica isolated after a fault", "%(count)s replicas isolated after a fault", "count"),
        "staff:replica_list", "",
    ),
    (
        "circle-alert", "bad",
        ngettext_lazy(
            "%(count)s message that cannot be delivered", "%(count)s messages that cannot be delivered", "count"
        ),
        "staff:pool_list", "",
    ),
    (
        "circle-alert", "bad",
        ngettext_lazy(
            "%(count)s check of the books with differences", "%(count)s checks of the books with differences", "count"
        ),
        "staff:books", "",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Alert:
    """Something an operator should decide or repair, with the page where to do it."""

    icon: str
    tone: str
    text: str
    url: str


@require_safe
@operator_view
def show(request: HttpRequest) -> HttpResponse:
    """Show the whole installation at a glance. Alerts, load, queue and failures stay current."""
    now = db_now()
    context = _present(now) if is_poll(request) else _present(now) | _money_and_traffic(now)
    return render_live(request, "staff/home.html", context, now=now)


def _present(now: datetime.datetime) -> dict[str, object]:
    """Return the part that open pages ask for again."""
    pools = list_loads(list(list_pools()))
    today = now.astimezone(datetime.UTC).date()
    held = held_hours_by_day(first=today - datetime.timedelta(days=_USE_DAYS - 1), last=today)
    failed = FineTuningJob.objects.filter(status=JobStatus.FAILED, finished_at__gte=now - _RECENT)
    ended = FineTuningJob.objects.filter(finished_at__gte=now - _RECENT)
    counts = ended.aggregate(
        succeeded=Count("pk", filter=Q(status=JobStatus.SUCCEEDED)),
        failed=Count("pk", filter=Q(status=JobStatus.FAILED)),
    )
    return {
        "alerts": _alerts(),
        "pools": [(each, held.get(each.pool.pk, [])) for each in pools],
        "waiting": _waiting(now),
        "failed": list(failed.select_related("organization", "base_model").order_by("-finished_at")[:_SHOWN]),
        "counts": counts,
        "running": sum(each.running for each in pools),
        "queued": sum(each.queued for each in pools),
        "ready_replicas": ready_replicas().count(),
        "replicas": standing_replicas().count(),
    }


def _money_and_traffic(now: datetime.datetime) -> dict[str, object]:
    """Return the part as of the opening of the page: the month's revenue and the day's requests."""
    margins = list_margins(month=month_of(now), now=now)
    costs = [each.cost_nano for each in margins]
    hour = now.replace(minute=0, second=0, microsecond=0)
    hours = list_hours_of_all(since=hour - _RECENT + _HOUR, until=hour + _HOUR)
    return {
        "traffic": total_of(hours),
        "hours": [_ends_of(each) for each in hours],
        "newest": sum_traffic(since=hour - _HOUR, until=now),
        "revenue_nano": sum(each.revenue_nano for each in margins),
        "margin_nano": None if None in costs else sum(each.margin_nano or 0 for each in margins),
    }


def _waiting(now: datetime.datetime) -> list[tuple[FineTuningJob, str]]:
    """Return the jobs that wait longest, each with the limit that holds it back, or ""."""
    oldest = FineTuningJob.objects.select_related("organization", "pool").order_by("created_at", "pk")
    # Each state alone is read in the order of the index of open jobs; both together, through all jobs ever made.
    states = (JobStatus.QUEUED, JobStatus.VALIDATING_FILES)
    found = [job for status in states for job in oldest.filter(status=status)[:_SHOWN]]
    jobs = sorted(found, key=lambda job: (job.created_at, job.pk))[:_SHOWN]
    reasons = reasons_to_wait(jobs=[job for job in jobs if job.status == JobStatus.QUEUED], now=now)
    return [(job, reasons.get(job.pk, "")) for job in jobs]


def _alerts() -> list[Alert]:
    """Return what needs an operator, decisions first."""
    asked = CreditRequest.objects.filter(status=CreditRequestStatus.OPEN).count()
    adjustments = Adjustment.objects.filter(status=AdjustmentStatus.REQUESTED).count()
    prices = PriceRequest.objects.filter(decided_at=None).count()
    refunds = CardRefund.objects.filter(status=RefundStatus.WAITING).count()
    strangers = standing_replicas().filter(is_address_accepted=False).count()
    overrun = FineTuningJob.objects.filter(status=JobStatus.PAUSED, overran_at__isnull=False).count()
    isolated = standing_replicas().filter(isolated_at__isnull=False).count()
    failing = len(list_failing())
    broken = sum(1 for check in list_newest_checks() if check.difference_count)
    counts = (asked, adjustments, prices, refunds, strangers, overrun, isolated, failing, broken)
    return [
        Alert(icon, tone, str(text % {"count": count}), reverse(view) + query)
        for count, (icon, tone, text, view, query) in zip(counts, _ALERTS, strict=True)
        if count
    ]


def _ends_of(hour: TrafficSum) -> tuple[str, dict[str, int]]:
    """Return for the chart how the requests of an hour ended."""
    ends = {
        gettext("Answered"): hour.answered,
        gettext("Left by client"): hour.aborted,
        gettext("Refused"): hour.refused,
        gettext("Failed"): hour.failed,
    }
    return f"{hour.at:%H:%M}", ends
