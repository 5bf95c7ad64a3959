"""The usage page and its CSVs: spending over time, by model, by job and by group, and every movement of money."""

import datetime
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import render
from django.urls import reverse
from django.utils.formats import date_format
from django.utils.translation import gettext
from django.views.decorators.http import require_safe

from apps.accounts.members.projects import names_of_projects
from apps.accounts.models import Organization
from apps.accounts.queries import names_of_creators, names_of_keys
from apps.accounts.roles import Permission
from apps.billing.budgets import list_budgets
from apps.billing.invoices.files import csv_usd
from apps.billing.invoices.profiles import get_profile
from apps.billing.models import AccountKind, BudgetScope, LedgerTransaction, PostingKind
from apps.billing.queries import get_balance, list_transactions, own_amounts, sources_of_holds
from apps.billing.usage.spending import Spend, stream_spending
from apps.billing.usage.storage import STORED
from apps.billing.usage.sums import (
    DayUse,
    Group,
    JobCharges,
    forecast_month,
    stream_job_charges,
    stream_uses,
    sum_by_group,
    sum_jobs,
    sum_training,
    sum_uses_by_day,
)
from apps.billing.usage.traffic import list_hourly_costs
from apps.core.database.clock import db_now
from apps.core.database.keyset import read_page
from apps.core.database.read_times import counted_read
from apps.core.messages.translation import later
from apps.core.objects.downloads import download_csv
from apps.finetuning.models import FineTuningJob
from apps.finetuning.queries import list_jobs
from apps.interfaces.web.billing.periods import Period, period_of
from apps.interfaces.web.charts import day_charts
from apps.interfaces.web.jobs.views import title_of
from apps.interfaces.web.shell.access import OrganizationRequest, organization_view

PRESETS = {7: later("7 days"), 30: later("30 days"), 90: later("90 days")}
_MOST_DAYS = 366
_MOST_EXPORTED = 10_000
TRAINING = later("Training")
_SERIES_SHOWN = 5  # more colours are hard to distinguish; the remaining models share one series
_OTHER = later("Other models")
_PAGE = 20
_JOBS_SHOWN = 10
Row = TypeVar("Row")

_READ_AT_ONCE = 500
_SHOWN = 50  # of models, and of keys, members, projects or labels
_GROUPS = {
    Group.KEY: later("Key"),
    Group.MEMBER: later("Member"),
    Group.PROJECT: later("Project"),
    Group.LABEL: later("Label"),
}
_GROUP_WORDS = {
    Group.KEY: later("key"),
    Group.MEMBER: later("member"),
    Group.PROJECT: later("project"),
    Group.LABEL: later("label"),
}
# The columns of each table as CSV.
_HEADERS: dict[str, tuple[str, ...]] = {
    "lines": (
        "day", "kind", "subject", "sku", "unit", "quantity", "requests", "key", "member", "adapter_version", "labels",
        "price_version", "cost_usd",
    ),
    "models": ("model", "requests", "input_tokens", "output_tokens", "cost_usd"),
    "jobs": ("job", "name", "status", "day", "gpu_seconds", "cost_usd"),
    "ledger": ("at", "what", "for", "balance_usd", "held_usd"),
    **{group: (group, "cost_usd") for group in _GROUPS},
}  # fmt: skip
_HOUR = datetime.timedelta(hours=1)
# Reasons of movements between the wallet and the slices held for requests: apps/billing/usage/slices.py.
_REASONS_OF_SLICES: dict[tuple[str, str], str] = {
    (PostingKind.HOLD, ""): later("requests in progress"),
    (PostingKind.SETTLE, later("slice returned")): later("requests, the unused part"),
    (PostingKind.SETTLE, later("slice expired")): later("requests, the unused part"),
}


@dataclass(frozen=True)
class JobUse:
    """The ledger's charges for one job in the period."""

    job: FineTuningJob
    title: str
    day: datetime.date
    billed_seconds: float
    cost_nano: int


