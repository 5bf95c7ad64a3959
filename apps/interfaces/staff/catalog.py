"""Base models and prices."""

import datetime
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlencode

from django.contrib import messages
from django.db import transaction
from django.db.models import Q
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils.translation import gettext
from django.views.decorators.http import require_http_methods, require_POST

from apps.catalog import hub_lookups, operations, price_requests, queries
from apps.catalog.models import BaseModel, HubLookup, PriceRequest, PriceRule
from apps.catalog.pricing import batch_sku, unit_of, usual_per
from apps.core.database.clock import db_now
from apps.core.database.keyset import read_page
from apps.core.errors import DomainError
from apps.core.http.confirmation import AffectedRow, ConfirmedAction, confirm
from apps.core.http.forms import domain_errors_on, domain_errors_shown
from apps.core.messages.translation import later
from apps.core.money import usd_to_nano
from apps.core.objects.page_tables import rows_at_once
from apps.finetuning.pools.prices import name_skus, price_sku
from apps.finetuning.quotes.fit import FIT_TOKENS, fit_model
from apps.interfaces.staff.access import is_only_operator, operator_id, operator_view, sensitive_operator_view
from apps.interfaces.staff.forms import InstallForm, LocalModelForm, LookupForm, PriceForm
from apps.interfaces.staff.money.price_preview import preview_price

_PRICES_SHOWN = 50
_PAST = "past"


@require_http_methods(["GET", "HEAD", "POST"])
@operator_view
def base_models(request: HttpRequest) -> HttpResponse:
    """List the base models; a POST adds one from a folder."""
    form = LocalModelForm(request.POST or None)
    if request.method == "POST" and form.is_valid():
        with domain_errors_on(form):
            data = form.cleaned_data
            added = operations.add_base_model(
                name=data["name"],
                display_name=data["display_name"],
                path=Path(data["path"]),
                licence=data["licence"],
                by=operator_id(request),
                now=db_now(),
            )
            messages.success(
                request,
                gettext("%(name)s was added. Set its token prices next.") % {"name": added.display_name},
            )
            return redirect("staff:base_model_list")
    return _show_base_models(request, local=form, status=422 if request.method == "POST" else 200)


@require_POST
@operator_view
def look_up(request: HttpRequest) -> HttpResponse:
    """Ask the hub about a repository of the catalogue, a typed one, or that of a base model."""
    form = LookupForm(request.POST)
    if form.is_valid():
        with domain_errors_on(form):
            data = form.cleaned_data
            lookup = hub_lookups.request_lookup(
                repo=data["choice"] or data["repo"],
                revision=data["revision"],
                hub_token=data["hub_token"],
                by=operator_id(request),
                now=db_now(),
            )
            return redirect("staff:hub_lookup", lookup_id=lookup.pk)
    return _show_base_models(request, lookup=form, status=422)


@require_http_methods(["GET", "HEAD", "POST"])
@operator_view
def show_lookup(request: HttpRequest, lookup_id: str) -> HttpResponse:
    """Show the hub's description of a repository and where the model fits. A POST installs it."""
    lookup = get_object_or_404(HubLookup.objects.select_related("base_model"), pk=lookup_id)
    form = InstallForm(request.POST or None, initial={"name": hub_lookups.propose_name(lookup=lookup)})
    if request.method == "POST" and form.is_valid():
        with domain_errors_on(form):
            added = hub_lookups.install_found(
                lookup=lookup, name=form.cleaned_data["name"], by=operator_id(request), now=db_now()
            )
            messages.success(
                request, gettext("%(name)s is being installed. Set its token prices next.") % {"name": added.name}
            )
            return redirect("staff:base_model_list")
    context = {
        "lookup": lookup,
        "form": form,
        "again": LookupForm(),
        "installed": hub_lookups.find_installed(lookup=lookup),
        "download_bytes": sum(file["bytes"] for file in (lookup.repository or {}).get("files", [])),
    }
    if lookup.model:
        try:
            context["fit"] = fit_model(**lookup.model, now=db_now())
        except DomainError as error:
            context["fit_refusal"] = error.message
    status = 422 if request.method == "POST" else 200
    return render(request, "staff/machines/hub_lookup.html", context | {"row_tokens": FIT_TOKENS}, status=status)


