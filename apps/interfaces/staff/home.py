"""The operator's first page: what needs a decision, the load of each pool, what waits and why, failures, revenue."""

import datetime
from dataclasses import dataclass

from django.db.models import Count, Q
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.http import require_safe

from apps.billing.books.reconciliation import list_newest_checks
from apps.billing.budgets import month_of
from apps.billing.models import Adjustment, AdjustmentStatus, CreditRequest, CreditRequestStatus
from apps.billing.usage.traffic import sum_traffic
from apps.catalog.models import PriceRequest
from apps.core.database.clock import db_now
from apps.core.messages.outbox import list_failing
from apps.finetuning.lifecycle import JobStatus
from apps.finetuning.models import FineTuningJob
from apps.finetuning.pools.margins import list_margins
from apps.finetuning.queries import list_pools
from apps.finetuning.usage.quotas import reasons_to_wait
from apps.interfaces.staff.access import operator_view
from apps.interfaces.staff.machines.pools import list_loads
from apps.payments.lifecycle import RefundStatus
from apps.payments.models import CardRefund
from apps.serving.models import Replica
from apps.serving.ready_replicas import ready_replicas

_SHOWN = 8
_RECENT = datetime.timedelta(hours=24)
_HOUR = datetime.timedelta(hours=1)


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
    """Show the whole installation at a glance."""
    now = db_now()
    pools = list_loads(list(list_pools()))
    margins = list_margins(month=month_of(now), now=now)
    costs = [each.cost_nano for each in margins]
    failed = FineTuningJob.objects.filter(status=JobStatus.FAILED, finished_at__gte=now - _RECENT)
    ended = FineTuningJob.objects.filter(finished_at__gte=now - _RECENT)
    counts = ended.aggregate(
        succeeded=Count("pk", filter=Q(status=JobStatus.SUCCEEDED)),
        failed=Count("pk", filter=Q(status=JobStatus.FAILED)),
    )
    hour = now.replace(minute=0, second=0, microsecond=0)
    context = {
        "alerts": _alerts(),
        "pools": pools,
        "waiting": _waiting(now),
        "failed": list(failed.select_related("organization", "base_model").order_by("-finished_at")[:_SHOWN]),
        "counts": counts,
        "traffic": sum_traffic(since=hour - _RECENT + _HOUR, until=now),
        "newest": sum_traffic(since=hour - _HOUR, until=now, with_first_tokens=True),
        "running": sum(each.running for each in pools),
        "queued": sum(each.queued for each in pools),
        "revenue_nano": sum(each.revenue_nano for each in margins),
        "margin_nano": None if None in costs else sum(each.margin_nano or 0 for each in margins),
        "ready_replicas": ready_replicas().count(),
        "replicas": Replica.objects.count(),
    }
    return render(request, "staff/home.html", context)


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
    books = reverse("staff:books")
    asked = CreditRequest.objects.filter(status=CreditRequestStatus.OPEN).count()
    adjustments = Adjustment.objects.filter(status=AdjustmentStatus.REQUESTED).count()
    prices = PriceRequest.objects.filter(decided_at=None).count()
    refunds = CardRefund.objects.filter(status=RefundStatus.WAITING).count()
    strangers = Replica.objects.filter(is_address_accepted=False).count()
    overrun = FineTuningJob.objects.filter(status=JobStatus.PAUSED, overran_at__isnull=False).count()
    isolated = Replica.objects.filter(isolated_at__isnull=False).count()
    failing = len(list_failing())
    broken = sum(1 for check in list_newest_checks() if check.difference_count)
    found = [
        ("wallet", "", asked, "request for credit", books),
        ("receipt", "", adjustments, "adjustment to approve", books),
        ("tag", "", prices, "price to approve", reverse("staff:price_list")),
        ("credit-card", "", refunds, "card refund to approve", reverse("staff:payment_list")),
        ("server", "warn", strangers, "replica with an address to accept", reverse("staff:replica_list")),
        ("clock", "warn", overrun, "job paused far above its quote", f"{reverse('staff:job_list')}?status=paused"),
        ("ban", "bad", isolated, "replica isolated after a fault", reverse("staff:replica_list")),
        ("circle-alert", "bad", failing, "message that cannot be delivered", reverse("staff:pool_list")),
        ("circle-alert", "bad", broken, "check of the books with differences", books),
    ]
    return [Alert(icon, tone, _counted(count, what), url) for icon, tone, count, what, url in found if count]


def _counted(count: int, what: str) -> str:
    noun, _, rest = what.partition(" ")
    return f"{count} {noun}{'' if count == 1 else 's'} {rest}".strip()
