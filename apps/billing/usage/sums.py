"""Sums of spending, made in the database: by model, by job, by day, by key, member or label, and of a month.

Each is what the lines of `stream_spending` add up to: a price is rounded for each line, before the sum.
"""

import datetime
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from django.db import connection
from django.db.models import Case, CharField, Count, F, Func, Max, Q, Sum, Value, When
from django.db.models.functions import Cast, Coalesce, Concat, NullIf, TruncDate, TruncDay, TruncHour

from apps.accounts.models import ApiKey, Organization, default_project_id, key_of
from apps.billing.models import LineKind
from apps.billing.usage.labels import label_by_key
from apps.billing.usage.spending import RATED, WHOLE, charged_holds, kind_of, posted_rebates, used_series
from apps.billing.usage.traffic import Step
from apps.core.database.clock import begin_of_day

_FORECAST_DAYS = 7
_KEPT = F("captured_nano") - F("refunded_nano")
# The quantity that a hold's cost is the price of.
_BOUGHT = Func(
    Cast(_KEPT, WHOLE) * F("price_rule__per"),
    NullIf(Cast("price_rule__price_nano", WHOLE), Value(0), output_field=WHOLE),
    function="div",
    output_field=WHOLE,
)
_OF_TRAINING = Q(price_rule=None) | Q(price_rule__sku__startswith=f"{LineKind.TRAINING}:")
_OF_CONVERSIONS = Q(price_rule__sku__startswith=f"{LineKind.CONVERSION}:")
_INPUT, _OUTPUT = Q(sku__startswith="inference:input:"), Q(sku__startswith="inference:output:")


class Group(StrEnum):
    """What spending is grouped by: the key, who made the key or the job, the project, or the value of one label."""

    KEY = "key"
    MEMBER = "member"
    PROJECT = "project"
    LABEL = "label"


@dataclass(frozen=True, kw_only=True)
class SubjectUse:
    """The use of one model, or of storage. `cost_nano` includes usage that is not charged yet."""

    subject: str
    requests: int
    input_tokens: int
    output_tokens: int
    cost_nano: int


@dataclass(frozen=True, kw_only=True)
class DayUse:
    """The use of one model, or of several under "", on one day. `cost_nano` includes usage that is not charged yet."""

    day: datetime.date
    subject: str
    requests: int
    cost_nano: int


@dataclass(frozen=True, kw_only=True)
class DayCost:
    """What one LineKind cost on one day: less than nothing for a rebate."""

    day: datetime.date
    kind: str
    cost_nano: int


@dataclass(frozen=True, kw_only=True)
class JobSums:
    """How many jobs and conversions were charged, and what they cost."""

    jobs: int
    training_nano: int
    conversions: int
    conversion_nano: int


@dataclass(frozen=True, kw_only=True)
class JobCharges:
    """The charges for one job, made at pauses and at its end. `day` is that of the last one."""

    job_id: str
    day: datetime.date
    gpu_ms: int
    cost_nano: int


@dataclass(frozen=True, kw_only=True)
class GroupSums:
    """The nano spent in the largest groups, the largest first, and in the `others`, a number of groups, together."""

    largest: dict[str, int]
    others: int
    others_nano: int

    @property
    def total_nano(self) -> int:
        return sum(self.largest.values()) + self.others_nano


@dataclass(frozen=True)
class Forecast:
    """A calendar month: spent so far, and the expected total if the days to come cost the mean of the last seven."""

    month: datetime.date
    spent_nano: int
    expected_nano: int


def stream_uses(
    *, organization: Organization | str, first: datetime.date, last: datetime.date, most: int | None = None
) -> Iterator[SubjectUse]:
    """Yield the use of each model and of storage between these UTC days, both included, the `most` expensive first."""
    rows = used_series(key_of(organization), first, last).values_list("subject")
    sums = rows.annotate(
        requests=Sum("request_count", filter=_INPUT, default=0),
        input_tokens=Sum("quantity", filter=_INPUT, default=0),
        output_tokens=Sum("quantity", filter=_OUTPUT, default=0),
        cost_nano=Sum(RATED),
    )
    largest = sums.order_by("-cost_nano", "subject")[:most]
    for subject, requests, input_tokens, output_tokens, cost_nano in largest.iterator():
        yield SubjectUse(
            subject=subject,
            requests=int(requests),
            input_tokens=int(input_tokens),
            output_tokens=int(output_tokens),
            cost_nano=int(cost_nano),
        )