def _show_base_models(
    request: HttpRequest, *, local: LocalModelForm | None = None, lookup: LookupForm | None = None, status: int
) -> HttpResponse:
    on_offer = queries.list_base_models()
    asked = request.GET.get("q", "").strip()[:80]
    matches = Q(name__icontains=asked) | Q(display_name__icontains=asked)
    matches |= Q(repo__icontains=asked) | Q(licence__icontains=asked)
    context = {
        "base_models": on_offer.filter(matches),
        "total": on_offer.count(),
        "q": asked,
        "local": local or LocalModelForm(),
        "lookup": lookup or LookupForm(),
    }
    return render(request, "staff/machines/base_models.html", context, status=status)


@require_POST
@operator_view
def install_base_model(request: HttpRequest, base_model_id: str) -> HttpResponse:
    """Request again the files of a model that the hub did not deliver."""
    base_model = get_object_or_404(BaseModel, pk=base_model_id, retired_at=None)
    with domain_errors_shown(request):
        operations.request_install(base_model=base_model, by=operator_id(request), now=db_now())
        messages.success(
            request,
            gettext("The files of %(display_name)s are being read from the hub.")
            % {"display_name": base_model.display_name},
        )
    return redirect("staff:base_model_list")


@require_http_methods(["GET", "HEAD", "POST"])
@operator_view
def retire(request: HttpRequest) -> HttpResponse:
    """Retire base models, after the name of one or their number was typed."""
    return confirm(request, _RETIRE)


def _find(request: HttpRequest, ids: Sequence[str]) -> list[AffectedRow]:
    models = queries.list_base_models().filter(pk__in=ids)
    return [AffectedRow(model.pk, model.display_name, _effect_of(model)) for model in models]


def _effect_of(model: BaseModel) -> str:
    if not model.is_installed:
        return gettext("It takes no new jobs.")
    return gettext("It takes no new jobs, and requests to %(name)s itself fail. Its adapters keep answering.") % {
        "name": model.name
    }


def _retire(request: HttpRequest, base_model_id: str) -> None:
    base_model = get_object_or_404(BaseModel, pk=base_model_id)
    operations.retire_base_model(base_model=base_model, by=operator_id(request), now=db_now())


_RETIRE = ConfirmedAction[HttpRequest](
    parameter="model",
    verb=later("Retire"),
    nouns=(later("base model"), later("base models")),
    warning=later("A retired model cannot be offered again under its name."),
    done=later("Retired"),
    list_url_name="staff:base_model_list",
    list_title=later("Base models"),
    find=_find,
    act=_retire,
)


