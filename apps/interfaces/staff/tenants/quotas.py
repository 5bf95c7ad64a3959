"""Operator pages: the limits of each organization beside what it uses, and the form that changes them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from django.contrib import messages
from django.db import transaction
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import get_object_or_404, redirect, render
from django.utils.translation import gettext
from django.views.decorators.http import require_http_methods, require_safe

from apps.accounts.models import Organization
from apps.accounts.operations import set_regions
from apps.core.database.clock import db_now
from apps.core.database.listing import render_list
from apps.core.messages.translation import later
from apps.finetuning.models import Quota
from apps.finetuning.usage.demand import get_demand
from apps.finetuning.usage.quotas import LIMITS, get_quota, get_quotas, set_quota, used_gpu_seconds
from apps.finetuning.usage.storage import stored_bytes
from apps.interfaces.staff.access import operator_id, operator_view, sensitive_operator_view
from apps.interfaces.staff.forms import QuotaForm
from apps.interfaces.staff.quantities import GPU_TIME, gpu_time
from apps.interfaces.staff.tenants.listed import ORGANIZATIONS

_LIST = replace(ORGANIZATIONS, name=later("quotas"), url_name="staff:quota_list", export_url_name="staff:quota_export")
_EXPORTED = ("id", "name", *LIMITS, "used_gpu_seconds", "stored_bytes")


@dataclass(frozen=True, kw_only=True)
class Use:
    """An organization with its limits and what it uses of them. Its GPU time is that of the month."""

    organization: Organization
    quota: Quota
    gpu_seconds: float
    storage_bytes: int

    @property
    def gpu_time(self) -> str:
        return gpu_time_of(self.quota, self.gpu_seconds)


@require_safe
@operator_view
def index(request: HttpRequest) -> HttpResponse:
    page = _LIST.page(request, Organization.objects.all())
    return render_list(request, "staff/tenants/quotas.html", page, {"rows": _with_use(page.rows)})


@require_safe
@operator_view
def export(request: HttpRequest) -> HttpResponseBase:
    rows = Organization.objects.all()
    return _LIST.export(request, rows, header=_EXPORTED, cells=_exported, joined=_with_use)


def _with_use(organizations: Sequence[Organization]) -> list[Use]:
    ids = [each.pk for each in organizations]
    limits, stored = get_quotas(organizations=ids), stored_bytes(organizations=ids)
    used = used_gpu_seconds(organizations=ids, now=db_now())
    return [
        Use(
            organization=each,
            quota=limits[each.pk],
            gpu_seconds=used.get(each.pk, 0.0),
            storage_bytes=stored[each.pk],
        )
        for each in organizations
    ]


def _exported(row: Use) -> tuple[object, ...]:
    limits = (getattr(row.quota, name) for name in LIMITS)
    return (row.organization.pk, row.organization.name, *limits, row.gpu_seconds, row.storage_bytes)


def gpu_time_of(quota: Quota, used_seconds: float) -> str:
    """Return the GPU time that was used this month, and its limit, in words."""
    limit = quota.gpu_seconds_per_month
    return gettext("%(used)s of %(limit)s") % {
        "used": gpu_time(used_seconds),
        "limit": gettext("no limit") if limit is None else GPU_TIME.words(limit),
    }


@require_http_methods(["GET", "HEAD", "POST"])
@sensitive_operator_view
def edit(request: HttpRequest, organization_id: str) -> HttpResponse:
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
