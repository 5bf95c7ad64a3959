"""The payment settings: top up, the card, auto-recharge, Stripe's portal, payments. Hidden without a payment provider.

No view here calls Stripe. It stores what it needs, a task carries it out, and the waiting page polls.
"""

from decimal import Decimal
from typing import Any

from django import forms
from django.contrib import messages
from django.http import Http404, HttpResponse
from django.shortcuts import redirect, render
from django.utils.translation import gettext
from django.views.decorators.http import require_POST, require_safe
from django_htmx.http import HttpResponseClientRedirect

from apps.accounts.roles import Permission, has_permission
from apps.billing.queries import get_balance
from apps.core.database.clock import db_now
from apps.core.http.forms import domain_errors_on, domain_errors_shown
from apps.core.messages.translation import later
from apps.core.money import NANO_PER_CENT
from apps.core.objects.page_tables import rows_at_once
from apps.interfaces.web.shell.access import OrganizationRequest, organization_view
from apps.payments import autorecharge
from apps.payments.customers import get_customer
from apps.payments.dunning import owed_nano
from apps.payments.lifecycle import PageStatus, StandingStatus, TopUpStatus
from apps.payments.models import HostedPage, PageKind, Standing, TopUp
from apps.payments.stripe import gateway
from apps.payments.topups import ask_stripe, request_page, request_topup

_PAYMENTS_SHOWN = 20
_AMOUNTS = ("threshold", "amount", "monthly_cap")
_ASKED_EVERY_SECONDS = 5
_USD: dict[str, Any] = {"max_digits": 9, "decimal_places": 2}


class TopUpForm(forms.Form):
    amount_usd = forms.DecimalField(label=later("Amount in dollars"), initial=50, **_USD)

    @property
    def amount_cents(self) -> int:
        return int(self.cleaned_data["amount_usd"] * 100)


class AutoRechargeForm(forms.Form):
    is_enabled = forms.BooleanField(required=False, label=later("Charge my card when credit runs low"))
    threshold_usd = forms.DecimalField(label=later("When the balance falls below"), min_value=Decimal(0), **_USD)
    amount_usd = forms.DecimalField(label=later("Charge"), **_USD)
    monthly_cap_usd = forms.DecimalField(
        label=later("Monthly maximum"), help_text=later("Excludes tax. Months are UTC."), min_value=Decimal(0), **_USD
    )

    def in_cents(self) -> dict[str, int]:
        return {f"{name}_cents": int(self.cleaned_data[f"{name}_usd"] * 100) for name in _AMOUNTS}


@require_safe
@organization_view(Permission.VIEW)
def index(request: OrganizationRequest) -> HttpResponse:
    _refuse_without_payments()
    return _page(request)


def _page(
    request: OrganizationRequest,
    *,
    topup_form: TopUpForm | None = None,
    recharge_form: AutoRechargeForm | None = None,
    status: int = 200,
) -> HttpResponse:
    order = autorecharge.get_auto_recharge(organization=request.organization)
    now = db_now()
    amounts = {f"{name}_usd": Decimal(getattr(order, f"{name}_cents")) / 100 for name in _AMOUNTS}
    charged_cents = autorecharge.charged_this_month_cents(organization=request.organization, now=now)
    context = {
        "may_manage": has_permission(request.membership.role, Permission.ORGANIZATION_MANAGE),
        "balance": get_balance(organization=request.organization),
        "customer": get_customer(organization=request.organization),
        "order": order,
        "standing": Standing.objects.for_organization(request.organization)
        .exclude(status=StandingStatus.ACTIVE)
        .first(),
        "owed_nano": owed_nano(organization=request.organization),
        "limited_until": autorecharge.limited_until(organization=request.organization, now=now),
        "max_declined": autorecharge.MAX_DECLINED_A_DAY,
        "is_paused": order.paused_until is not None and order.paused_until > now,
        "charged_nano": charged_cents * NANO_PER_CENT,
        "cap_nano": order.monthly_cap_cents * NANO_PER_CENT if order.is_enabled else None,
        "topup_form": topup_form or TopUpForm(),
        "recharge_form": recharge_form or AutoRechargeForm(initial={"is_enabled": order.is_enabled, **amounts}),
        "topups": TopUp.objects.for_organization(request.organization)
        .prefetch_related("refunds", "disputes")
        .order_by("-created_at")[: rows_at_once(request, "payments", _PAYMENTS_SHOWN)],
    }
    return render(request, "billing/settings.html", context, status=status)


