"""Operator pages: organizations with their limits and credit, and the jobs of all organizations."""

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from urllib.parse import urlencode

from django.contrib import messages
from django.core.paginator import Page, Paginator
from django.db import transaction
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils.formats import date_format
from django.utils.translation import gettext
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from apps.accounts.models import Organization
from apps.accounts.operations import set_regions
from apps.accounts.queries import list_keys, list_members
from apps.accounts.suspension import reinstate_organization, suspend_organization
from apps.billing.books.credit_requests import list_requests
from apps.billing.budgets import month_of
from apps.billing.queries import get_balance, get_balances, get_spending, with_credit
from apps.billing.usage.sums import sum_training, sum_uses_by_day
from apps.core.database.clock import db_now
from apps.core.database.keyset import first_rows, read_page
from apps.core.http.forms import domain_errors_shown
from apps.core.messages.translation import later
from apps.core.templatetags.statuses import STATUSES
from apps.datasets.queries import list_versions
from apps.finetuning.jobs import control
from apps.finetuning.jobs.progress import list_progress
from apps.finetuning.jobs.waits import explain_wait
from apps.finetuning.lifecycle import JOB_TERMINAL, JobStatus
from apps.finetuning.models import FineTuningJob, Quota
from apps.finetuning.queries import list_events, list_jobs
from apps.finetuning.usage.demand import get_demand
from apps.finetuning.usage.quotas import LIMITS, get_quota, get_quotas, set_quota, used_gpu_seconds
from apps.finetuning.usage.storage import stored_bytes
from apps.interfaces.staff.access import operator_id, operator_view, sensitive_operator_view
from apps.interfaces.staff.forms import QuotaForm
from apps.interfaces.staff.quantities import GPU_TIME, gpu_time

_PAGE = 50
_ORGANIZATIONS = 25  # on a page: what each stores is added up from every model and checkpoint that it keeps
_NEWEST_JOBS = 20
_NEWEST_REQUESTS = 5
_EVENTS_SHOWN = 200
_CHART_DAYS = 30
_MAX_QUERY_CHARACTERS = 80
_STATES = [("", later("All"))] + [
    (status.value, STATUSES[status].label)
    for status in (JobStatus.QUEUED, JobStatus.RUNNING, JobStatus.PAUSED, JobStatus.SUCCEEDED, JobStatus.FAILED)
]

_STANDINGS = (("", later("All")), ("suspended", later("Suspended")), ("empty", later("Out of credit")))


@require_safe
@operator_view
def jobs(request: HttpRequest) -> HttpResponse:
    """List the jobs of all tenants, or of one, newest first."""
    rows = FineTuningJob.objects.select_related("organization", "base_model", "pool", "price_rule")
    wanted = request.GET.get("organization", "")
    tenant = Organization.objects.filter(pk=wanted).first() if wanted else None
    of_tenant = {"organization": tenant.pk} if tenant else {}
    status = request.GET.get("status", "")
    asked = of_tenant | ({"status": status} if status in tuple(JobStatus) else {})
    page = read_page(rows.filter(**asked), request.GET, order=("-created_at", "-id"), size=_PAGE)
    links = {"previous": page.previous, "next": page.next}
    context = {
        "jobs": [
            {"job": job, "billed_seconds": job.billed_gpu_ms / 1000, "cost_nano": cost_nano}
            for job, cost_nano in _with_costs(page.rows, db_now())
        ],
        "tenant": tenant,
        "tabs": [
            {
                "label": label,
                "url": f"?{urlencode(of_tenant | ({'status': value} if value else {}))}",
                "current": value == asked.get("status", ""),
            }
            for value, label in _STATES
        ],
        **{name: f"?{urlencode(asked | place)}" if place else "" for name, place in links.items()},
    }
    return render(request, "staff/tenants/jobs.html", context)


@dataclass(frozen=True)
class OrganizationPage:
    """One page of the organizations of a standing whose name, slug or id contains what the operator searched for."""

    page: Page
    asked: dict[str, str]

    @property
    def rows(self) -> list[Organization]:
        return list(self.page.object_list)

    @property
    def ids(self) -> list[str]:
        return [each.pk for each in self.rows]

    @property
    def context(self) -> dict[str, object]:
        """What the head and the foot of the list show; `previous` and `next` are "" where there is no such page."""
        before = self.page.previous_page_number() if self.page.has_previous() else None
        after = self.page.next_page_number() if self.page.has_next() else None
        addresses = {
            name: f"?{urlencode(self.asked | {'page': number})}" if number else ""
            for name, number in (("previous", before), ("next", after))
        }
        standing = self.asked.get("standing", "")
        return {
            "page": self.page,
            "q": self.asked["q"],
            "standing": standing,
            "tabs": [
                {
                    "label": label,
                    "url": f"?{urlencode(self.asked | {'standing': value})}",
                    "current": value == standing,
                }
                for value, label in _STANDINGS
            ],
            **addresses,
        }


