"""Credit: the balance, the ways to get more, and the organization's requests to the operators."""

from django.contrib import messages
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.utils.translation import gettext
from django.views.decorators.http import require_http_methods

from apps.accounts.roles import Permission, has_permission
from apps.billing.books.credit_requests import list_requests, request_credit
from apps.billing.models import CreditRequestStatus
from apps.billing.queries import get_balance
from apps.core.http.forms import domain_errors_on
from apps.core.money import usd_to_nano
from apps.core.objects.page_tables import rows_at_once
from apps.interfaces.web.billing.spending_forms import CreditRequestForm
from apps.interfaces.web.shell.access import OrganizationRequest, organization_view, require
from apps.payments.stripe.gateway import is_configured

_SHOWN = 20


@require_http_methods(["GET", "HEAD", "POST"])
@organization_view(Permission.VIEW)
def index(request: OrganizationRequest) -> HttpResponse:
    """Show the balance and the requests; a POST sends a request. `?amount` fills in the missing dollars."""
    form = CreditRequestForm(request.POST or None, initial={"amount_usd": request.GET.get("amount", "")[:12] or "5"})
    if request.method == "POST":
        require(request.membership, Permission.JOB_WRITE)
        if form.is_valid():
            with domain_errors_on(form):
                request_credit(
                    organization=request.organization,
                    amount_nano=usd_to_nano(form.cleaned_data["amount_usd"]),
                    note=form.cleaned_data["note"],
                    by=request.user,
                )
                messages.success(request, gettext("Request sent. You'll get the answer by email."))
                return redirect("web:credit")
    shown = rows_at_once(request, "credit-requests", _SHOWN)
    requests = list(list_requests(organization=request.organization)[:shown])
    context = {
        "balance": get_balance(organization=request.organization),
        "form": form,
        "requests": requests,
        "has_open": any(each.status == CreditRequestStatus.OPEN for each in requests),
        "may_request": has_permission(request.membership.role, Permission.JOB_WRITE),
        "takes_cards": is_configured(),
    }
    return render(request, "billing/credit.html", context, status=422 if form.errors else 200)
