"""Objects of a tenant that are about money."""

import datetime

from apps.billing.books.adjustments import request_adjustment
from apps.billing.books.credit_requests import request_credit
from apps.billing.budget_settings import set_budget
from apps.billing.invoices.statements import close_month
from apps.billing.models import InvoiceLine
from apps.billing.operations import hold, settle_hold
from apps.catalog.models import PriceRequest
from apps.core.database.clock import db_now
from apps.finetuning.usage.allowances import set_allowance
from apps.payments.models import CardRefund, HostedPage, StripeCustomer, TopUp
from tests.guards.makers.tenants import Tenant


def topup(tenant: Tenant) -> str:
    topup = TopUp.objects.create(
        organization=tenant.organization, origin="user", amount_cents=5000, requested_by=tenant.owner.pk,
        status="open", checkout_id=f"cs_{tenant.canary}",
    )  # fmt: skip
    StripeCustomer.objects.create(organization=tenant.organization, stripe_id=f"cus_{tenant.canary}")
    return topup.pk


def hosted_page(tenant: Tenant) -> str:
    page = HostedPage.objects.create(
        organization=tenant.organization, kind="topup", topup_id=tenant.ids["topup"], requested_by=tenant.owner.pk
    )
    return page.pk


def budget(tenant: Tenant) -> str:
    return set_budget(
        organization=tenant.organization,
        scope="label",
        target=f"team={tenant.canary}",
        limit_nano=10**12,
        mode="alert",
        by=tenant.owner.pk,
        now=db_now(),
    ).pk


def allowance(tenant: Tenant) -> str:
    return set_allowance(
        organization=tenant.organization,
        scope="label",
        target=f"team={tenant.canary}",
        limits={"queued_jobs": 2},
        by=tenant.owner.pk,
        now=db_now(),
    ).pk


def invoice(tenant: Tenant) -> str:
    held = hold(
        organization=tenant.organization,
        purpose="job",
        source=f"ftjob-{tenant.canary}",
        amount_nano=10**7,
        by="system",
        idempotency_key=f"hold:{tenant.canary}",
    )
    settle_hold(hold_id=held.pk, capture_nano=10**7, by="system")
    after = db_now() + datetime.timedelta(days=32)
    invoice = close_month(organization=tenant.organization, month=after.date().replace(day=1))
    assert invoice is not None
    return invoice.pk


def invoice_line(tenant: Tenant) -> str:
    return InvoiceLine.objects.get(invoice_id=tenant.ids["invoice"]).pk


def adjustment(tenant: Tenant) -> str:
    return request_adjustment(
        organization=tenant.organization, amount_nano=10**12, reason=tenant.canary, by="user_other", now=db_now()
    ).pk


def credit_request(tenant: Tenant) -> str:
    return request_credit(organization=tenant.organization, amount_nano=10**9, note=tenant.canary, by=tenant.owner).pk


def card_refund(tenant: Tenant) -> str:
    return CardRefund.objects.create(
        organization=tenant.organization, topup_id=tenant.ids["topup"], credit_cents=20_000, reason=tenant.canary,
        status="waiting", needs_approval=True, requested_by="user_other",
    ).pk  # fmt: skip


def price_request(tenant: Tenant) -> str:
    return PriceRequest.objects.create(
        organization=tenant.organization, sku="storage:bytes", price_nano=1, per=1, requested_by="user_other"
    ).pk