def read_organizations(request: HttpRequest) -> OrganizationPage:
    """Return the page that the request asks for with `q`, `standing` and `page`, by name."""
    query = request.GET.get("q", "").strip()[:_MAX_QUERY_CHARACTERS]
    matches = Q(name__icontains=query) | Q(slug__icontains=query) | Q(pk__icontains=query)
    rows, standing = Organization.objects.filter(matches).order_by("name", "pk"), request.GET.get("standing", "")
    if standing == "suspended":
        rows = rows.exclude(suspended_at=None)
    elif standing == "empty":
        rows = rows.exclude(pk__in=with_credit())
    asked = {"q": query} | ({"standing": standing} if standing and standing in dict(_STANDINGS) else {})
    return OrganizationPage(Paginator(rows, _ORGANIZATIONS).get_page(request.GET.get("page")), asked)


@require_safe
@operator_view
def organizations(request: HttpRequest) -> HttpResponse:
    listed = read_organizations(request)
    balances, stored = get_balances(organizations=listed.ids), stored_bytes(organizations=listed.ids)
    rows = [
        {"organization": each, "balance": balances[each.pk], "storage_bytes": stored[each.pk]} for each in listed.rows
    ]
    return render(request, "staff/tenants/organizations.html", {"rows": rows, **listed.context})


@require_POST
@operator_view
def suspend(request: HttpRequest, organization_id: str) -> HttpResponse:
    """Close one organization, with a reason."""
    organization = get_object_or_404(Organization, pk=organization_id)
    return _moved(
        request,
        partial(suspend_organization, organization=organization, now=db_now()),
        gettext("%(name)s is suspended.") % {"name": organization.name},
    )


@require_POST
@operator_view
def reinstate(request: HttpRequest, organization_id: str) -> HttpResponse:
    """Open one organization again, with a reason."""
    organization = get_object_or_404(Organization, pk=organization_id)
    return _moved(
        request,
        partial(reinstate_organization, organization=organization),
        gettext("%(name)s is open again.") % {"name": organization.name},
    )


def _moved(request: HttpRequest, move: Callable[..., None], done: str) -> HttpResponse:
    with domain_errors_shown(request):
        move(by=operator_id(request), reason=request.POST.get("reason", ""))
        messages.success(request, done)
    return redirect("staff:organization_list")


@require_safe
@operator_view
def quotas(request: HttpRequest) -> HttpResponse:
    listed = read_organizations(request)
    limits, stored = get_quotas(organizations=listed.ids), stored_bytes(organizations=listed.ids)
    used = used_gpu_seconds(organizations=listed.ids, now=db_now())
    rows = [
        {
            "organization": each,
            "quota": limits[each.pk],
            "gpu_time": _gpu_time_of(limits[each.pk], used.get(each.pk, 0.0)),
            "storage_bytes": stored[each.pk],
        }
        for each in listed.rows
    ]
    return render(request, "staff/tenants/quotas.html", {"rows": rows, **listed.context})


def _gpu_time_of(quota: Quota, used_seconds: float) -> str:
    limit = quota.gpu_seconds_per_month
    return gettext("%(used)s of %(limit)s") % {
        "used": gpu_time(used_seconds),
        "limit": gettext("no limit") if limit is None else GPU_TIME.words(limit),
    }


@require_http_methods(["GET", "HEAD", "POST"])
@sensitive_operator_view
def quota(request: HttpRequest, organization_id: str) -> HttpResponse:
    """Edit the limits of one organization."""
    organization = get_object_or_404(Organization, pk=organization_id)
    current = get_quota(organization=organization)
    limits = {name: getattr(current, name) for name in LIMITS} | {"regions": organization.regions or []}
    demand = get_demand(organization=organization, now=db_now())
    form = QuotaForm(request.POST or None, initial=limits, demand=demand)
    if request.method == "POST" and form.is_valid():
        with transaction.atomic():
            set_quota(organization=organization, by=operator_id(request), now=db_now(), **form.limits())
            if "regions" in form.fields:
                set_regions(organization=organization, regions=form.cleaned_data["regions"], by=operator_id(request))
        messages.success(request, gettext("The limits of %(name)s were saved.") % {"name": organization.name})
        return redirect("staff:quota_list")
    context = {"tenant": organization, "form": form}
    return render(request, "staff/tenants/quota.html", context, status=422 if request.method == "POST" else 200)