def sum_jobs(*, organization: Organization | str, first: datetime.date, last: datetime.date) -> JobSums:
    """Return the sums of the jobs and conversions that were charged between these UTC days, both included."""
    sums = charged_holds(key_of(organization), first, last).aggregate(
        jobs=Count("source", filter=_OF_TRAINING, distinct=True),
        training_nano=Sum(_KEPT, filter=_OF_TRAINING, default=0),
        conversions=Count("pk", filter=_OF_CONVERSIONS),
        conversion_nano=Sum(_KEPT, filter=_OF_CONVERSIONS, default=0),
    )
    return JobSums(**{name: int(value) for name, value in sums.items()})


def stream_job_charges(
    *, organization: Organization | str, first: datetime.date, last: datetime.date, most: int | None = None
) -> Iterator[JobCharges]:
    """Yield the charges for each job between these UTC days, both included, the last charged first, at most `most`."""
    rows = charged_holds(key_of(organization), first, last).filter(_OF_TRAINING).values_list("source")
    sums = rows.annotate(at=Max("closed_at"), gpu_ms=Sum(_BOUGHT, default=0), nano=Sum(_KEPT))
    for job_id, at, gpu_ms, nano in sums.order_by("-at", "source")[:most].iterator():
        day = at.astimezone(datetime.UTC).date()
        yield JobCharges(job_id=job_id, day=day, gpu_ms=int(gpu_ms), cost_nano=int(nano))


def sum_training(
    *, organization: Organization | str, first: datetime.date, last: datetime.date, step: Step
) -> dict[datetime.datetime, int]:
    """Return the nano charged for jobs by the begin of each UTC hour or day, without those that have none."""
    begin_of = TruncHour if step == "hour" else TruncDay
    rows = charged_holds(key_of(organization), first, last).filter(_OF_TRAINING)
    sums = rows.values_list(begin_of("closed_at", tzinfo=datetime.UTC)).annotate(nano=Sum(_KEPT)).order_by()
    return {at: int(nano) for at, nano in sums}


def sum_uses_by_day(
    *, organization: Organization | str, first: datetime.date, last: datetime.date, subjects: Sequence[str]
) -> list[DayUse]:
    """Return the use of each day for each of these subjects, and for all others under ""."""
    shown = Case(When(subject__in=subjects, then=F("subject")), default=Value(""))
    rows = used_series(key_of(organization), first, last).values_list("day", shown)
    sums = rows.annotate(requests=Sum("request_count", filter=_INPUT, default=0), nano=Sum(RATED)).order_by()
    return [
        DayUse(day=day, subject=subject, requests=int(requests), cost_nano=int(nano))
        for day, subject, requests, nano in sums
    ]


def sum_by_day(*, organization: Organization | str, first: datetime.date, last: datetime.date) -> list[DayCost]:
    """Return the nano spent on each of these UTC days, both included, for each LineKind.

    A rebate counts on the first day of its month, and so not in a period that begins later.
    """
    days = key_of(organization), first, last
    of_hold = Coalesce(kind_of("price_rule__sku"), Value(LineKind.TRAINING), output_field=CharField())
    closed = TruncDate("closed_at", tzinfo=datetime.UTC)
    rebates = posted_rebates(*days).filter(month__gte=first)
    sums = (
        *used_series(*days).values_list("day", kind_of("sku")).annotate(nano=Sum(RATED)).order_by(),
        *charged_holds(*days).values_list(closed, of_hold).annotate(nano=Sum(_KEPT)).order_by(),
        *rebates.values_list("month", Value(LineKind.REBATE)).annotate(nano=-Sum("posted_nano")).order_by(),
    )
    return sorted(
        (DayCost(day=day, kind=str(kind), cost_nano=int(nano)) for day, kind, nano in sums),
        key=lambda each: (each.day, each.kind),
    )


