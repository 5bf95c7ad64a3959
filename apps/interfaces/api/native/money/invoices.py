"""Invoices with their lines and files, and the profile that they are written for."""

from typing import Annotated, Literal, TypedDict

import msgspec
from django.http import HttpResponse
from msgspec import Meta
from rest_framework.request import Request

from apps.accounts.roles import Permission
from apps.billing.invoices.files import CSV_HEADER, csv_rows, pdf_of, usd_of_cents
from apps.billing.invoices.profiles import get_profile, set_profile
from apps.billing.models import BillingProfile, Invoice, InvoiceLine
from apps.billing.queries import get_invoice, list_invoices
from apps.core.database.clock import db_now
from apps.core.http.csv_text import csv_chunks
from apps.core.http.openapi.document import FileAnswer
from apps.core.money import usd_decimal
from apps.core.objects.store import attachment
from apps.interfaces.api.requests.pagination import ListObject, PageQuery, page
from apps.interfaces.api.views import ApiView

Csv = Annotated[HttpResponse, FileAnswer("text/csv")]
Pdf = Annotated[HttpResponse, FileAnswer("application/octet-stream")]  # generators of clients know no application/pdf
_Day = Annotated[str, Meta(description="A UTC day, such as 2026-11-30.")]


class InvoiceObject(TypedDict):
    """The charges of one month, which credit has paid. `month` is its first day."""

    object: Literal["invoice"]
    id: str
    number: str
    month: _Day
    issued_at: int
    billed_to: str
    total_usd: str


class InvoiceLineObject(TypedDict):
    """`amount_usd` is in whole cents, which add up to the invoice's total. `exact_usd` is exact.

    `subject` is the job, the model or the stored thing.
    """

    object: Literal["invoice.line"]
    id: str
    kind: str
    subject: str
    sku: str | None
    price: str | None
    unit: str | None
    quantity: int
    first_day: _Day
    last_day: _Day
    key: str | None
    member: str | None
    adapter_version: str | None
    label: str | None
    amount_usd: str
    exact_usd: str


class InvoiceView(ApiView):
    """The base of the calls on one invoice."""

    def invoice(self, invoice_id: str) -> Invoice:
        return get_invoice(organization=self.organization, id=invoice_id)

    def file(self, content: object, content_type: str, filename: str) -> HttpResponse:
        headers = {"Content-Disposition": attachment(filename), "Cache-Control": "private, no-store"}
        return HttpResponse(content, content_type=content_type, headers=headers)


class InvoiceList(ApiView):
    required_scope = {"GET": Permission.VIEW}

    def get(self, request: Request, query: PageQuery) -> ListObject[InvoiceObject]:
        """List invoices, the newest month first."""
        return page(query, list_invoices(organization=self.organization), _invoice_object, order=("-month", "-id"))


class InvoiceDetail(InvoiceView):
    required_scope = {"GET": Permission.VIEW}

    def get(self, request: Request, invoice_id: str) -> InvoiceObject:
        """Return an invoice."""
        return _invoice_object(self.invoice(invoice_id))


class InvoiceLines(InvoiceView):
    required_scope = {"GET": Permission.VIEW}

    def get(self, request: Request, invoice_id: str, query: PageQuery) -> ListObject[InvoiceLineObject]:
        """List the charges on an invoice, in its order."""
        return page(query, self.invoice(invoice_id).lines.all(), _line_object, order=("position", "id"))


class InvoiceCsv(InvoiceView):
    required_scope = {"GET": Permission.VIEW}

    def get(self, request: Request, invoice_id: str) -> Csv:
        """Download an invoice for spreadsheets: a row for each charge."""
        invoice = self.invoice(invoice_id)
        return self.file(csv_chunks(CSV_HEADER, csv_rows(invoice)), "text/csv", f"invoice-{invoice.number}.csv")


class InvoicePdf(InvoiceView):
    required_scope = {"GET": Permission.VIEW}

    def get(self, request: Request, invoice_id: str) -> Pdf:
        """Download an invoice as a PDF, with its first 1,000 charges."""
        invoice = self.invoice(invoice_id)
        return self.file(pdf_of(invoice), "application/octet-stream", f"invoice-{invoice.number}.pdf")


class ChangeProfile(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What is left out stays as it is."""

    legal_name: Annotated[str, Meta(max_length=200)] | None = None
    address: Annotated[str, Meta(max_length=1000)] | None = None
    chargeback_label: Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[-a-zA-Z0-9_]+$")] | None = None
    is_daily_report_wanted: bool | None = None


class ProfileObject(TypedDict):
    """Whom invoices are written to, and by the values of which label they are split."""

    object: Literal["billing.profile"]
    legal_name: str
    address: str
    chargeback_label: str
    is_daily_report_wanted: bool


class ProfileView(ApiView):
    required_scope = {"GET": Permission.VIEW, "POST": Permission.ORGANIZATION_MANAGE}
    examples = {"POST": {"legal_name": "Acme GmbH", "chargeback_label": "team"}}

    def get(self, request: Request) -> ProfileObject:
        """Return the billing profile."""
        return _profile_object(get_profile(organization=self.organization))

    def post(self, request: Request, body: ChangeProfile) -> ProfileObject:
        """Change the billing profile. Issued invoices stay as they are."""
        sent = {name: value for name, value in msgspec.structs.asdict(body).items() if value is not None}
        return _profile_object(set_profile(organization=self.organization, by=self.actor, now=db_now(), **sent))


def _invoice_object(invoice: Invoice) -> InvoiceObject:
    return {
        "object": "invoice",
        "id": invoice.pk,
        "number": invoice.number,
        "month": invoice.month.isoformat(),
        "issued_at": int(invoice.issued_at.timestamp()),
        "billed_to": invoice.billed_to,
        "total_usd": usd_of_cents(invoice.total_cents),
    }


def _line_object(line: InvoiceLine) -> InvoiceLineObject:
    return {
        "object": "invoice.line",
        "id": line.pk,
        "kind": line.kind,
        "subject": line.subject,
        "sku": line.sku or None,
        "price": line.price_rule_id,
        "unit": line.unit or None,
        "quantity": line.quantity,
        "first_day": line.first_day.isoformat(),
        "last_day": line.last_day.isoformat(),
        "key": line.key_id or None,
        "member": line.member_id or None,
        "adapter_version": line.adapter_version_id or None,
        "label": line.label or None,
        "amount_usd": usd_of_cents(line.cents),
        "exact_usd": usd_decimal(line.nano),
    }


def _profile_object(profile: BillingProfile) -> ProfileObject:
    return {
        "object": "billing.profile",
        "legal_name": profile.legal_name,
        "address": profile.address,
        "chargeback_label": profile.chargeback_label,
        "is_daily_report_wanted": profile.is_daily_report_wanted,
    }
