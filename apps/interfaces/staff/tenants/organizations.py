"""Operator pages: the organizations, one of them with what an operator needs to judge it, and its suspension."""

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import get_object_or_404, redirect, render
from django.utils.formats import date_format
from django.utils.http import url_has_allowed_host_and_scheme
from django.utils.translation import gettext
from django.views.decorators.http import require_POST, require_safe

from apps.accounts.models import Organization
from apps.accounts.queries import list_keys, list_members
from apps.accounts.suspension import reinstate_organization, suspend_organization
from apps.adapters import queries as adapters
from apps.billing.books.credit_requests import list_requests
from apps.billing.budgets import month_of
from apps.billing.queries import Balance, get_balance, get_balances, get_spending
from apps.billing.usage.sums import sum_training, sum_uses_by_day
from apps.billing.usage.traffic import TrafficSum, list_traffic, total_of
from apps.core.database.clock import begin_of_day, db_now
from apps.core.database.keyset import first_rows
from apps.core.database.listing import render_list
from apps.core.http.forms import domain_errors_shown
from apps.core.money import usd_decimal
from apps.datasets.queries import list_versions
from apps.finetuning.lifecycle import JobStatus
from apps.finetuning.queries import find_jobs_of_adapters, list_jobs
from apps.finetuning.usage.quotas import get_quota, used_gpu_seconds
from apps.finetuning.usage.storage import stored_bytes
from apps.interfaces.staff.access import operator_id, operator_view
from apps.interfaces.staff.tenants.jobs import with_costs
from apps.interfaces.staff.tenants.listed import ORGANIZATIONS
from apps.interfaces.staff.tenants.quotas import gpu_time_of
from apps.serving.queries import serving_states

