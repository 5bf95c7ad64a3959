"""Operator pages: the jobs of all organizations, one of them with its attempts, and the actions on them."""

import datetime
from collections.abc import Sequence
from dataclasses import replace

from django.contrib import messages
from django.db.models import Q, QuerySet
from django.db.models.functions import Now
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import get_object_or_404, redirect
from django.urls import reverse
from django.utils.translation import gettext
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from apps.accounts.models import Organization
from apps.contracts.hyperparameters import Method
from apps.core.database.clock import db_now
from apps.core.database.listing import NEWEST_FIRST, Filter, Listing, render_list
from apps.core.http.confirmation import AffectedRow, ConfirmedAction, confirm
from apps.core.http.forms import domain_errors_shown
from apps.core.messages.translation import later
from apps.core.money import usd_decimal
from apps.core.templatetags.statuses import STATUSES
from apps.core.templatetags.ui import method_name, status
from apps.finetuning.jobs import control
from apps.finetuning.jobs.progress import list_progress
from apps.finetuning.jobs.waits import explain_wait
from apps.finetuning.lifecycle import JOB_TERMINAL, JobStatus
from apps.finetuning.models import FineTuningJob
from apps.finetuning.queries import list_events, list_pools
from apps.finetuning.usage import charges
from apps.interfaces.staff.access import operator_id, operator_view
from apps.interfaces.staff.live import is_poll, render_live

_EVENTS_SHOWN = 200
_STATES = (
    JobStatus.VALIDATING_FILES, JobStatus.QUEUED, JobStatus.RUNNING, JobStatus.PAUSED, JobStatus.SUCCEEDED,
    JobStatus.FAILED, JobStatus.CANCELLED,
)  # fmt: skip
_PERIODS = {1: later("Last 24 hours"), 7: later("Last 7 days"), 30: later("Last 30 days")}
_LIST = Listing[FineTuningJob](
    name=later("jobs"),
    hint=later("Id, organization, name or model"),
    url_name="staff:job_list",
    export_url_name="staff:job_export",
    searched=("id", "organization__name", "suffix", "base_model__display_name", "error_code"),
    filters={
        "status": Filter(
            later("State"),
            {"": (later("All"), Q())} | {each.value: (STATUSES[each].label, Q(status=each)) for each in _STATES},
        ),
        "method": Filter(
            later("Method"),
            {"": (later("Any method"), Q())} | {each.value: (method_name(each), Q(method=each)) for each in Method},
        ),
        "days": Filter(
            later("Created"),
            {"": (later("Any time"), Q())}
            | {
                str(days): (label, Q(created_at__gte=Now() - datetime.timedelta(days=days)))
                for days, label in _PERIODS.items()
            },
        ),
    },
    orders={**NEWEST_FIRST, "cost": (later("Highest cost first"), ("-cost_nano", "-id"))},
)
_EXPORTED = (
    "id", "organization_id", "organization", "status", "base_model", "method", "pool", "gpus", "machines",
    "created_at", "finished_at", "step", "total_steps", "billed_gpu_seconds", "cost_usd", "error",
)  # fmt: skip


@require_safe
@operator_view
def index(request: HttpRequest) -> HttpResponse:
    """List the jobs of all tenants, or of one."""
    tenant = _tenant_of(request)
    page = _list_for(tenant).page(request, _listed())
    context = {
        "tenant": tenant,
        "jobs": [
            {"job": job, "billed_seconds": job.billed_gpu_ms / 1000, "cost_nano": cost_nano}
            for job, cost_nano in with_costs(page.rows, db_now())
        ],
    }
    return render_list(request, "staff/tenants/jobs.html", page, context)


@require_safe
@operator_view
def export(request: HttpRequest) -> HttpResponseBase:
    return _list_for(_tenant_of(request)).export(request, _listed(), header=_EXPORTED, cells=_exported)


def _tenant_of(request: HttpRequest) -> Organization | None:
    wanted = request.GET.get("organization", "").replace("\x00", "")
    return Organization.objects.filter(pk=wanted).first() if wanted else None


def _list_for(tenant: Organization | None) -> Listing[FineTuningJob]:
    """Return the list with the pools of this installation, and with the organization whose jobs are asked for."""
    pools = {pool.pk: (pool.name, Q(pool=pool.pk)) for pool in list_pools()}
    more = {"pool": Filter(gettext("Pool"), {"": (gettext("Any pool"), Q()), **pools})}
    if tenant is not None:
        chosen = {"": (gettext("All organizations"), Q()), tenant.pk: (tenant.name, Q(organization=tenant.pk))}
        more["organization"] = Filter(gettext("Organization"), chosen)
    return replace(_LIST, filters={**_LIST.filters, **more})


def _listed() -> QuerySet[FineTuningJob]:
    return FineTuningJob.objects.select_related("organization", "base_model", "pool", "price_rule")


