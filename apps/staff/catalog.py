"""Base models and prices."""

from pathlib import Path

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_http_methods, require_POST

from apps.catalog import operations, queries
from apps.catalog.models import BaseModel
from apps.core.clock import db_now
from apps.core.errors import DomainError
from apps.core.forms import add_domain_error
from apps.core.money import usd_to_nano
from apps.staff.access import operator_id, operator_view
from apps.staff.forms import BaseModelForm, PriceForm

_HOUR_MS = 3_600_000
_MILLION = 1_000_000


@require_http_methods(["GET", "HEAD", "POST"])
@operator_view
def base_models(request: HttpRequest) -> HttpResponse:
    """List the base models; a POST adds one."""
    form = BaseModelForm(request.POST or None)
    if request.method == "POST" and form.is_valid():
        try:
            added = _add(form, operator_id(request))
        except DomainError as error:
            add_domain_error(form, error)
        else:
            messages.success(request, f"{added.display_name} was added. Set its token prices next.")
            return redirect("staff:base_model_list")
    status = 422 if request.method == "POST" else 200
    context = {"base_models": queries.list_base_models(), "form": form}
    return render(request, "staff/base_models.html", context, status=status)


def _add(form: BaseModelForm, by: str) -> BaseModel:
    data = form.cleaned_data
    return operations.add_base_model(
        name=data["name"],
        display_name=data["display_name"],
        path=Path(data["path"]) if data["path"] else None,
        repo=data["repo"],
        revision=data["revision"],
        config=data["config"],
        hub_token=data["hub_token"],
        licence=data["licence"],
        by=by,
        now=db_now(),
    )


@require_POST
@operator_view
def retire_base_model(request: HttpRequest, base_model_id: str) -> HttpResponse:
    base_model = get_object_or_404(BaseModel, pk=base_model_id, retired_at=None)
    operations.retire_base_model(base_model=base_model, by=operator_id(request), now=db_now())
    messages.success(request, f"{base_model.display_name} takes no new jobs; its adapters go on answering.")
    return redirect("staff:base_model_list")


@require_http_methods(["GET", "HEAD", "POST"])
@operator_view
def prices(request: HttpRequest) -> HttpResponse:
    """List every price there ever was; a POST sets one from now on."""
    form = PriceForm(request.POST or None)
    if request.method == "POST" and form.is_valid():
        try:
            rule = operations.set_price(
                sku=form.cleaned_data["sku"],
                unit=form.unit,
                price_nano=usd_to_nano(form.cleaned_data["price_usd"]),
                per=_MILLION if form.unit == "tokens" else _HOUR_MS,
                by=operator_id(request),
                now=db_now(),
            )
        except DomainError as error:
            add_domain_error(form, error)
        else:
            messages.success(request, f"{rule.sku} has a new price. Jobs already queued keep the one they were quoted.")
            return redirect("staff:price_list")
    status = 422 if request.method == "POST" else 200
    return render(request, "staff/prices.html", {"rules": queries.list_prices(), "form": form}, status=status)