# --- One organization, one job ---------------------------------------------------------------------------------------


@require_safe
@operator_view
def organization(request: HttpRequest, organization_id: str) -> HttpResponse:
    """Show one organization: balance, spending, use against its limits, members, and its newest jobs."""
    tenant = get_object_or_404(Organization, pk=organization_id)
    now = db_now()
    used = used_gpu_seconds(organizations=[tenant.pk], now=now)
    context = {
        "tenant": tenant,
        "balance": get_balance(organization=tenant),
        "spending": get_spending(organization=tenant, since=month_of(now)),
        "quota": (limits := get_quota(organization=tenant)),
        "gpu_time": _gpu_time_of(limits, used.get(tenant.pk, 0.0)),
        "storage_bytes": stored_bytes(organizations=[tenant.pk])[tenant.pk],
        "people": list(list_members(organization=tenant)),
        "key_count": list_keys(organization=tenant).filter(revoked_at=None).count(),
        "dataset_count": list_versions(organization=tenant).count(),
        "jobs": _with_costs(first_rows(list_jobs(organization=tenant), _NEWEST_JOBS), now),
        "requests": list(list_requests(organization=tenant)[:_NEWEST_REQUESTS]),
        "days": _spent_by_day(tenant, last=now.astimezone(datetime.UTC).date()),
    }
    return render(request, "staff/tenants/organization.html", context)


def _spent_by_day(tenant: Organization, *, last: datetime.date) -> list[tuple[str, dict[str, int]]]:
    """Return for the chart what the organization spent on each of the last days."""
    begins = [last - datetime.timedelta(days=back) for back in reversed(range(_CHART_DAYS))]
    period = {"first": begins[0], "last": last}
    jobs = {at.date(): nano for at, nano in sum_training(organization=tenant, **period, step="day").items()}
    used = {each.day: each.cost_nano for each in sum_uses_by_day(organization=tenant, **period, subjects=[])}
    return [
        (
            date_format(day, gettext("j M")),
            {gettext("Training"): jobs.get(day, 0), gettext("Requests and storage"): used.get(day, 0)},
        )
        for day in begins
    ]


@require_safe
@operator_view
def job(request: HttpRequest, job_id: str) -> HttpResponse:
    """Show one job: its attempts with their logs, its events, and what it cost."""
    shown = get_object_or_404(_jobs(), pk=job_id)
    now = db_now()
    context = {
        "job": shown,
        "cost_nano": _with_costs([shown], now)[0][1],
        "runs": list(shown.runs.order_by("-attempt").select_related("worker", "pool")),
        "events": [
            {"level": event.level, "message": event.message, "detail": "", "at": event.created_at}
            for event in list_events(job=shown).exclude(type="metrics")[:_EVENTS_SHOWN]
        ],
        "billed_seconds": shown.billed_gpu_ms / 1000,
        "may_cancel": shown.status not in JOB_TERMINAL,
        "wait": explain_wait(job=shown, now=now),
        "is_overrun": shown.status == JobStatus.PAUSED and shown.overran_at is not None,
    }
    return render(request, "staff/tenants/job.html", context)


@require_POST
@operator_view
def cancel_job(request: HttpRequest, job_id: str) -> HttpResponse:
    """Cancel a customer's job; the worker keeps its checkpoint."""
    shown = get_object_or_404(_jobs(), pk=job_id)
    with domain_errors_shown(request):
        control.request_cancellation(job=shown, by=operator_id(request), now=db_now())
        messages.success(request, gettext("The job is being cancelled."))
    return redirect("staff:job_detail", job_id=shown.pk)


@require_POST
@operator_view
def continue_job(request: HttpRequest, job_id: str) -> HttpResponse:
    """Continue a job that reached the limit of its firm price, at the operator's expense."""
    shown = get_object_or_404(_jobs(), pk=job_id)
    with domain_errors_shown(request):
        control.continue_overrun(job=shown, by=operator_id(request), now=db_now())
        messages.success(request, gettext("The job is queued again."))
    return redirect("staff:job_detail", job_id=shown.pk)


def _jobs() -> QuerySet[FineTuningJob]:
    related = ("organization", "base_model", "pool", "price_rule", "training_file__dataset")
    return FineTuningJob.objects.select_related(*related)


def _with_costs(jobs: Sequence[FineTuningJob], now: datetime.datetime) -> list[tuple[FineTuningJob, int]]:
    """Return each job with its cost so far in nano-USD, as its customer sees it."""
    progress = list_progress(jobs=jobs, now=now)
    return [(job, progress[job.pk].spent_nano) for job in jobs]
