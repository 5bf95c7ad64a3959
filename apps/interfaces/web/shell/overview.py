"""The first page: running jobs, problems that need attention, the credit left, and how to begin."""

import datetime
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from django.conf import settings
from django.http import HttpResponse
from django.shortcuts import render
from django.templatetags.static import static
from django.utils.cache import patch_vary_headers
from django.views.decorators.http import require_safe
from django_htmx.http import trigger_client_event

from apps.accounts.models import Organization
from apps.accounts.queries import list_keys
from apps.accounts.roles import Permission, has_permission
from apps.adapters.queries import list_versions as list_adapters
from apps.billing.books.credit_requests import list_requests
from apps.billing.budgets import month_of
from apps.billing.queries import get_balance, get_spending, has_used_an_adapter
from apps.catalog.queries import list_base_models
from apps.core.database.clock import begin_of_day, db_now
from apps.core.database.keyset import first_rows
from apps.datasets.lifecycle import DatasetVersionStatus
from apps.datasets.queries import list_unusable, list_versions
from apps.finetuning.jobs.progress import percent_of
from apps.finetuning.lifecycle import JOB_ACTIVE, JOB_TERMINAL, JobStatus
from apps.finetuning.models import FineTuningJob
from apps.finetuning.queries import find_jobs_of_adapters, list_jobs
from apps.finetuning.usage.quotas import reasons_to_wait
from apps.interfaces.web.jobs.views import title_of
from apps.interfaces.web.shell.access import OrganizationRequest, organization_view
from apps.interfaces.web.shell.code_samples import curl
from apps.interfaces.web.shell.first_job import SAMPLE, FirstJob, find_first_job
from apps.interfaces.web.wizard.draft import Draft
from apps.serving.queries import serving_states

_SHOWN = 5
_RECENT = datetime.timedelta(days=7)
_STARTED = 3  # an organization with more jobs than that knows the first steps


@require_safe
@organization_view(Permission.VIEW)
def index(request: OrganizationRequest) -> HttpResponse:
    """Show the organization at a glance. htmx requests the whole content, and more often the running jobs alone.

    The request for them names the `seen` jobs. If others run now, or one has another state, the page gets the event
    `jobs` instead, and requests the whole content.
    """
    organization, role = request.organization, request.membership.role
    may_train, now = has_permission(role, Permission.JOB_WRITE), db_now()
    running = _running(organization, now)
    context: dict[str, object] = {"running": running, "may_train": may_train, "seen": _digest(running)}
    if request.htmx and request.headers.get("HX-Target", "").endswith("#running"):
        if request.GET.get("seen", context["seen"]) != context["seen"]:
            return trigger_client_event(HttpResponse(status=204), "jobs")
        return _answer(request, "#running", context)
    context |= _figures(organization, now) | _attention(organization, now) | _adapters(organization)
    context |= _start(organization, may_train)
    context["may_write_files"] = has_permission(role, Permission.DATASET_WRITE)
    return _answer(request, "#news" if request.htmx else "", context)


def _answer(request: OrganizationRequest, part: str, context: dict[str, object]) -> HttpResponse:
    response = render(request, f"shell/overview.html{part}", context)
    patch_vary_headers(response, ["HX-Request", "HX-Target"])
    return response


def _running(organization: Organization, now: datetime.datetime) -> list[dict[str, object]]:
    shown = first_rows(list_jobs(organization=organization).filter(status__in=JOB_ACTIVE), _SHOWN)
    waiting = reasons_to_wait(jobs=[job for job in shown if job.status == JobStatus.QUEUED], now=now)
    return [_progress(job) | {"waiting": waiting.get(job.pk, "")} for job in shown]


def _digest(running: Sequence[Mapping[str, Any]]) -> str:
    """Return a word for the running jobs and their states."""
    jobs = [f"{item['job'].pk} {item['job'].status}" for item in running]
    return hashlib.sha256("\n".join(jobs).encode()).hexdigest()[:16]


def _progress(job: FineTuningJob) -> dict[str, object]:
    return {"job": job, "title": title_of(job), "percent": percent_of(job)}


