"""The books for operators: balances, receivables, adjustments, reconciliation, and the margin of each pool."""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, replace

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.utils.translation import gettext
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from apps.accounts.models import Organization, User
from apps.billing.books.adjustments import approve_adjustment, reject_adjustment, request_adjustment
from apps.billing.books.credit_requests import decline_request
from apps.billing.books.reconciliation import list_newest_checks, list_receivables
from apps.billing.budgets import month_of
from apps.billing.models import Adjustment, AdjustmentStatus, CreditRequest, CreditRequestStatus, LotKind
from apps.billing.queries import Balance, get_balance, get_balances, sum_lots
from apps.core.database.clock import db_now
from apps.core.http.forms import domain_errors_on, domain_errors_shown
from apps.core.messages.translation import later
from apps.core.money import nano_to_usd, usd_decimal, usd_to_nano
from apps.core.objects.page_tables import rows_at_once
from apps.finetuning.pools.margins import list_estimate_losses, list_margins, set_pool_cost, sum_estimate_losses
from apps.interfaces.staff.access import is_only_operator, operator_id, operator_view, sensitive_operator_view
from apps.interfaces.staff.forms import AdjustmentForm, PoolCostForm
from apps.interfaces.staff.tenants.listed import ORGANIZATIONS

_DECIDED_SHOWN = 20
_FIRST_MONTH = datetime.date(2000, 1, 1)  # of the margin
_SHOWN = 50  # of what waits and of debts
_LIST = replace(ORGANIZATIONS, name=later("balances"), url_name="staff:books", export_url_name="staff:books_export")
_EXPORTED = ("id", "name", "available_usd", "held_usd", "paid_left_usd", "promotional_left_usd")


@dataclass(frozen=True, kw_only=True)
class TenantBalance:
    """An organization with its balance, and what is left of its paid and promotional credit."""

    organization: Organization
    balance: Balance
    paid_nano: int
    promotional_nano: int


@require_safe
@operator_view
def show(request: HttpRequest) -> HttpResponse:
    """Show the tenants' balances by pages, the largest receivables, pending adjustments, and checks of the books."""
    page = _LIST.page(request, Organization.objects.all())
    wanted, debts, to_decide, decided = (
        rows_at_once(request, name, usual)
        for name, usual in (
            ("credit-requests", _SHOWN),
            ("receivables", _SHOWN),
            ("waiting-adjustments", _SHOWN),
            ("adjustments", _DECIDED_SHOWN),
        )
    )
    receivables = list_receivables(now=db_now())
    owing = Organization.objects.in_bulk([row.organization_id for row in receivables[:debts]])
    adjustments = Adjustment.objects.select_related("organization").order_by("requested_at", "pk")
    waiting = list(adjustments.filter(status=AdjustmentStatus.REQUESTED)[: to_decide + 1])
    asked = CreditRequest.objects.filter(status=CreditRequestStatus.OPEN).select_related("organization")
    requests = list(asked.order_by("requested_at", "pk")[: wanted + 1])
    people = [each.requested_by for each in waiting] + [each.requested_by for each in requests]
    askers = {each.pk: each.email for each in User.objects.filter(pk__in=people)}
    context = {
        "list": page,
        "rows": _with_balances(page.rows),
        "requests": [(each, askers.get(each.requested_by, each.requested_by)) for each in requests[:wanted]],
        "has_more_requests": len(requests) > wanted,
        "receivables": [(owing[row.organization_id], row) for row in receivables[:debts]],
        "has_more_receivables": len(receivables) > debts,
        "waiting": [(each, askers.get(each.requested_by, each.requested_by)) for each in waiting[:to_decide]],
        "has_more_waiting": len(waiting) > to_decide,
        "decided": adjustments.exclude(status=AdjustmentStatus.REQUESTED).reverse()[:decided],
        "checks": list_newest_checks(),
        "operator_id": operator_id(request),
        "is_only_operator": is_only_operator(request, [each.requested_by for each in waiting]),
    }
    return render(request, "staff/money/books.html", context)


@require_safe
@operator_view
def export(request: HttpRequest) -> HttpResponseBase:
    """Send the balances of the organizations as CSV."""
    rows = Organization.objects.all()
    return _LIST.export(request, rows, header=_EXPORTED, cells=_exported, joined=_with_balances)


def _with_balances(organizations: Sequence[Organization]) -> list[TenantBalance]:
    ids = [each.pk for each in organizations]
    lots, balances = sum_lots(organizations=ids), get_balances(organizations=ids)
    return [
        TenantBalance(
            organization=each,
            balance=balances[each.pk],
            paid_nano=lots.get((each.pk, LotKind.PAID), 0),
            promotional_nano=lots.get((each.pk, LotKind.PROMOTIONAL), 0),
        )
        for each in organizations
    ]