@require_http_methods(["GET", "HEAD", "POST"])
@sensitive_operator_view
def prices(request: HttpRequest) -> HttpResponse:
    """List a page of the prices; a POST previews a new price and sets it once confirmed."""
    form = PriceForm(request.POST or None, initial={"sku": request.GET.get("sku", "")})
    preview, batches = None, {}
    if request.method == "POST" and form.is_valid():
        with domain_errors_on(form):
            with transaction.atomic():
                made = _set_price(form, by=operator_id(request))
                if not _is_confirmed(request, form):  # validated as if it were set, then rolled back
                    transaction.set_rollback(True)
            if _is_confirmed(request, form):
                is_waiting = isinstance(made, PriceRequest)
                words = (
                    gettext("The price waits for another operator.") if is_waiting else gettext("The price was set.")
                )
                messages.success(request, gettext("%(words)s Existing quotes keep their price.") % {"words": words})
                return redirect("staff:price_list")
            data, batches = form.cleaned_data, _price_of_batches(made)
            preview = preview_price(
                sku=data["sku"],
                price_nano=usd_to_nano(data["price_usd"]),
                per=usual_per(unit_of(data["sku"])),
                tiers=data["tiers"],
                organization=data["organization"],
                now=db_now(),
            )
    now = db_now()
    shown, book = _price_book(request, now)
    waiting = list(price_requests.list_waiting_prices())
    skus = name_skus([*(rule.sku for rule in shown), *(wanted.sku for wanted in waiting)])
    context = {
        "rules": [(rule, skus[rule.sku]) for rule in shown],
        **book,
        "form": form,
        "preview": preview,
        **batches,
        "now": now,
        "waiting": [(wanted, skus[wanted.sku], operations.batch_price_nano(wanted)) for wanted in waiting],
        "operator_id": operator_id(request),
        "is_only_operator": is_only_operator(request, [wanted.requested_by for wanted in waiting]),
    }
    status = 422 if request.method == "POST" and preview is None else 200
    return render(request, "staff/money/prices.html", context, status=status)


def _price_book(request: HttpRequest, now: datetime.datetime) -> tuple[list[PriceRule], dict[str, object]]:
    """Return a page of the prices in force and to come, or of those that ended (`show=past`), and its links."""
    is_past = request.GET.get("show") == _PAST
    asked: dict[str, str] = {}
    if is_past:
        sku = request.GET.get("sku", "").replace("\x00", "")
        asked = {"show": _PAST} | ({"sku": sku} if sku else {})
        rules, order = queries.list_past_prices(now=now, sku=sku), ("-effective_to", "-id")
    else:
        rules, order = queries.list_current_prices(now=now), ("sku", "id")
    page = read_page(rules, request.GET, order=order, size=rows_at_once(request, "prices", _PRICES_SHOWN))
    links = {"previous": page.previous, "next": page.next}
    return page.rows, {
        "is_past": is_past,
        "tabs": [
            {"label": gettext("Current and scheduled"), "url": "?", "current": not is_past},
            {"label": gettext("Past"), "url": f"?show={_PAST}", "current": is_past},
        ],
        **{name: f"?{urlencode(asked | place)}" if place else "" for name, place in links.items()},
    }


def _price_of_batches(made: PriceRule | PriceRequest) -> dict[str, object]:
    """Return for the page what the same tokens cost in batches with this price, and without it at that moment."""
    batch_nano = operations.batch_price_nano(made)
    if batch_nano is None:
        return {}
    begin = max(made.effective_from or db_now(), db_now())
    before = queries.active_price(sku=batch_sku(made.sku), organization=made.organization_id, now=begin)
    return {"batch_nano": batch_nano, "batch_before": before}


def _is_confirmed(request: HttpRequest, form: PriceForm) -> bool:
    """Return whether the posted values are those that were previewed; changed values are previewed again."""
    return request.POST.get("confirmed") == form.previewed()


def _set_price(form: PriceForm, *, by: str) -> PriceRule | PriceRequest:
    data = form.cleaned_data
    return price_sku(
        sku=data["sku"],
        price_nano=usd_to_nano(data["price_usd"]),
        organization=data["organization"],
        tiers=data["tiers"],
        effective_from=data["effective_from"],
        by=by,
        now=db_now(),
    )


@require_POST
@sensitive_operator_view
def decide_price(request: HttpRequest, request_id: str) -> HttpResponse:
    """Approve or reject the price that another operator asked for."""
    wanted = get_object_or_404(PriceRequest, pk=request_id)
    is_approval = request.POST.get("decision") == "approve"
    act = price_requests.approve_price if is_approval else price_requests.reject_price
    with domain_errors_shown(request):
        act(request_id=wanted.pk, by=operator_id(request), now=db_now())
        messages.success(request, gettext("The price was set.") if is_approval else gettext("The price was rejected."))
    return redirect("staff:price_list")