def _figures(organization: Organization, now: datetime.datetime) -> dict[str, object]:
    """Return the balance, and this month's spending and finished jobs."""
    jobs, month = list_jobs(organization=organization), month_of(now)
    finished = jobs.filter(status=JobStatus.SUCCEEDED, finished_at__gte=begin_of_day(month))
    return {
        "balance": get_balance(organization=organization),
        "spending": get_spending(organization=organization, since=month),
        "finished_count": finished.count(),
        "running_count": jobs.filter(status__in=JOB_ACTIVE).count(),
    }


def _attention(organization: Organization, now: datetime.datetime) -> dict[str, object]:
    """Return the items that need attention: failed and paused jobs, and files that cannot be trained on."""
    since = now - _RECENT
    jobs = list_jobs(organization=organization)
    failed = jobs.filter(status=JobStatus.FAILED, finished_at__gte=since, dismissed_at=None)
    paused = jobs.filter(status=JobStatus.PAUSED)
    unusable = list_unusable(organization=organization).filter(created_at__gte=since)
    return {
        "failed": [
            {"job": job, "title": title_of(job), "again_url": Draft.of_job(job).url()}
            for job in first_rows(failed, _SHOWN)
        ],
        "paused": [_progress(job) for job in first_rows(paused, _SHOWN)],
        "invalid_files": first_rows(unusable, _SHOWN),
    }


def _adapters(organization: Organization) -> dict[str, object]:
    versions = list(list_adapters(organization=organization)[:_SHOWN])
    states = serving_states(versions=versions)
    made_by = find_jobs_of_adapters(organization=organization, versions=versions)
    return {
        "adapters": [
            {"version": version, "serving": states[version.pk], "job": made_by.get(version.pk)} for version in versions
        ]
    }


def _start(organization: Organization, may_train: bool) -> dict[str, object]:
    """Return the steps that remain until a model of the organization has answered a request; none afterwards."""
    jobs = first_rows(list_jobs(organization=organization), _STARTED + 1)
    if len(jobs) > _STARTED or has_used_an_adapter(organization=organization):
        return {"start": None}
    files = list_versions(organization=organization, purpose="fine-tune")
    file = files.filter(status=DatasetVersionStatus.READY).first()
    model = list_base_models(only_installed=True).first()
    started = {"dataset": file.pk} | ({"model": model.name} if model else {}) if file else {}
    running = next((job for job in jobs if job.status not in JOB_TERMINAL), None)
    succeeded = next((job for job in jobs if job.status == JobStatus.SUCCEEDED), None)
    first_job = find_first_job(organization=organization) if may_train and not (succeeded or running) else None
    request = list_requests(organization=organization).first()
    body = {"model": model.name if model else "…", "training_file": file.pk if file else "file-…"}
    return {
        "start": {
            "file": file,
            "model": model,
            "running": running,
            "adapter": succeeded.adapter_version if succeeded else None,
            "has_key": list_keys(organization=organization).filter(revoked_at=None).exists(),
            "first_job": first_job,
            "is_unpriced": may_train and not (succeeded or running or first_job),
            "is_funded": _is_funded(organization, first_job, has_begun=bool(jobs)),
            "credit_request": request,
            "wizard_url": Draft(started).url() if may_train else "",
            "upload_command": _upload_command(),
            "job_command": curl("/v1/fine_tuning/jobs", body),
        }
    }


def _is_funded(organization: Organization, first_job: FirstJob | None, *, has_begun: bool) -> bool:
    """Return whether the balance covers the first job; without a quote, whether there was a job or is any credit."""
    if first_job:
        return not first_job.missing_nano
    return has_begun or get_balance(organization=organization).available_nano > 0


def _upload_command() -> str:
    url = settings.PUBLIC_URL
    return (
        f"curl -o sample.jsonl {url}{static(SAMPLE)}\n"
        f'curl {url}/v1/files \\\n  -H "Authorization: Bearer $ANNEAL_API_KEY" \\\n'
        "  -F purpose=fine-tune -F file=@sample.jsonl"
    )