def _exported(row: TenantBalance) -> tuple[object, ...]:
    amounts = (row.balance.available_nano, row.balance.held_nano, row.paid_nano, row.promotional_nano)
    return (row.organization.pk, row.organization.name, *map(usd_decimal, amounts))


@require_http_methods(["GET", "HEAD", "POST"])
@sensitive_operator_view
def adjust(request: HttpRequest, organization_id: str) -> HttpResponse:
    """Give or take credit, or refund a job's charge. Above the limit, it waits for another operator's approval."""
    organization = get_object_or_404(Organization, pk=organization_id)
    wanted = CreditRequest.objects.filter(organization=organization, status=CreditRequestStatus.OPEN).first()
    initial = {"amount_usd": f"{nano_to_usd(wanted.amount_nano):f}"} if wanted else {}
    initial["refund_of"] = request.GET.get("refund_of", "")[:64]
    form = AdjustmentForm(request.POST or None, initial=initial)
    if request.method == "POST" and form.is_valid():
        try:
            with domain_errors_on(form):
                made = request_adjustment(
                    organization=organization,
                    amount_nano=usd_to_nano(form.cleaned_data["amount_usd"]),
                    reason=form.cleaned_data["reason"],
                    refund_of=form.cleaned_data["refund_of"].strip(),
                    by=operator_id(request),
                    now=db_now(),
                    id=form.cleaned_data["once"],  # a double click makes only one adjustment
                )
                is_waiting = made.status == AdjustmentStatus.REQUESTED
                messages.success(
                    request,
                    gettext("It waits for another operator.") if is_waiting else gettext("It is in the ledger."),
                )
                return redirect("staff:books")
        except ValueError as error:
            form.add_error("amount_usd", str(error))
    context = {
        "tenant": organization,
        "balance": get_balance(organization=organization),
        "wanted": wanted,
        "form": form,
    }
    return render(request, "staff/money/adjust.html", context, status=422 if request.method == "POST" else 200)


@require_POST
@sensitive_operator_view
def decide(request: HttpRequest, adjustment_id: str) -> HttpResponse:
    """Approve or reject another operator's request."""
    wanted = get_object_or_404(Adjustment, pk=adjustment_id)
    act = approve_adjustment if request.POST.get("decision") == "approve" else reject_adjustment
    with domain_errors_shown(request):
        decided = act(adjustment_id=wanted.pk, by=operator_id(request), now=db_now())
        messages.success(request, gettext("The adjustment was %(status)s.") % {"status": decided.status})
    return redirect("staff:books")


@require_POST
@sensitive_operator_view
def decline(request: HttpRequest, request_id: str) -> HttpResponse:
    """Decline a request for credit; the customer gets the reason."""
    asked = get_object_or_404(CreditRequest, pk=request_id)
    with domain_errors_shown(request):
        decline_request(
            request_id=asked.pk, reason=request.POST.get("reason", "")[:300], by=operator_id(request), now=db_now()
        )
        messages.success(request, gettext("Declined. The customer gets the reason by email."))
    return redirect("staff:books")


@require_http_methods(["GET", "HEAD", "POST"])
@operator_view
def margin(request: HttpRequest) -> HttpResponse:
    """Show what each pool earned, cost and left idle in a month; a POST sets what its GPUs cost."""
    now = db_now()
    month = _month(request.GET.get("month", ""), now)
    form = PoolCostForm(request.POST or None, initial={"from_day": month})
    if request.method == "POST" and form.is_valid():
        set_pool_cost(
            pool=form.cleaned_data["pool"],
            nano_per_gpu_hour=usd_to_nano(form.cleaned_data["cost_usd"]),
            from_day=form.cleaned_data["from_day"],
            by=operator_id(request),
        )
        messages.success(request, gettext("The cost applies from that month on."))
        return redirect("staff:margin")
    before = (month - datetime.timedelta(days=1)).replace(day=1)
    after = (month + datetime.timedelta(days=32)).replace(day=1)
    address = reverse("staff:margin")
    lost = sum_estimate_losses(month=month, now=now)
    context = {
        "month": month,
        "margins": [(each, lost.get(each.pool.pk, 0)) for each in list_margins(month=month, now=now)],
        "losses": list_estimate_losses(month=month, now=now),
        "form": form,
        "previous": f"{address}?month={before:%Y-%m}",
        "next": f"{address}?month={after:%Y-%m}" if after <= month_of(now) else "",
    }
    return render(request, "staff/money/margin.html", context, status=422 if request.method == "POST" else 200)


def _month(asked: str, now: datetime.datetime) -> datetime.date:
    try:
        found = datetime.datetime.strptime(asked, "%Y-%m").date()
        return min(max(found, _FIRST_MONTH), month_of(now))
    except ValueError:
        return month_of(now)
