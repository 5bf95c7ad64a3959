"""The traffic page and its CSV: requests over time, their outcomes and latencies, for one model or all."""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass

from django.http import HttpResponse, HttpResponseBase
from django.shortcuts import render
from django.urls import reverse
from django.utils.formats import date_format
from django.utils.translation import gettext
from django.views.decorators.http import require_safe

from apps.accounts.roles import Permission
from apps.billing.usage.traffic import KEPT_DAYS, TrafficSum, list_traffic, list_traffic_of_models, total_of
from apps.core.database.clock import db_now
from apps.core.messages.translation import later
from apps.core.money import usd_decimal
from apps.core.objects.downloads import download_csv
from apps.interfaces.web.billing.periods import Period, period_of
from apps.interfaces.web.billing.usage import model_label, usage_tabs
from apps.interfaces.web.charts.day_charts import Days, stacked_days
from apps.interfaces.web.charts.latency_charts import latency_chart
from apps.interfaces.web.shell.access import OrganizationRequest, organization_view

PRESETS = {1: later("24 hours"), 7: later("7 days"), 30: later("30 days"), 90: later("90 days")}
_MODEL_LENGTH = 200
_CSV_HEADER = (
    "begin", "model", "requests", "left_by_client", "rate_limited", "no_credit_or_budget", "model_not_found",
    "other_4xx", "failed_5xx", "input_tokens", "cached_input_tokens", "output_tokens", "cost_usd",
    "first_token_p50_ms", "first_token_p95_ms", "latency_p50_ms", "latency_p95_ms",
)  # fmt: skip


@dataclass(frozen=True)
class Ending:
    """The number of requests with one outcome."""

    label: str
    note: str
    count: int
    share: float


@require_safe
@organization_view(Permission.VIEW)
def show(request: OrganizationRequest) -> HttpResponse:
    model, period = _asked(request)
    parts = _parts(request, model, period)
    models = list_traffic_of_models(organization=request.organization, since=period.since, until=period.until)
    total = total_of(parts)
    names = {each.model_name for each in models if each.model_name} | ({model} - {""})
    context = {
        "tabs": usage_tabs("traffic", period),
        "period": period,
        "model": model,
        "models": [(name, model_label(name)) for name in sorted(names)],
        "total": total,
        "endings": _endings(total),
        "rows": [each for each in reversed(parts) if each.requests],
        "model_rows": [] if model else [(model_label(each.model_name), each) for each in models],
        "requests": _request_plot(parts, period),
        "latencies": [
            (
                gettext("Time to the first token"),
                latency_chart(_times(parts, period), [each.first_token_ms for each in parts]),
            ),
            (
                gettext("Time to the whole answer"),
                latency_chart(_times(parts, period), [each.latency_ms for each in parts]),
            ),
        ],
        "kept_days": KEPT_DAYS,
        "export_url": f"{reverse('web:usage_traffic_export')}?{period.query(model=model)}",
        "models_export_url": f"{reverse('web:usage_traffic_export')}?{period.query(by='model')}",
    }
    return render(request, "billing/traffic.html", context)


@require_safe
@organization_view(Permission.VIEW)
def export(request: OrganizationRequest) -> HttpResponseBase:
    """Send the traffic as CSV: a line for each hour or day, or with `by=model` for each model."""
    model, period = _asked(request)
    if request.GET.get("by") == "model":
        parts = list_traffic_of_models(organization=request.organization, since=period.since, until=period.until)
    else:
        parts = _parts(request, model, period)
    rows = [_csv_row(each, each.model_name or model) for each in parts]
    name = f"traffic-{request.organization.slug}-{period.first}-{period.last}.csv"
    return download_csv(request, _CSV_HEADER, rows, filename=name)


def _asked(request: OrganizationRequest) -> tuple[str, Period]:
    model = request.GET.get("model", "").replace("\x00", "")[:_MODEL_LENGTH]
    return model, period_of(request.GET, now=db_now(), presets=PRESETS, most_days=KEPT_DAYS, model=model)


def _parts(request: OrganizationRequest, model: str, period: Period) -> list[TrafficSum]:
    return list_traffic(
        organization=request.organization,
        since=period.since,
        until=period.until,
        step=period.step,
        model_name=model,
    )


def _times(parts: Sequence[TrafficSum], period: Period) -> list[str]:
    is_one_day = period.until - period.since <= datetime.timedelta(days=1)
    form = gettext("j M") if period.step == "day" else "H:i" if is_one_day else gettext("j M H:i")
    return [date_format(each.at, form) for each in parts if each.at]


def _request_plot(parts: Sequence[TrafficSum], period: Period) -> Days:
    series = [gettext("Answered"), gettext("Left by client"), gettext("Refused"), gettext("Failed")]
    counts = [
        dict(zip(series, (each.answered, each.aborted, each.refused, each.failed), strict=True)) for each in parts
    ]
    return stacked_days(list(zip(_times(parts, period), counts, strict=True)), series=series, is_money=False)


def _endings(total: TrafficSum) -> list[Ending]:
    counts = (
        (gettext("Answered"), "", total.answered),
        (
            gettext("Left by the client"),
            gettext("before the end of the answer; what was written is charged"),
            total.aborted,
        ),
        (gettext("Rate limit"), "429", total.rate_limited),
        (gettext("No credit, or a budget reached"), "429", total.over_quota),
        (gettext("Unknown model"), "404", total.not_found),
        (gettext("Other invalid requests"), gettext("400 to 422"), total.invalid),
        (gettext("Failed"), gettext("500 and 503: not charged"), total.failed),
    )
    return [Ending(label, note, count, count / (total.requests or 1)) for label, note, count in counts]


def _csv_row(part: TrafficSum, model: str) -> tuple[object, ...]:
    return (
        part.at.isoformat() if part.at else "", model, part.requests, part.aborted, part.rate_limited,
        part.over_quota, part.not_found, part.invalid, part.failed, part.input_tokens, part.cached_input_tokens,
        part.output_tokens, usd_decimal(part.cost_nano),
        *("" if each is None else each for each in (*part.first_token_ms, *part.latency_ms)),
    )  # fmt: skip