_NEWEST_JOBS = 20
_NEWEST_FAILED = _NEWEST_ADAPTERS = _NEWEST_REQUESTS = 5
_CHART_DAYS, _TRAFFIC_DAYS = 30, 14
_EXPORTED = (
    "id", "name", "slug", "created_at", "suspended_at", "available_usd", "held_usd", "stored_bytes",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Holdings:
    """An organization with its balance and the bytes that it stores."""

    organization: Organization
    balance: Balance
    storage_bytes: int


@require_safe
@operator_view
def index(request: HttpRequest) -> HttpResponse:
    page = ORGANIZATIONS.page(request, Organization.objects.all())
    return render_list(request, "staff/tenants/organizations.html", page, {"rows": _with_holdings(page.rows)})


@require_safe
@operator_view
def export(request: HttpRequest) -> HttpResponseBase:
    rows = Organization.objects.all()
    return ORGANIZATIONS.export(request, rows, header=_EXPORTED, cells=_exported, joined=_with_holdings)


def _with_holdings(organizations: Sequence[Organization]) -> list[Holdings]:
    ids = [each.pk for each in organizations]
    balances, stored = get_balances(organizations=ids), stored_bytes(organizations=ids)
    return [
        Holdings(organization=each, balance=balances[each.pk], storage_bytes=stored[each.pk]) for each in organizations
    ]


def _exported(row: Holdings) -> tuple[object, ...]:
    tenant, balance = row.organization, row.balance
    return (
        tenant.pk, tenant.name, tenant.slug, tenant.created_at.isoformat(),
        tenant.suspended_at.isoformat() if tenant.suspended_at else "", usd_decimal(balance.available_nano),
        usd_decimal(balance.held_nano), row.storage_bytes,
    )  # fmt: skip


# --- Suspension ------------------------------------------------------------------------------------------------------


@require_POST
@operator_view
def suspend(request: HttpRequest, organization_id: str) -> HttpResponse:
    """Close one organization, with a reason, after its name was typed."""
    organization = get_object_or_404(Organization, pk=organization_id)
    name = " ".join(organization.name.split())
    if " ".join(request.POST.get("confirm", "").split()) != name:
        messages.error(request, gettext("Type %(typed)s to confirm.") % {"typed": name})
        return _back(request, organization)
    return _moved(
        request,
        organization,
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
        organization,
        partial(reinstate_organization, organization=organization),
        gettext("%(name)s is open again.") % {"name": organization.name},
    )


def _moved(request: HttpRequest, organization: Organization, move: Callable[..., None], done: str) -> HttpResponse:
    with domain_errors_shown(request):
        move(by=operator_id(request), reason=request.POST.get("reason", ""))
        messages.success(request, done)
    return _back(request, organization)


def _back(request: HttpRequest, organization: Organization) -> HttpResponse:
    """Return to the page that sent the form: the organization's own, or the list as it was filtered."""
    referrer = request.headers.get("Referer", "")
    if url_has_allowed_host_and_scheme(referrer, allowed_hosts={request.get_host()}, require_https=False):
        return redirect(referrer)
    return redirect("staff:organization_detail", organization_id=organization.pk)


# --- One organization ------------------------------------------------------------------------------------------------


@require_safe
@operator_view
def detail(request: HttpRequest, organization_id: str) -> HttpResponse:
    """Show one organization: money, traffic, use against its limits, members, adapters, newest jobs and failures."""
    tenant = get_object_or_404(Organization, pk=organization_id)
    now = db_now()
    today = now.astimezone(datetime.UTC).date()
    used = used_gpu_seconds(organizations=[tenant.pk], now=now)
    jobs, traffic = list_jobs(organization=tenant), _traffic_by_day(tenant, last=today)
    context = {
        "tenant": tenant,
        "balance": get_balance(organization=tenant),
        "spending": get_spending(organization=tenant, since=month_of(now)),
        "quota": (limits := get_quota(organization=tenant)),
        "gpu_time": gpu_time_of(limits, used.get(tenant.pk, 0.0)),
        "storage_bytes": stored_bytes(organizations=[tenant.pk])[tenant.pk],
        "people": list(list_members(organization=tenant)),
        "key_count": list_keys(organization=tenant).filter(revoked_at=None).count(),
        "dataset_count": list_versions(organization=tenant).count(),
        "jobs": with_costs(first_rows(jobs, _NEWEST_JOBS), now),
        "failed": first_rows(jobs.filter(status=JobStatus.FAILED), _NEWEST_FAILED),
        "adapters": _newest_adapters(tenant),
        "requests": list(list_requests(organization=tenant)[:_NEWEST_REQUESTS]),
        "days": _spent_by_day(tenant, last=today),
        "traffic": total_of(traffic),
        "traffic_days": [_ends_of(each) for each in traffic],
    }
    return render(request, "staff/tenants/organization.html", context)


def _newest_adapters(tenant: Organization) -> list[dict[str, object]]:
    """Return the newest adapter versions with their serving states and the jobs that made them."""
    rows = adapters.list_versions(organization=tenant)
    versions = first_rows(rows, _NEWEST_ADAPTERS)
    states = serving_states(versions=versions)
    made_by = find_jobs_of_adapters(organization=tenant, versions=versions)
    return [{"version": each, "serving": states[each.pk], "job": made_by.get(each.pk)} for each in versions]


def _traffic_by_day(tenant: Organization, *, last: datetime.date) -> list[TrafficSum]:
    since = begin_of_day(last - datetime.timedelta(days=_TRAFFIC_DAYS - 1))
    until = begin_of_day(last + datetime.timedelta(days=1))
    return list_traffic(organization=tenant, since=since, until=until, step="day")


def _ends_of(day: TrafficSum) -> tuple[str, dict[str, int]]:
    """Return for the chart how the requests of a day ended."""
    assert day.at is not None
    ends = {
        gettext("Answered"): day.answered,
        gettext("Left by client"): day.aborted,
        gettext("Refused"): day.refused,
        gettext("Failed"): day.failed,
    }
    return date_format(day.at, gettext("j M")), ends


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
