"""One worker: its load, its attempts and what happened to it; and cordoning, draining and revoking it."""

import datetime
from collections.abc import Sequence

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect
from django.urls import reverse
from django.utils.translation import gettext, ngettext
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from apps.accounts.queries import names_of_actors
from apps.core.audit_log import AuditFilter, list_entries
from apps.core.database.clock import db_now
from apps.core.http.confirmation import AffectedRow, ConfirmedAction, confirm, say_undoable
from apps.core.messages.translation import later
from apps.core.objects.page_tables import rows_at_once
from apps.finetuning.lifecycle import RUN_HOLDING_LEASE
from apps.finetuning.models import JobEvent, Run, RunMember, Worker, WorkerKind
from apps.finetuning.pools import operations
from apps.finetuning.usage.occupancy import jobs_on, seconds_between
from apps.interfaces.staff.access import operator_id, operator_view
from apps.interfaces.staff.live import render_live

_SHOWN = 50
_RECENT = datetime.timedelta(hours=24)
_ACTIONS = {
    "cordon": (operations.cordon, later("%(name)s takes no new work.")),
    "uncordon": (operations.uncordon, later("%(name)s takes work again.")),
    "drain": (operations.drain, later("%(name)s gives up its runs and takes no new work.")),
    "undrain": (operations.undrain, later("%(name)s keeps its runs, and takes no new work.")),
}


@require_safe
@operator_view
def detail(request: HttpRequest, worker_id: str) -> HttpResponse:
    """Show one worker with its newest attempts and the audit log of its states; it stays current."""
    worker = get_object_or_404(Worker.objects.select_related("pool__gpu_type"), pk=worker_id)
    now = db_now()
    runs = _newest_runs(worker, rows_at_once(request, "attempts", _SHOWN))
    running = [run for run in runs if run.status in RUN_HOLDING_LEASE]
    changes = list_entries(organization=None, chosen=AuditFilter(target=worker.pk))
    entries = list(changes[: rows_at_once(request, "state-changes", _SHOWN)])
    names = names_of_actors(organization=None, actors={entry.actor for entry in entries})
    metrics: dict[str, object] = {}
    if running:  # of the last step that the newest attempt reported
        events = JobEvent.objects.filter(job=running[0].job_id, type="metrics").order_by("-sequence")
        metrics = events.values_list("data", flat=True).first() or {}
    spans = ((run.job.gpus_per_node, run.leased_at, run.finished_at) for run in runs if run.leased_at is not None)
    busy = sum(gpus * seconds_between(since, until, begin=now - _RECENT, end=now) for gpus, since, until in spans)
    context = {
        "worker": worker,
        "runs": runs,
        "running": running,
        "moved": [(run.job_id, run.organization.name) for run in running],
        "gpu_load": metrics.get("gpu_utilization"),
        "memory_bytes": metrics.get("memory_bytes"),
        "busy_share": busy / (worker.gpu_count * _RECENT.total_seconds()),
        "entries": [{"entry": entry, "who": names[entry.actor]} for entry in entries],
    }
    return render_live(request, "staff/machines/workers/detail.html", context, now=now)


def _newest_runs(worker: Worker, count: int) -> list[Run]:
    """Return the `count` newest runs that the worker led or joined. Each of the two is read by its own index."""
    rows = Run.objects.select_related("job", "organization")
    places = RunMember.objects.filter(worker=worker).order_by("-pk").values_list("run_id", flat=True)[:count]
    led = list(rows.filter(worker=worker).order_by("-leased_at", "-pk")[:count])
    joined = rows.in_bulk(list(places))
    found = {run.pk: run for run in led} | joined
    newest = sorted(found.values(), key=lambda run: (run.leased_at or run.created_at, run.pk), reverse=True)
    return newest[:count]


@require_POST
@operator_view
def act(request: HttpRequest, worker_id: str, action: str) -> HttpResponse:
    worker = get_object_or_404(Worker.objects.select_related("pool"), pk=worker_id)
    change, words = _ACTIONS[action]
    undo = _undo_of(worker, action)
    change(worker=worker, by=operator_id(request))
    text = words % {"name": worker.hostname}
    if undo:
        say_undoable(request, text, url=reverse(f"staff:worker_{undo}", args=[worker.pk]))
    else:
        messages.success(request, text)
    return redirect("staff:worker_detail", worker_id=worker.pk)


def _undo_of(worker: Worker, action: str) -> str:
    """Return the action that leads from the worker's state after `action` back to its present one; "" if none does."""
    if action == "uncordon":  # it ends a drain as well
        return "drain" if worker.drain_requested_at else "cordon" if worker.cordoned_at else ""
    if action == "undrain":
        return "drain" if worker.drain_requested_at else ""
    if worker.drain_requested_at or (action == "cordon" and worker.cordoned_at):  # nothing changes
        return ""
    return "undrain" if worker.cordoned_at else "uncordon"


@require_http_methods(["GET", "HEAD", "POST"])
@operator_view
def revoke(request: HttpRequest) -> HttpResponse:
    """Revoke the credentials of workers, after the name of one or their number was typed."""
    return confirm(request, _REVOKE)


def _find(request: HttpRequest, ids: Sequence[str]) -> list[AffectedRow]:
    jobs = jobs_on(workers=ids)
    return [
        AffectedRow(
            worker.pk,
            worker.hostname,
            _effect_of(worker, len(jobs.get(worker.pk, []))),
            reverse("staff:worker_detail", args=[worker.pk]),
        )
        for worker in Worker.objects.filter(pk__in=ids).order_by("hostname")
    ]


def _effect_of(worker: Worker, held: int) -> str:
    if worker.revoked_at:
        return gettext("Its credential is revoked already.")
    if worker.kind == WorkerKind.REPLICA:
        return gettext("It gets no more requests. Adapters that no other replica has loaded stop answering.")
    if not held:
        return gettext("It works on no job.")
    return ngettext(
        "%(count)s job loses its work since the last checkpoint, and starts from there on another worker.",
        "%(count)s jobs lose their work since the last checkpoint, and start from there on other workers.",
        held,
    ) % {"count": held}


def _revoke(request: HttpRequest, worker_id: str) -> None:
    operations.revoke(worker=get_object_or_404(Worker, pk=worker_id), by=operator_id(request))


_REVOKE = ConfirmedAction[HttpRequest](
    parameter="worker",
    verb=later("Revoke"),
    nouns=(later("worker"), later("workers")),
    warning=later("A revoked worker never connects again. To keep its work, drain it first."),
    done=later("Revoked"),
    list_url_name="staff:worker_list",
    list_title=later("Workers"),
    find=_find,
    act=_revoke,
)
