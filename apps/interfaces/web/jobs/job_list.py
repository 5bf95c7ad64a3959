"""The list of fine-tuning jobs: search, state and order in the address, and the same rows as CSV."""

from collections.abc import Mapping

from django.core.paginator import Paginator
from django.db.models import QuerySet
from django.http import HttpResponse, HttpResponseBase
from django.shortcuts import render
from django.urls import reverse
from django.utils.http import urlencode
from django.views.decorators.http import require_safe

from apps.accounts.models import Organization
from apps.accounts.roles import Permission, has_permission
from apps.core.database.clock import db_now
from apps.core.database.search import with_words
from apps.core.http.csv_text import csv_chunks
from apps.core.money import usd_decimal
from apps.finetuning import queries
from apps.finetuning.jobs.progress import get_progress
from apps.finetuning.lifecycle import JOB_TERMINAL, JobStatus
from apps.finetuning.models import FineTuningJob
from apps.interfaces.web.jobs.views import title_of
from apps.interfaces.web.shell.access import OrganizationRequest, organization_view
from apps.interfaces.web.shell.downloads import stream_download

_PAGE = 25
_MAX_WORDS = 6
_MOST_EXPORTED = 10_000
_SEARCHED = ("suffix", "training_file__dataset__name", "base_model__display_name", "base_model__name", "id")
_SORTS = {
    "": ("Newest first", ("-created_at", "-id")),
    "oldest": ("Oldest first", ("created_at", "id")),
    "cost": ("Highest cost first", ("-cost_nano", "-id")),
}
_EXPORTED = (
    "id", "name", "status", "base_model", "dataset", "method", "pool", "gpus", "created_at", "finished_at", "step",
    "total_steps", "trained_tokens", "billed_gpu_seconds", "cost_usd", "error",
)  # fmt: skip
_STATES = (
    ("", "All"),
    (JobStatus.RUNNING, "Training"),
    (JobStatus.QUEUED, "Queued"),
    (JobStatus.SUCCEEDED, "Succeeded"),
    (JobStatus.FAILED, "Failed"),
)


@require_safe
@organization_view(Permission.VIEW)
def index(request: OrganizationRequest) -> HttpResponse:
    """List the jobs; htmx asks for the table alone."""
    asked = _asked(request)
    page = Paginator(_listed(request.organization, asked), _PAGE).get_page(request.GET.get("page"))
    pages = {
        "address": page.number,
        "previous": page.previous_page_number() if page.has_previous() else None,
        "next": page.next_page_number() if page.has_next() else None,
    }
    now = db_now()
    context = {
        "jobs": [
            {"job": job, "title": title_of(job), "progress": get_progress(job=job, now=now)} for job in page.object_list
        ],
        "page": page,
        "tabs": [
            {
                "label": label,
                "url": _address(asked | {"status": value}),
                "current": value == asked["status"],
            }
            for value, label in _STATES
        ],
        "asked": asked,
        "sorts": [(value, label) for value, (label, _) in _SORTS.items()],
        "export_url": _address(asked, of="web:job_export"),
        **{name: _address(asked | {"page": str(number)}) if number else "" for name, number in pages.items()},
        "may_create": has_permission(request.membership.role, Permission.JOB_WRITE),
        "has_live": any(job.status not in JOB_TERMINAL for job in page.object_list),
    }
    return render(request, "jobs/list.html" + ("#table" if request.htmx else ""), context)


@require_safe
@organization_view(Permission.VIEW)
def export(request: OrganizationRequest) -> HttpResponseBase:
    """Send the listed jobs as CSV, at most `_MOST_EXPORTED`."""
    jobs = list(_listed(request.organization, _asked(request))[:_MOST_EXPORTED])
    chunks = csv_chunks(_EXPORTED, [_exported(job) for job in jobs])
    return stream_download(request, chunks, filename="fine-tunes.csv", content_type="text/csv; charset=utf-8")


def _exported(job: FineTuningJob) -> tuple[object, ...]:
    return (
        job.pk, title_of(job), job.status, job.base_model.name, job.training_file.dataset.name, job.method,
        job.pool.name if job.pool else "", job.gpu_count, job.created_at.isoformat(),
        job.finished_at.isoformat() if job.finished_at else "", job.step, job.total_steps or "", job.trained_tokens,
        job.billed_gpu_ms / 1000, usd_decimal(job.cost_nano), job.error_code,
    )  # fmt: skip


def _asked(request: OrganizationRequest) -> dict[str, str]:
    """Return what the address asks of the list: words, state and order."""
    sort = request.GET.get("sort", "")
    return {
        "q": request.GET.get("q", "").strip()[:80],
        "status": request.GET.get("status", "")[:24],
        "sort": sort if sort in _SORTS else "",
    }


def _listed(organization: Organization, asked: Mapping[str, str]) -> QuerySet[FineTuningJob]:
    rows = with_words(queries.list_jobs(organization=organization), asked["q"].split()[:_MAX_WORDS], _SEARCHED)
    rows = rows.filter(status=asked["status"]) if asked["status"] else rows
    return rows.order_by(*_SORTS[asked["sort"]][1])


def _address(asked: Mapping[str, str], *, of: str = "web:job_list") -> str:
    """Return the address of a list with what is asked of it."""
    query = urlencode({name: value for name, value in asked.items() if value})
    return reverse(of) + (f"?{query}" if query else "")
