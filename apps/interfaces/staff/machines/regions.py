"""Regions: add one, and say in which one the object store is."""

from django import forms
from django.contrib import messages
from django.db.models import Count, Q
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils.translation import gettext
from django.views.decorators.http import require_http_methods, require_POST

from apps.accounts.models import Organization
from apps.accounts.operations import create_region, set_home_region
from apps.accounts.queries import list_regions
from apps.core.http.forms import domain_errors_on
from apps.core.messages.translation import later
from apps.interfaces.staff.access import operator_id, operator_view


class RegionForm(forms.Form):
    name = forms.CharField(
        max_length=40, label=later("Name"), help_text=later("Such as eu. Customers see it. Can't be changed.")
    )


@require_http_methods(["GET", "HEAD", "POST"])
@operator_view
def index(request: HttpRequest) -> HttpResponse:
    """List the regions, and the organizations that are limited to some; a POST adds a region."""
    form = RegionForm(request.POST or None)
    if request.method == "POST" and form.is_valid():
        with domain_errors_on(form):
            region = create_region(name=form.cleaned_data["name"], by=operator_id(request))
            messages.success(request, gettext("The region %(name)s was added.") % {"name": region.pk})
            return redirect("staff:region_list")
    counted = list_regions().annotate(
        pool_count=Count("pools", distinct=True),
        replica_count=Count("replicas", filter=Q(replicas__worker__revoked_at=None), distinct=True),
    )
    context = {
        "regions": counted,
        "limited": Organization.objects.exclude(regions=None).order_by("name", "pk"),
        "form": form,
    }
    return render(request, "staff/machines/regions.html", context, status=422 if request.method == "POST" else 200)


@require_POST
@operator_view
def set_home(request: HttpRequest) -> HttpResponse:
    """Say in which region the object store, the database and the gateways are."""
    region = next((each for each in list_regions() if each.pk == request.POST.get("region")), None)
    if region is None:
        raise Http404
    set_home_region(region=region, by=operator_id(request))
    messages.success(request, gettext("Files are stored in %(name)s.") % {"name": region.pk})
    return redirect("staff:region_list")
