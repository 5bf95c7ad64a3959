"""Outbox handlers that mail about money: budgets, invoices, low balances, reports. Each message is sent once."""

import datetime
from collections.abc import Collection

from django.db import transaction
from django.db.models import Exists, OuterRef
from django.utils.functional import lazy

from apps.accounts.models import Membership, Organization
from apps.accounts.notices.notifications import MANAGERS, PAYERS
from apps.billing.books.low_balance import DAYS
from apps.billing.budgets import describe
from apps.billing.models import BillingProfile, BudgetAlert, Invoice
from apps.billing.queries import get_balance
from apps.billing.usage.spending import charged_holds, used_series
from apps.billing.usage.sums import forecast_month, sum_by_subject
from apps.core.database.clock import db_now
from apps.core.messages import outbox
from apps.core.messages.mail import render_mail, send_mail
from apps.core.money import NANO_PER_CENT

_REPORT_HOUR = 6  # UTC; most records of the day before arrived long ago
_LARGEST_SHOWN = 10


def send_alert(*, alert_id: str) -> None:
    """Mail owners and admins that a budget reached a threshold."""
    alert = BudgetAlert.objects.select_related("budget", "organization").get(pk=alert_id)
    _send(
        "budget_alert",
        alert.organization,
        wanted="budget",
        alert=alert,
        budget=alert.budget,
        of=lazy(describe, str)(alert.budget),
        is_over=alert.spent_nano >= alert.budget.limit_nano,
    )


def send_invoice(*, invoice_id: str) -> None:
    """Mail owners that an invoice is issued."""
    invoice = Invoice.objects.select_related("organization").get(pk=invoice_id)
    total_nano = invoice.total_cents * NANO_PER_CENT
    _send(
        "invoice_issued", invoice.organization, roles=PAYERS, wanted="invoice", invoice=invoice, total_nano=total_nano
    )


def send_low_balance(*, organization_id: str, spent_nano: int) -> None:
    """Mail owners and admins the balance and what was spent in the last days."""
    organization = Organization.objects.get(pk=organization_id)
    balance = get_balance(organization=organization)
    _send("low_balance", organization, wanted="balance", balance=balance, spent_nano=spent_nano, days=DAYS)


def publish_reports(*, now: datetime.datetime) -> int:
    """Queue yesterday's report for each organization with spending that wants it; return how many were queued."""
    if now.astimezone(datetime.UTC).hour < _REPORT_HOUR:
        return 0
    day = now.astimezone(datetime.UTC).date() - datetime.timedelta(days=1)
    unwanted = BillingProfile.objects.filter(is_daily_report_wanted=False).values("organization_id")
    days = OuterRef("pk"), day, day
    charged = Organization.objects.filter(Exists(used_series(*days)) | Exists(charged_holds(*days)))
    reported = list(charged.exclude(pk__in=unwanted).order_by("pk").values_list("pk", flat=True))
    for organization_id in reported:
        with transaction.atomic():
            outbox.publish(
                topic="billing.report",
                key=f"report:{organization_id}:{day}",
                payload={"organization_id": organization_id, "day": day.isoformat()},
            )
    return len(reported)


def send_report(*, organization_id: str, day: str) -> None:
    """Mail owners and admins the cost of a day (YYYY-MM-DD) and the forecast of the month."""
    organization = Organization.objects.get(pk=organization_id)
    date = datetime.date.fromisoformat(day)
    sums = sum_by_subject(organization=organization, first=date, last=date, most=_LARGEST_SHOWN)
    _send(
        "daily_report",
        organization,
        day=date,
        total_nano=sums.total_nano,
        largest=list(sums.largest.items()),
        others=sums.others,
        forecast=forecast_month(organization=organization, now=db_now()),
        balance=get_balance(organization=organization),
    )


def _send(
    template: str,
    organization: Organization,
    *,
    roles: Collection[str] = MANAGERS,
    wanted: str = "",
    **context: object,
) -> None:
    """Mail the members with these roles. `wanted` names the setting with which a person turns such mails off."""
    readers = Membership.objects.people().filter(organization=organization, role__in=roles, user__is_active=True)
    if wanted:
        readers = readers.filter(**{f"user__wants_{wanted}_mail": True})
    addresses: dict[str, list[str]] = {}
    for address, language in readers.order_by("user__email").values_list("user__email", "user__language"):
        addresses.setdefault(language, []).append(address)
    for language, to in addresses.items():
        send_mail(render_mail(template, to=to, language=language, organization=organization, **context))
