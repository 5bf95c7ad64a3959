"""Payments at Stripe: payments received, refunds, disputes, and differences between the books and Stripe."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from django import forms
from django.contrib import messages
from django.db.models import Model, QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils.http import urlencode
from django.utils.translation import gettext
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from apps.billing.models import CreditLot
from apps.core.database.clock import db_now
from apps.core.database.keyset import read_page
from apps.core.http.forms import domain_errors_on, domain_errors_shown
from apps.core.messages.translation import later
from apps.core.objects.page_tables import rows_at_once
from apps.interfaces.staff.access import is_only_operator, operator_id, operator_view, sensitive_operator_view
from apps.payments import reconciliation, webhooks
from apps.payments.lifecycle import RefundStatus
from apps.payments.models import CardDispute, CardRefund, TopUp
from apps.payments.refunds import approve_refund, reject_refund, request_refund
from apps.payments.stripe import gateway

T = TypeVar("T", bound=Model)
_SHOWN = 50
_RUNS_SHOWN = 10  # of the reconciliation
_PLACES = [f"{name}_{way}" for name in ("disputes", "refunds", "topups") for way in ("after", "before")]


class RefundForm(forms.Form):
    amount_usd = forms.DecimalField(
        label=later("Credit to send back"),
        max_digits=9,
        decimal_places=2,
        min_value=0,
        help_text=later("Above $100 in 24 hours, a second operator must approve."),
    )
    reason = forms.CharField(max_length=300, label=later("Reason"), help_text=later("Kept with the refund."))


@require_safe
@operator_view
def index(request: HttpRequest) -> HttpResponse:
    shown = rows_at_once(request, "differences", _SHOWN)
    differences = reconciliation.list_differences(limit=shown + 1)
    refunds = _read_list(request, "refunds", CardRefund.objects.select_related("organization", "topup"))
    waiting = [each.requested_by for each in refunds.rows if each.status == RefundStatus.WAITING]
    context = {
        "is_configured": gateway.is_configured(),
        "differences": differences[:shown],
        "has_more_differences": len(differences) > shown,
        "runs": reconciliation.list_reconciliations(limit=rows_at_once(request, "reconciliations", _RUNS_SHOWN)),
        "stuck": webhooks.list_stuck(limit=rows_at_once(request, "failed-webhooks", _SHOWN)),
        "disputes": _read_list(request, "disputes", CardDispute.objects.select_related("organization", "topup")),
        "refunds": refunds,
        "topups": _read_list(request, "topups", TopUp.objects.select_related("organization"), table="payments"),
        "operator_id": operator_id(request),
        "is_only_operator": is_only_operator(request, waiting),
    }
    return render(request, "staff/money/payments.html", context)


@dataclass(frozen=True)
class _PagedList(Generic[T]):
    """One of the page's lists, newest first, with the addresses of the page where it goes on; the others stay."""

    rows: list[T]
    previous: str
    next: str


def _read_list(request: HttpRequest, name: str, rows: QuerySet[T], *, table: str = "") -> _PagedList[T]:
    """Return the list whose place in the address begins with `name`, and whose file has the name `table` or this."""
    asked = {way: request.GET.get(f"{name}_{way}", "") for way in ("after", "before")}
    size = rows_at_once(request, table or name, _SHOWN)
    page = read_page(rows, asked, order=("-created_at", "-id"), size=size)
    others = {key: request.GET[key] for key in _PLACES if key in request.GET and not key.startswith(name)}

    def address(place: Mapping[str, str]) -> str:
        return f"?{urlencode(others | {f'{name}_{way}': pk for way, pk in place.items()})}" if place else ""

    return _PagedList(page.rows, address(page.previous), address(page.next))


@require_http_methods(["GET", "HEAD", "POST"])
@sensitive_operator_view
def refund(request: HttpRequest, topup_id: str) -> HttpResponse:
    """Refund unspent credit of one payment to its card."""
    topup = get_object_or_404(TopUp.objects.select_related("organization"), pk=topup_id)
    form = RefundForm(request.POST or None)
    if request.method == "POST" and form.is_valid():
        with domain_errors_on(form):
            made = request_refund(
                topup=topup,
                credit_cents=int(form.cleaned_data["amount_usd"] * 100),
                by=operator_id(request),
                reason=form.cleaned_data["reason"],
            )
            is_waiting = made.status == RefundStatus.WAITING
            messages.success(
                request,
                gettext("It waits for another operator.") if is_waiting else gettext("The refund is on its way."),
            )
            return redirect("staff:payment_list")
    lot = CreditLot.objects.filter(reference=topup.reference).first()
    unspent = lot.remaining_nano - lot.held_nano if lot else 0
    context = {"topup": topup, "form": form, "unspent_nano": unspent}
    return render(request, "staff/money/refund.html", context, status=422 if request.method == "POST" else 200)


@require_POST
@sensitive_operator_view
def decide(request: HttpRequest, refund_id: str) -> HttpResponse:
    """Approve or reject a refund that another operator requested."""
    wanted = get_object_or_404(CardRefund, pk=refund_id)
    is_approval = request.POST.get("decision") == "approve"
    with domain_errors_shown(request):
        (approve_refund if is_approval else reject_refund)(refund=wanted, by=operator_id(request))
        messages.success(
            request, gettext("The refund is on its way.") if is_approval else gettext("The refund was rejected.")
        )
    return redirect("staff:payment_list")


@require_POST
@sensitive_operator_view
def resolve(request: HttpRequest, difference_id: str) -> HttpResponse:
    """Close a difference with a note on how it was resolved."""
    note = request.POST.get("note", "").strip()
    if note:
        reconciliation.resolve_difference(difference_id=difference_id, by=operator_id(request), note=note, now=db_now())
    else:
        messages.error(request, gettext("Enter what you did about it."))
    return redirect("staff:payment_list")