def _exported(job: FineTuningJob) -> tuple[object, ...]:
    return (
        job.pk, job.organization_id, job.organization.name, job.status, job.base_model.name, job.method,
        job.pool.name if job.pool else "", job.gpu_count, job.node_count, job.created_at.isoformat(),
        job.finished_at.isoformat() if job.finished_at else "", job.step, job.total_steps or "",
        job.billed_gpu_ms / 1000, usd_decimal(job.cost_nano), job.error_code,
    )  # fmt: skip


def with_costs(jobs: Sequence[FineTuningJob], now: datetime.datetime) -> list[tuple[FineTuningJob, int]]:
    """Return each job with its cost so far in nano-USD, as its customer sees it."""
    progress = list_progress(jobs=jobs, now=now)
    return [(job, progress[job.pk].spent_nano) for job in jobs]


# --- One job ---------------------------------------------------------------------------------------------------------


@require_safe
@operator_view
def detail(request: HttpRequest, job_id: str) -> HttpResponse:
    """Show one job: its attempts with their logs, its events, and what it cost. It is live until the job has ended."""
    shown = get_object_or_404(_jobs(), pk=job_id)
    now, is_live = db_now(), shown.status not in JOB_TERMINAL
    context = {
        "job": shown,
        "cost_nano": with_costs([shown], now)[0][1],
        "runs": list(shown.runs.order_by("-attempt").select_related("worker", "pool")),
        "events": [
            {"level": event.level, "message": event.message, "detail": "", "at": event.created_at}
            for event in list_events(job=shown).exclude(type="metrics")[:_EVENTS_SHOWN]
        ],
        "billed_seconds": shown.billed_gpu_ms / 1000,
        "trained_seconds": (trained_ms := charges.trained_ms(job=shown)) / 1000,
        "is_minimum": not is_live and shown.billed_gpu_ms > trained_ms,
        "is_live": is_live,
        "wait": explain_wait(job=shown, now=now),
        "is_overrun": shown.status == JobStatus.PAUSED and shown.overran_at is not None,
    }
    response = render_live(request, "staff/tenants/job.html", context, now=now)
    if is_poll(request) and not is_live:
        response.headers["HX-Refresh"] = "true"  # the page stops asking
    return response


@require_POST
@operator_view
def continue_overrun(request: HttpRequest, job_id: str) -> HttpResponse:
    """Continue a job that reached the limit of its firm price, at the operator's expense."""
    shown = get_object_or_404(_jobs(), pk=job_id)
    with domain_errors_shown(request):
        control.continue_overrun(job=shown, by=operator_id(request), now=db_now())
        messages.success(request, gettext("The job is queued again."))
    return redirect("staff:job_detail", job_id=shown.pk)


def _jobs() -> QuerySet[FineTuningJob]:
    return _listed().select_related("training_file__dataset")


# --- Cancelling ------------------------------------------------------------------------------------------------------


@require_http_methods(["GET", "HEAD", "POST"])
@operator_view
def cancel(request: HttpRequest) -> HttpResponse:
    """Cancel customers' jobs, after the id of one or their number was typed; workers keep their checkpoints."""
    return confirm(request, _CANCEL)


def _find(request: HttpRequest, ids: Sequence[str]) -> list[AffectedRow]:
    if request.method == "POST":
        control.lock_several(ids=ids)
    jobs = FineTuningJob.objects.filter(pk__in=ids).select_related("organization").order_by("-created_at", "-pk")
    return [
        AffectedRow(
            job.pk,
            job.pk,
            f"{job.organization.name}: {_effect_of(job)}",
            reverse("staff:job_detail", args=[job.pk]),
        )
        for job in jobs
    ]


def _effect_of(job: FineTuningJob) -> str:
    if job.status in JOB_TERMINAL:
        return gettext("It already ended (%(status)s). Nothing changes.") % {"status": status(job.status).label}
    if job.started_at is None:
        return gettext("It leaves the queue. The customer pays nothing.")
    if job.status == JobStatus.PAUSED and job.step:
        return gettext("It keeps its last checkpoint. The customer pays nothing more.")
    if job.status == JobStatus.PAUSED:
        return gettext("It has no checkpoint. The customer pays nothing more.")
    if not job.step:
        return gettext("It has not finished a step, so no checkpoint is kept. The customer pays for the start.")
    return gettext("It stops and keeps its last checkpoint. The customer pays for the kept steps.")


def _cancel(request: HttpRequest, job_id: str) -> None:
    control.request_cancellation(job=get_object_or_404(FineTuningJob, pk=job_id), by=operator_id(request), now=db_now())


_CANCEL = ConfirmedAction[HttpRequest](
    parameter="job",
    verb=later("Cancel"),
    nouns=(later("job"), later("jobs")),
    warning=later("A cancelled job cannot be continued. Its customer sees that it was cancelled."),
    done=later("Cancelling"),
    list_url_name="staff:job_list",
    list_title=later("All jobs"),
    find=_find,
    act=_cancel,
)
