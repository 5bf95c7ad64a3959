"""One worker: its load, its attempts and what happened to it; and cordoning, draining and revoking it."""

import datetime

from django.contrib import messages
from django.db.models import Q
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_POST, require_safe

from apps.accounts.queries import names_of_actors
from apps.core.audit_log import AuditFilter, list_entries
from apps.core.database.clock import db_now
from apps.core.messages.translation import later
from apps.finetuning.lifecycle import RUN_HOLDING_LEASE
from apps.finetuning.models import JobEvent, Run, Worker
from apps.finetuning.pools import operations
from apps.finetuning.usage.occupancy import seconds_between
from apps.interfaces.staff.access import operator_id, operator_view

_SHOWN = 50
_RECENT = datetime.timedelta(hours=24)
_ACTIONS = {
    "cordon": (operations.cordon, later("takes no new work")),
    "uncordon": (operations.uncordon, later("takes work again")),
    "drain": (operations.drain, later("gives up its runs and takes no new work")),
    "revoke": (operations.revoke, later("may not connect any more")),
}


@require_safe
@operator_view
def detail(request: HttpRequest, worker_id: str) -> HttpResponse:
    """Show one worker with its newest attempts and the audit log of its states."""
    worker = get_object_or_404(Worker.objects.select_related("pool__gpu_type"), pk=worker_id)
    now = db_now()
    taken = Run.objects.filter(Q(worker=worker) | Q(members__worker=worker)).distinct()
    runs = list(taken.select_related("job", "organization").order_by("-leased_at", "-pk")[:_SHOWN])
    running = [run for run in runs if run.status in RUN_HOLDING_LEASE]
    entries = list(list_entries(organization=None, chosen=AuditFilter(target=worker.pk))[:_SHOWN])
    names = names_of_actors(organization=None, actors={entry.actor for entry in entries})
    metrics = _newest_metrics(running)
    context = {
        "worker": worker,
        "runs": runs,
        "running": running,
        "gpu_load": metrics.get("gpu_utilization"),
        "memory_bytes": metrics.get("memory_bytes"),
        "busy_share": _busy_gpu_seconds(runs, now) / (worker.gpu_count * _RECENT.total_seconds()),
        "entries": [{"entry": entry, "who": names[entry.actor]} for entry in entries],
    }
    return render(request, "staff/machines/worker.html", context)


@require_POST
@operator_view
def act(request: HttpRequest, worker_id: str, action: str) -> HttpResponse:
    worker = get_object_or_404(Worker.objects.select_related("pool"), pk=worker_id)
    change, words = _ACTIONS[action]
    change(worker=worker, by=operator_id(request))
    messages.success(request, f"{worker.hostname} {words}.")
    return redirect("staff:worker_detail", worker_id=worker.pk)


def _newest_metrics(running: list[Run]) -> dict[str, object]:
    """Return the metrics of the last step that the newest attempt reported; none without an attempt."""
    if not running:
        return {}
    events = JobEvent.objects.filter(job=running[0].job_id, type="metrics").order_by("-sequence")
    return events.values_list("data", flat=True).first() or {}


def _busy_gpu_seconds(runs: list[Run], now: datetime.datetime) -> float:
    spans = ((run.job.gpus_per_node, run.leased_at, run.finished_at) for run in runs if run.leased_at is not None)
    return sum(gpus * seconds_between(since, until, begin=now - _RECENT, end=now) for gpus, since, until in spans)
