"""The billing page: balance, credit, holds, invoices with their files, the price book, and the billing profile."""

from django.contrib import messages
from django.http import HttpResponse, HttpResponseBase
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.utils.translation import gettext
from django.views.decorators.http import require_http_methods, require_safe

from apps.accounts.models import Organization
from apps.accounts.roles import Permission, has_permission
from apps.billing.invoices.files import CSV_HEADER, csv_rows, pdf_of, quantity_in_words
from apps.billing.invoices.profiles import get_profile, set_profile
from apps.billing.invoices.statements import sum_by_label
from apps.billing.models import Invoice
from apps.billing.queries import get_balance, list_invoices, list_lots, list_open_holds
from apps.billing.usage.sums import forecast_month
from apps.catalog.queries import list_active_prices
from apps.core.database.clock import db_now
from apps.core.database.keyset import read_page
from apps.core.objects.downloads import download_csv
from apps.core.objects.page_tables import rows_at_once
from apps.core.objects.store import download_headers
from apps.finetuning.pools.prices import name_skus
from apps.finetuning.usage.charges import MINIMUM_SECONDS
from apps.interfaces.web.billing.spending_forms import ProfileForm
from apps.interfaces.web.shell.access import OrganizationRequest, organization_view, require

_SHOWN = 50
_LINES = 50  # on a page of an invoice


@require_http_methods(["GET", "HEAD", "POST"])
@organization_view(Permission.VIEW)
def show(request: OrganizationRequest) -> HttpResponse:
    """Show balance, credit, holds and invoices; a POST changes the billing profile."""
    profile = get_profile(organization=request.organization)
    fields = ("legal_name", "address", "chargeback_label", "is_daily_report_wanted")
    form = ProfileForm(request.POST or None, initial={name: getattr(profile, name) for name in fields})
    if request.method == "POST":
        require(request.membership, Permission.ORGANIZATION_MANAGE)
        if form.is_valid():
            set_profile(
                organization=request.organization, by=request.membership.user_id, now=db_now(), **form.cleaned_data
            )
            messages.success(request, gettext("The billing profile was saved."))
            return redirect("web:invoice_list")
    lots, held, invoices = (rows_at_once(request, name, _SHOWN) for name in ("credit", "holds", "invoices"))
    holds = list(list_open_holds(organization=request.organization)[: held + 1])
    context = {
        "balance": get_balance(organization=request.organization),
        "forecast": forecast_month(organization=request.organization, now=db_now()),
        "lots": list_lots(organization=request.organization)[:lots],
        "holds": [{"hold": hold, "left_nano": hold.amount_nano - hold.captured_nano} for hold in holds[:held]],
        "has_more_holds": len(holds) > held,
        "invoices": list_invoices(organization=request.organization)[:invoices],
        "form": form,
        "may_manage": has_permission(request.membership.role, Permission.ORGANIZATION_MANAGE),
    }
    return render(request, "billing/invoices.html", context, status=422 if request.method == "POST" else 200)


@require_safe
@organization_view(Permission.VIEW)
def prices(request: OrganizationRequest) -> HttpResponse:
    """Show every price that this organization pays now."""
    rules = list_active_prices(prefix="", organization=request.organization)
    groups = {
        "training": gettext("GPU time"),
        "inference": gettext("Tokens"),
        "warm": gettext("Kept warm"),
        "storage": gettext("Storage"),
        "conversion": gettext("Conversion"),
    }
    skus = name_skus(rule.sku for rule in rules)
    grouped = [
        (title, [(rule, skus[rule.sku].name) for rule in rules if rule.sku.startswith(f"{kind}:")])
        for kind, title in groups.items()
    ]
    context = {"groups": [group for group in grouped if group[1]], "minimum_seconds": MINIMUM_SECONDS}
    return render(request, "billing/prices.html", context)


@require_safe
@organization_view(Permission.VIEW)
def invoice(request: OrganizationRequest, invoice_id: str) -> HttpResponse:
    found = _invoice(request.organization, invoice_id)
    page = read_page(found.lines.all(), request.GET, order=("position", "id"), size=_LINES)
    skus = name_skus(line.sku for line in page.rows if line.sku)
    lines = [
        {
            "line": line,
            "sku": skus[line.sku].name if line.sku else line.kind,
            "quantity": quantity_in_words(line.unit, line.quantity),
            "why_url": reverse("web:charge_why", args=[line.pk]),
        }
        for line in page.rows
    ]
    sums, others_cents = sum_by_label(found)
    labels = [(label or gettext("without label"), cents * 10_000_000) for label, cents in sums.items()]
    if others_cents is not None:
        labels.append((gettext("Everything else"), others_cents * 10_000_000))
    address = reverse("web:invoice_detail", args=[found.pk])
    context = {
        "invoice": found,
        "total_nano": found.total_cents * 10_000_000,
        "lines": lines,
        "labels": labels if set(sums) != {""} else [],
        "previous": f"{address}?before={page.previous['before']}" if page.has_previous else "",
        "next": f"{address}?after={page.next['after']}" if page.has_next else "",
    }
    return render(request, "billing/invoice.html", context)


@require_safe
@organization_view(Permission.VIEW)
def invoice_csv(request: OrganizationRequest, invoice_id: str) -> HttpResponseBase:
    found = _invoice(request.organization, invoice_id)
    return download_csv(request, CSV_HEADER, csv_rows(found), filename=f"invoice-{found.number}.csv")


@require_safe
@organization_view(Permission.VIEW)
def invoice_pdf(request: OrganizationRequest, invoice_id: str) -> HttpResponse:
    found = _invoice(request.organization, invoice_id)
    return HttpResponse(pdf_of(found), headers=download_headers(f"invoice-{found.number}.pdf", "application/pdf"))


def _invoice(organization: Organization, invoice_id: str) -> Invoice:
    return get_object_or_404(list_invoices(organization=organization).select_related("organization"), pk=invoice_id)
