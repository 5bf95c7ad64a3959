"""Regions: add one, and say in which one the object store is."""

from collections.abc import Sequence

from django import forms
from django.contrib import messages
from django.db.models import Count, Q
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils.translation import gettext
from django.views.decorators.http import require_http_methods

from apps.accounts.models import Organization
from apps.accounts.operations import create_region, set_home_region
from apps.accounts.queries import list_regions
from apps.core.errors import InvalidValue, NotFound
from apps.core.http.confirmation import AffectedRow, ConfirmedAction, confirm
from apps.core.http.forms import domain_errors_on
from apps.core.messages.translation import later
from apps.interfaces.staff.access import operator_id, sensitive_operator_view


class RegionForm(forms.Form):
    name = forms.CharField(
        max_length=40, label=later("Name"), help_text=later("Such as eu. Customers see it. Can't be changed.")
    )


@require_http_methods(["GET", "HEAD", "POST"])
@sensitive_operator_view
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


@require_http_methods(["GET", "HEAD", "POST"])
@sensitive_operator_view
def set_home(request: HttpRequest) -> HttpResponse:
    """Say in which region the object store, the database and the gateways are, after its name was typed."""
    return confirm(request, _SET_HOME)


def _find(request: HttpRequest, ids: Sequence[str]) -> list[AffectedRow]:
    """Return the chosen region. Raises InvalidValue for several."""
    if len(ids) > 1:
        raise InvalidValue(gettext("Choose one region."), param="region")
    return [
        AffectedRow(
            region.pk, region.pk, gettext("Organizations that are limited to other regions can no longer store files.")
        )
        for region in list_regions().filter(pk__in=ids)
    ]


def _set_home(request: HttpRequest, name: str) -> None:
    region = list_regions().filter(pk=name).first()
    if region is None:
        raise NotFound(gettext("This region was removed."))
    set_home_region(region=region, by=operator_id(request))


_SET_HOME = ConfirmedAction[HttpRequest](
    parameter="region",
    verb=later("Set home to"),
    nouns=(later("region"), later("regions")),
    warning=later("Nothing is moved: the object store, the database and the gateways must be there already."),
    done=later("The home is now"),
    list_url_name="staff:region_list",
    list_title=later("Regions"),
    find=_find,
    act=_set_home,
)