def sum_by_group(
    *,
    organization: Organization | str,
    first: datetime.date,
    last: datetime.date,
    group: Group,
    label: str = "",
    most: int,
) -> GroupSums:
    """Return the nano spent with each key, by each member, in each project, or under each value of the label `label`.

    The `most` largest are named. What has no key, member, project or label is under "", as rebates are.
    """
    organization_id = key_of(organization)
    keys = ApiKey.objects.filter(organization_id=organization_id)
    of_hold: Any = F(f"{group}_id")
    match group:
        case Group.KEY:
            of_keys = keys.values_list("pk", F("pk"))
        case Group.MEMBER:
            of_keys = keys.values_list("pk", "created_by_id")
        case Group.PROJECT:
            of_keys = keys.values_list("pk", "project_id")
            of_hold = Coalesce(NullIf("project_id", Value("")), Value(default_project_id(organization_id)))
        case Group.LABEL:
            of_keys = label_by_key(organization=organization_id, name=label)
            of_hold = Func(F("labels"), Value(label), function="jsonb_extract_path_text", output_field=CharField())
    by_key = used_series(organization_id, first, last).values_list("key_id").annotate(nano=Sum(RATED)).order_by()
    (used, used_params), (named, named_params) = by_key.query.sql_with_params(), of_keys.query.sql_with_params()
    unnamed = "used.key_id" if group is Group.KEY else "''"
    by_key_sql = f"""
        SELECT coalesce(named.name, {unnamed}), used.nano
          FROM ({used}) AS used (key_id, nano) LEFT JOIN ({named}) AS named (key_id, name) USING (key_id)
    """  # noqa: S608 - made by Django
    return _largest(
        (by_key_sql, (*used_params, *named_params)),
        charged_holds(organization_id, first, last).values_list(of_hold, _KEPT).query.sql_with_params(),
        posted_rebates(organization_id, first, last).values_list(Value(""), -F("posted_nano")).query.sql_with_params(),
        most=most,
    )


def sum_by_subject(
    *, organization: Organization | str, first: datetime.date, last: datetime.date, most: int
) -> GroupSums:
    """Return the nano spent for each model, job, conversion and for storage, without rebates.

    The `most` largest are named, each by its LineKind and its subject.
    """
    days = key_of(organization), first, last
    of_hold = Coalesce(kind_of("price_rule__sku"), Value(LineKind.TRAINING), output_field=CharField())
    parts = (
        (used_series(*days), Concat(kind_of("sku"), Value(" "), "subject", output_field=CharField()), RATED),
        (charged_holds(*days), Concat(of_hold, Value(" "), "source", output_field=CharField()), _KEPT),
    )
    return _largest(*(rows.values_list(name, nano).query.sql_with_params() for rows, name, nano in parts), most=most)


def _largest(*parts: tuple[str, tuple[Any, ...]], most: int) -> GroupSums:
    """Return the sums of statements that give names of groups and nano; a group may have several rows."""
    rows = " UNION ALL ".join(f"({sql})" for sql, _ in parts)
    statement = f"""
        SELECT coalesce(name, ''), sum(nano), count(*) OVER (), sum(sum(nano)) OVER ()
          FROM ({rows}) AS part (name, nano) GROUP BY 1 ORDER BY 2 DESC, 1 LIMIT %s
    """  # noqa: S608 - made by Django
    with connection.cursor() as cursor:
        cursor.execute(statement, [*(param for _, params in parts for param in params), most])
        found = cursor.fetchall()
    largest = {name: int(nano) for name, nano, _, _ in found}
    groups, total_nano = (found[0][2], int(found[0][3])) if found else (0, 0)
    others_nano = total_nano - sum(largest.values())
    return GroupSums(largest=largest, others=groups - len(largest), others_nano=others_nano)


def forecast_month(*, organization: Organization | str, now: datetime.datetime) -> Forecast:
    """Return the month's expected cost at the mean of the last seven days, today so far included."""
    organization_id = key_of(organization)
    today = now.astimezone(datetime.UTC).date()
    month = today.replace(day=1)
    week = today - datetime.timedelta(days=_FORECAST_DAYS - 1)
    first = min(month, week)
    series = used_series(organization_id, first, today).aggregate(
        spent=Sum(RATED, filter=Q(day__gte=month), default=0),
        recent=Sum(RATED, filter=Q(day__gte=week), default=0),
    )
    holds = charged_holds(organization_id, first, today).aggregate(
        spent=Sum(_KEPT, filter=Q(closed_at__gte=begin_of_day(month)), default=0),
        recent=Sum(_KEPT, filter=Q(closed_at__gte=begin_of_day(week)), default=0),
    )
    rebates = posted_rebates(organization_id, month, today).aggregate(nano=Sum("posted_nano", default=0))
    spent = int(series["spent"]) + int(holds["spent"]) - int(rebates["nano"])
    recent = int(series["recent"]) + int(holds["recent"])
    next_month = (month + datetime.timedelta(days=32)).replace(day=1)
    to_come = (next_month - today).days - 1
    return Forecast(month, spent, spent + recent * to_come // _FORECAST_DAYS)
