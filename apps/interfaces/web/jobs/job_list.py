"""The list of fine-tuning jobs, the same rows as CSV, and the action that cancels several jobs at once."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from django.db.models import Q, QuerySet
from django.http import HttpResponse, HttpResponseBase
from django.urls import reverse
from django.utils.translation import gettext
from django.views.decorators.http import require_http_methods, require_safe

from apps.accounts.models import Project
from apps.accounts.queries import names_of_creators, names_of_keys
from apps.accounts.roles import Permission, has_permission
from apps.contracts.hyperparameters import Method
from apps.core.database.clock import db_now
from apps.core.http.confirmation import AffectedRow, ConfirmedAction, confirm
from apps.core.messages.translation import later
from apps.core.money import usd_decimal
from apps.core.templatetags.ui import method_name
from apps.finetuning import queries
from apps.finetuning.jobs.control import lock_several, request_cancellation
from apps.finetuning.jobs.progress import list_progress
from apps.finetuning.lifecycle import JOB_ACTIVE, JobStatus
from apps.finetuning.models import FineTuningJob
from apps.finetuning.usage.quotas import reasons_to_wait
from apps.interfaces.web.jobs.views import effect_of_stopping, title_of
from apps.interfaces.web.shell.access import OrganizationRequest, organization_view
from apps.interfaces.web.shell.current_project import find_current_project, of_project
from apps.interfaces.web.shell.listing import NEWEST_FIRST, Filter, Listing, render_list

_STATES = {
    JobStatus.RUNNING: later("Training"),
    JobStatus.QUEUED: later("Queued"),
    JobStatus.PAUSED: later("Paused"),
    JobStatus.SUCCEEDED: later("Succeeded"),
    JobStatus.FAILED: later("Failed"),
    JobStatus.CANCELLED: later("Cancelled"),
}
_LIST = Listing[FineTuningJob](
    name=later("fine-tunes"),
    hint=later("Name, dataset or model"),
    url_name="web:job_list",
    export_url_name="web:job_export",
    searched=("suffix", "training_file__dataset__name", "base_model__display_name", "base_model__name", "id"),
    filters={
        "status": Filter(
            later("State"),
            {"": (later("All"), Q())} | {status.value: (label, Q(status=status)) for status, label in _STATES.items()},
        ),
        "method": Filter(
            later("Method"),
            {"": (later("Any method"), Q())}
            | {method.value: (method_name(method), Q(method=method)) for method in Method},
        ),
    },
    orders={
        **NEWEST_FIRST,
        "cost": (later("Highest charge first"), ("-cost_nano", "-id")),
    },
)
_EXPORTED = (
    "id", "name", "status", "base_model", "dataset", "method", "pool", "gpus", "machines", "created_at", "finished_at",
    "step", "total_steps", "trained_tokens", "billed_gpu_seconds", "cost_usd", "error",
)  # fmt: skip


@require_safe
@organization_view(Permission.VIEW)
def index(request: OrganizationRequest) -> HttpResponse:
    project = find_current_project(request)
    page = _list_of(request).page(request, _listed(request, project))
    now = db_now()
    owners = _owners(request, page.rows)
    waiting = reasons_to_wait(jobs=[job for job in page.rows if job.status == JobStatus.QUEUED], now=now)
    progress = list_progress(jobs=page.rows, now=now)
    context = {
        "jobs": [
            {
                "job": job,
                "title": title_of(job),
                "progress": progress[job.pk],
                "waiting": waiting.get(job.pk, ""),
                "owner": owners.get(job.created_by, ""),
            }
            for job in page.rows
        ],
        "project": project,
        "may_create": has_permission(request.membership.role, Permission.JOB_WRITE),
        "has_live": any(job.status in JOB_ACTIVE for job in page.rows),
    }
    return render_list(request, "jobs/list.html", page, context)


def _list_of(request: OrganizationRequest) -> Listing[FineTuningJob]:
    mine = {"": (gettext("Anyone"), Q()), "me": (gettext("You"), Q(created_by=request.membership.user_id))}
    return replace(_LIST, filters={**_LIST.filters, "by": Filter(gettext("Created by"), mine)})


def _owners(request: OrganizationRequest, jobs: Sequence[FineTuningJob]) -> Mapping[str, str]:
    """Return the names of people, service accounts and keys that create jobs, by id. Deleted ones are left out."""
    keys = names_of_keys(
        organization=request.organization,
        ids={job.created_by for job in jobs if job.created_by.startswith("key_")},
    )
    named = {id: gettext("key %(name)s") % {"name": name} for id, name in keys.items()}
    return names_of_creators(organization=request.organization) | named


def _listed(request: OrganizationRequest, project: Project | None) -> QuerySet[FineTuningJob]:
    return of_project(project, queries.list_jobs(organization=request.organization))


@require_safe
@organization_view(Permission.VIEW)
def export(request: OrganizationRequest) -> HttpResponseBase:
    rows = _listed(request, find_current_project(request))
    return _list_of(request).export(request, rows, header=_EXPORTED, cells=_exported, joined=_with_spending)


def _with_spending(jobs: list[FineTuningJob]) -> list[tuple[FineTuningJob, int]]:
    progress = list_progress(jobs=jobs, now=db_now())
    return [(job, progress[job.pk].spent_nano) for job in jobs]


def _exported(row: tuple[FineTuningJob, int]) -> tuple[object, ...]:
    job, spent_nano = row
    return (
        job.pk, title_of(job), job.status, job.base_model.name, job.training_file.dataset.name, job.method,
        job.pool.name if job.pool else "", job.gpu_count, job.node_count, job.created_at.isoformat(),
        job.finished_at.isoformat() if job.finished_at else "", job.step, job.total_steps or "", job.trained_tokens,
        job.billed_gpu_ms / 1000, usd_decimal(spent_nano), job.error_code,
    )  # fmt: skip


@require_http_methods(["GET", "HEAD", "POST"])
@organization_view(Permission.JOB_WRITE)
def cancel_many(request: OrganizationRequest) -> HttpResponse:
    return confirm(request, _CANCEL)


def _find(request: OrganizationRequest, ids: Sequence[str]) -> list[AffectedRow]:
    if request.method == "POST":
        lock_several(organization=request.organization, ids=ids)
    jobs = list(queries.list_jobs(organization=request.organization).filter(pk__in=ids))
    progress = list_progress(jobs=jobs, now=db_now())
    return [
        AffectedRow(
            job.pk, title_of(job), effect_of_stopping(job, progress[job.pk]), reverse("web:job_detail", args=[job.pk])
        )
        for job in jobs
    ]


def _cancel(request: OrganizationRequest, job_id: str) -> None:
    job = queries.get_job(organization=request.organization, id=job_id)
    request_cancellation(job=job, by=request.membership.user_id, now=db_now())


_CANCEL = ConfirmedAction[OrganizationRequest](
    parameter="job",
    verb=later("Cancel"),
    nouns=(later("fine-tune"), later("fine-tunes")),
    warning=later("A cancelled fine-tune cannot be continued. A new one can start from a checkpoint that is kept."),
    done=later("Cancelling"),
    list_url_name="web:job_list",
    list_title=later("Fine-tunes"),
    find=_find,
    act=_cancel,
)
