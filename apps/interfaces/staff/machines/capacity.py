"""The capacity of a pool: who starts its machines, and how many."""

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect
from django.utils.translation import gettext
from django.views.decorators.http import require_POST

from apps.core.http.forms import domain_errors_on
from apps.finetuning import queries
from apps.finetuning.pools.capacity import fleets, settings
from apps.interfaces.staff.access import operator_id, sensitive_operator_view
from apps.interfaces.staff.machines.capacity_form import CapacityForm, FleetForm
from apps.interfaces.staff.machines.pools import show_pool


@require_POST
@sensitive_operator_view
def set_capacity(request: HttpRequest, pool_id: str) -> HttpResponse:
    """Store the limits and the engine of the pool."""
    pool = get_object_or_404(queries.list_pools(), pk=pool_id)
    form = CapacityForm(request.POST)
    if form.is_valid():
        with domain_errors_on(form):
            settings.set_capacity(pool=pool, by=operator_id(request), **form.values())
            messages.success(request, gettext("The capacity of %(name)s was saved.") % {"name": pool.name})
            return redirect("staff:pool_detail", pool_id=pool.pk)
    return show_pool(request, pool, capacity_form=form, status=422)


@require_POST
@sensitive_operator_view
def set_fleet(request: HttpRequest, pool_id: str) -> HttpResponse:
    """Store how many replicas of a base model the pool may start."""
    pool = get_object_or_404(queries.list_pools(), pk=pool_id)
    form = FleetForm(request.POST, pool=pool)
    if form.is_valid():
        with domain_errors_on(form):
            fleet = fleets.set_fleet(pool=pool, by=operator_id(request), **form.cleaned_data)
            text = gettext("The replicas of %(name)s were saved.") % {"name": fleet.base_model.display_name}
            messages.success(request, text)
            return redirect("staff:pool_detail", pool_id=pool.pk)
    return show_pool(request, pool, fleet_form=form, status=422)