@dataclass(frozen=True)
class Movement:
    """One ledger transaction as the organization sees it."""

    at: datetime.datetime
    words: str
    reason: str
    url: str  # of the job, or of the page that explains the charge
    wallet_nano: int
    held_nano: int


@require_safe
@organization_view(Permission.VIEW)
def show(request: OrganizationRequest) -> HttpResponse:
    now = db_now()
    group = _group(request)
    period = _period(request, now)
    organization, days = request.organization, {"first": period.first, "last": period.last}
    uses = stream_uses(organization=organization, **days, most=_SHOWN + 2)  # one of them may be storage
    models = [use for use in uses if use.subject != STORED]
    drawn = [use.subject for use in models[:_SERIES_SHOWN]]
    used = sum_uses_by_day(organization=organization, **days, subjects=[*drawn, STORED])
    storage_nano = sum(each.cost_nano for each in used if each.subject == STORED)
    charged = sum_jobs(organization=organization, **days)
    jobs = _by_job(organization, list(stream_job_charges(organization=organization, **days, most=_JOBS_SHOWN)))
    grouped = _grouped(organization, group, period, most=_SHOWN)
    with counted_read():
        transactions = _transactions(organization, period)
        page = read_page(transactions, request.GET, order=("-created_at", "-id"), size=_PAGE)
    forecast = forecast_month(organization=organization, now=now)
    budget = list_budgets(organization=organization).filter(scope=BudgetScope.ORGANIZATION).first()
    by = group if "by" in request.GET else ""
    exports = {table: f"{reverse('web:usage_export')}?{period.query(table=table)}" for table in _HEADERS}
    context = {
        "tabs": usage_tabs("usage", period),
        "period": period,
        "by": by,
        "exports": exports,
        "forecast": forecast,
        "budget": budget,
        "forecast_share": min(100, forecast.expected_nano * 100 // budget.limit_nano) if budget else 0,
        "balance": get_balance(organization=organization),
        "charged": charged,
        "inference_nano": sum(each.cost_nano for each in used) - storage_nano,
        "storage_nano": storage_nano,
        "requests": sum(each.requests for each in used),
        "models": [(model_label(model.subject), model) for model in models[:_SHOWN]],
        "has_more_models": len(models) > _SHOWN,
        "jobs": jobs,
        "plot": _plot(organization, period, used, drawn, has_others=len(models) > _SERIES_SHOWN),
        "groups": [(f"?{period.query(by=name)}#by", title, name == group) for name, title in _GROUPS.items()],
        "group": _GROUPS[group],
        "group_word": _GROUP_WORDS[group],
        "group_export_url": exports[group],
        "grouped": grouped,
        "has_more_groups": len(grouped) > _SHOWN,
        "movements": _movements(organization, page.rows),
        "previous": f"?{period.query(by=by, **page.previous)}#ledger" if page.has_previous else "",
        "next": f"?{period.query(by=by, **page.next)}#ledger" if page.has_next else "",
    }
    return render(request, "billing/usage.html", context)


@require_safe
@organization_view(Permission.VIEW)
def export(request: OrganizationRequest) -> HttpResponseBase:
    """Send a table of the page as CSV, or without `table` a line for each day, model, key and price, and each job."""
    asked = request.GET.get("table", "")
    table = asked if asked in _HEADERS else "lines"
    period = _period(request, db_now())
    rows = _csv_rows(request.organization, table, period)
    name = f"usage-{request.organization.slug}-{period.first}-{period.last}.csv"
    if table != "lines":
        name = f"{table}-{name}"
    return download_csv(request, _HEADERS[table], rows, filename=name)


def usage_tabs(current: str, period: Period) -> list[dict[str, object]]:
    """Return the tabs of the usage pages, which keep the period."""
    pages = (
        ("usage", gettext("Spending"), reverse("web:usage")),
        ("traffic", gettext("Traffic"), reverse("web:usage_traffic")),
    )
    return [
        {"label": label, "url": f"{url}?{period.query()}", "current": name == current} for name, label, url in pages
    ]


def model_label(model_name: str) -> str:
    """Return a short name: the suffix of `ft:<base>:<organization>:<suffix>:<id>`, or its id if it has no suffix."""
    parts = model_name.split(":")
    return (parts[3] or parts[4]) if len(parts) == 5 else model_name


def _period(request: OrganizationRequest, now: datetime.datetime) -> Period:
    by = _group(request) if "by" in request.GET else ""
    return period_of(request.GET, now=now, presets=PRESETS, most_days=_MOST_DAYS, by=by)


def _group(request: HttpRequest) -> Group:
    asked = request.GET.get("by", "")
    return Group(asked) if asked in tuple(Group) else Group.KEY


def _grouped(organization: Organization, group: Group, period: Period, *, most: int) -> list[tuple[str, int]]:
    """Return the cost of each key, member, project or label in the period, highest first.

    The last row is that of all but the `most` expensive, so that the rows add up.
    """
    label = get_profile(organization=organization).chargeback_label if group is Group.LABEL else ""
    sums = sum_by_group(
        organization=organization, first=period.first, last=period.last, group=group, label=label, most=most
    )
    ids = list(sums.largest)
    if group is Group.LABEL:
        names = {value: f"{label}={value}" for value in ids if value}
    elif group is Group.PROJECT:
        names = names_of_projects(organization=organization, ids=ids)
    else:
        names = names_of_keys(organization=organization, ids=ids) | names_of_creators(organization=organization)
    without = gettext("without %(name)s") % {"name": label or _GROUP_WORDS[group]}
    rows = [(names.get(found, found) or without, nano) for found, nano in sums.largest.items()]
    if sums.others:
        rows.append((gettext("Everything else (%(count)s)") % {"count": f"{sums.others:,}"}, sums.others_nano))
    return rows


def _by_job(organization: Organization, charges: Sequence[JobCharges]) -> list[JobUse]:
    """Return the charges with their jobs."""
    jobs = list_jobs(organization=organization).in_bulk([charge.job_id for charge in charges])
    return [
        JobUse(jobs[each.job_id], title_of(jobs[each.job_id]), each.day, each.gpu_ms / 1000, each.cost_nano)
        for each in charges
        if each.job_id in jobs
    ]


def _plot(
    organization: Organization, period: Period, used: Sequence[DayUse], drawn: Sequence[str], *, has_others: bool
) -> day_charts.Days:
    """Return the chart of the spending by day, or by hour. Only jobs and requests are counted by hour."""
    shown = {subject: model_label(subject) for subject in drawn}
    days = {"first": period.first, "last": period.last}
    amounts: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    form, length = (gettext("j M H:i"), _HOUR) if period.step == "hour" else (gettext("j M"), 24 * _HOUR)
    for at, nano in sum_training(organization=organization, **days, step=period.step).items():
        amounts[date_format(at, form)][TRAINING] += nano
    parts: Iterable[tuple[datetime.date, str, int]]
    if period.step == "hour":
        parts = list_hourly_costs(
            organization=organization, since=period.since, until=period.until, model_names=list(shown)
        )
    else:
        if any(each.subject == STORED and each.cost_nano for each in used):
            shown[STORED] = STORED
        parts = [(each.day, each.subject, each.cost_nano) for each in used]
    for begin, subject, nano in parts:
        amounts[date_format(begin, form)][shown.get(subject, _OTHER)] += nano
    begins = [period.since + length * number for number in range((period.until - period.since) // length)]
    names = [TRAINING, *dict.fromkeys(shown.values()), *([_OTHER] if has_others else [])]
    return day_charts.stacked_days(
        [(words, dict(amounts[words])) for words in (date_format(begin, form) for begin in begins)], series=names
    )


def _movements(organization: Organization, listed: Sequence[LedgerTransaction]) -> list[Movement]:
    holds = sources_of_holds(organization=organization, ids=[posted.source for posted in listed])
    return [_movement(posted, holds.get(posted.source, posted.source)) for posted in listed]


def _movement(posted: LedgerTransaction, source: str) -> Movement:
    moved = own_amounts(posted)
    is_job = source.startswith("ftjob-")
    url = reverse("web:job_detail", args=[source]) if is_job else ""
    if posted.kind == PostingKind.SETTLE and (is_job or source.startswith("conv_")):
        url = reverse("web:charge_why", args=[posted.idempotency_key.removeprefix("settle:")])
    if posted.kind == PostingKind.USAGE:
        url = reverse("web:charge_why", args=[f"series-{source.removeprefix('usage:')}"])
    return Movement(
        at=posted.created_at,
        words=gettext(posted.get_kind_display()),
        reason=source if is_job else _reason(posted),
        url=url,
        wallet_nano=moved[AccountKind.WALLET],
        held_nano=moved[AccountKind.HOLD],
    )


def _reason(posted: LedgerTransaction) -> str:
    """Return the reason of a movement. For a charge for usage, it names the quantity and the model."""
    if words := _REASONS_OF_SLICES.get((posted.kind, posted.reason)):
        return words
    sku, _, subject = posted.reason.partition(" ")
    if posted.kind != PostingKind.USAGE or not subject:
        return posted.reason
    if subject == STORED:
        return STORED
    if sku.startswith("warm:"):
        return gettext("%(subject)s, kept warm") % {"subject": model_label(subject)}
    return (gettext("%(model)s, output tokens") if ":output:" in sku else gettext("%(model)s, input tokens")) % {
        "model": model_label(subject)
    }


def _transactions(organization: Organization, period: Period) -> QuerySet[LedgerTransaction]:
    posted = list_transactions(organization=organization)
    return posted.filter(created_at__gte=period.since, created_at__lt=period.until)


def _csv_rows(organization: Organization, table: str, period: Period) -> Iterable[tuple[object, ...]]:
    days = {"first": period.first, "last": period.last}
    if table == "models":
        return (
            (use.subject, use.requests, use.input_tokens, use.output_tokens, csv_usd(use.cost_nano))
            for use in stream_uses(organization=organization, first=period.first, last=period.last)
            if use.subject != STORED
        )
    if table == "ledger":
        posted = _transactions(organization, period)
        return (
            (each.at.isoformat(), each.words, each.reason, csv_usd(each.wallet_nano), csv_usd(each.held_nano))
            for part in _parts(posted.iterator(chunk_size=_READ_AT_ONCE))
            for each in _movements(organization, part)
        )
    if table == "jobs":
        charges = stream_job_charges(organization=organization, first=period.first, last=period.last)
        return (
            (use.job.pk, use.title, use.job.status, use.day, use.billed_seconds, csv_usd(use.cost_nano))
            for part in _parts(charges)
            for use in _by_job(organization, part)
        )
    if table in _GROUPS:
        grouped = _grouped(organization, Group(table), period, most=_MOST_EXPORTED)
        return [(name, csv_usd(nano)) for name, nano in grouped]
    return map(_csv_line, stream_spending(organization=organization, **days))


def _parts(rows: Iterator[Row]) -> Iterator[list[Row]]:
    return iter(lambda: list(islice(rows, _READ_AT_ONCE)), [])


def _csv_line(line: Spend) -> tuple[object, ...]:
    labels = ";".join(f"{name}={value}" for name, value in sorted(line.labels.items()))
    return (
        line.day.isoformat(), line.kind, line.subject, line.sku, line.unit, line.quantity, line.requests,
        line.key_id, line.member_id, line.adapter_version_id, labels, line.price_rule_id,
        csv_usd(line.cost_nano),
    )  # fmt: skip