@require_POST
@organization_view(Permission.ORGANIZATION_MANAGE, is_sensitive=True)
def top_up(request: OrganizationRequest) -> HttpResponse:
    """Request a page to pay for credit."""
    _refuse_without_payments()
    form = TopUpForm(request.POST)
    if form.is_valid():
        with domain_errors_on(form):
            asked = request_topup(
                organization=request.organization, amount_cents=form.amount_cents, by=request.membership.user_id
            )
            return redirect("web:billing_page", asked.pk)
    return _page(request, topup_form=form, status=422)


@require_POST
@organization_view(Permission.ORGANIZATION_MANAGE, is_sensitive=True)
def leave_card(request: OrganizationRequest) -> HttpResponse:
    """Request a page to save a card for later."""
    _refuse_without_payments()
    return _open_page(request, PageKind.CARD)


@require_POST
@organization_view(Permission.ORGANIZATION_MANAGE, is_sensitive=True)
def open_portal(request: OrganizationRequest) -> HttpResponse:
    """Request a visit to Stripe's portal: cards, address, tax ids, invoices."""
    _refuse_without_payments()
    return _open_page(request, PageKind.PORTAL)


def _open_page(request: OrganizationRequest, kind: PageKind) -> HttpResponse:
    with domain_errors_shown(request):
        asked = request_page(organization=request.organization, kind=kind, by=request.membership.user_id)
        return redirect("web:billing_page", asked.pk)
    return redirect("web:billing")


@require_POST
@organization_view(Permission.ORGANIZATION_MANAGE, is_sensitive=True)
def auto_recharge(request: OrganizationRequest) -> HttpResponse:
    _refuse_without_payments()
    form = AutoRechargeForm(request.POST)
    if form.is_valid():
        is_enabled = form.cleaned_data["is_enabled"]
        with domain_errors_on(form):
            autorecharge.set_auto_recharge(
                organization=request.organization,
                is_enabled=is_enabled,
                by=request.membership.user_id,
                **form.in_cents(),
            )
            messages.success(
                request, gettext("Auto-recharge is on.") if is_enabled else gettext("Auto-recharge is off.")
            )
            return redirect("web:billing")
    return _page(request, recharge_form=form, status=422)


@require_POST
@organization_view(Permission.ORGANIZATION_MANAGE, is_sensitive=True)
def resume(request: OrganizationRequest) -> HttpResponse:
    """End the pause of auto-recharge after declined charges."""
    _refuse_without_payments()
    with domain_errors_shown(request):
        autorecharge.resume_auto_recharge(
            organization=request.organization, by=request.membership.user_id, now=db_now()
        )
        messages.success(request, gettext("Your card is charged again when credit runs low."))
    return redirect("web:billing")


@require_safe
@organization_view(Permission.ORGANIZATION_MANAGE, is_sensitive=True)
def page(request: OrganizationRequest, page_id: str) -> HttpResponse:
    """Wait for one of Stripe's pages and redirect to it. When the user comes back, wait for the result."""
    _refuse_without_payments()
    asked = _get_page(request, page_id)
    # Redirect to Stripe once, for the poll that finds the page ready: an answer to a form must not leave this origin.
    was_waiting = request.GET.get("waiting") == "1"
    is_fresh = asked.status == PageStatus.READY and (asked.topup is None or asked.topup.status == TopUpStatus.OPEN)
    if request.htmx and was_waiting and is_fresh:
        return HttpResponseClientRedirect(asked.url)
    return _show_page(request, asked)


@require_POST
@organization_view(Permission.ORGANIZATION_MANAGE)
def ask(request: OrganizationRequest, page_id: str) -> HttpResponse:
    """Have a task ask Stripe about an open top-up, because a webhook may be late or lost."""
    _refuse_without_payments()
    asked = _get_page(request, page_id)
    if asked.topup is not None and asked.topup.status == TopUpStatus.OPEN:
        limited_by = request.organization.pk
        ask_stripe(topup=asked.topup, limited_by=limited_by, every_seconds=_ASKED_EVERY_SECONDS, now=db_now())
    return _show_page(request, asked)


def _show_page(request: OrganizationRequest, asked: HostedPage) -> HttpResponse:
    template = "billing/page.html#state" if request.htmx else "billing/page.html"
    return render(request, template, {"asked": asked, "topup": asked.topup})


def _get_page(request: OrganizationRequest, page_id: str) -> HostedPage:
    asked = HostedPage.objects.for_organization(request.organization).select_related("topup").filter(pk=page_id).first()
    if asked is None:
        raise Http404
    return asked


def _refuse_without_payments() -> None:
    if not gateway.is_configured():
        raise Http404
