"""Traffic: the requests of each hour, how they ended and how long they took, kept for 90 days.

Recording a batch of usage counts its new requests in the same statement, so a batch that arrives twice counts once.
Latencies are counts in fixed buckets: counts add up over any period, percentiles do not.
"""

import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from django.db.models import Case, F, QuerySet, Sum, Value, When
from django.db.models.functions import TruncDay, TruncHour

from apps.accounts.models import ApiKey, Organization
from apps.billing.models import TrafficHour
from apps.core.errors import DomainError, QuotaExceeded, Status

KEPT_DAYS = 90
# Upper bounds of the buckets in milliseconds: 10 ms, then ten for each factor of ten. The last bucket has no bound.
# A change needs a migration, because a TrafficHour has a count for each bucket.
BOUNDS_MS = tuple(round(10 ** (step / 10)) for step in range(10, 59))
_BUCKETS = range(len(BOUNDS_MS) + 1)
_HOUR = datetime.timedelta(hours=1)
Step = Literal["hour", "day"]


class Refusal(StrEnum):
    """How a request without a whole answer ended, as a usage record's `finish`."""

    RATE_LIMIT = "rate_limit"
    QUOTA = "quota"
    NOT_FOUND = "not_found"
    INVALID = "invalid"  # another 4xx
    ERROR = "error"  # 5xx


def refusal_of(error: DomainError) -> Refusal:
    """Return the class under which a request that got this error counts."""
    if isinstance(error, QuotaExceeded):
        return Refusal.QUOTA
    match error.status:
        case Status.TOO_MANY:
            return Refusal.RATE_LIMIT
        case Status.NOT_FOUND:
            return Refusal.NOT_FOUND
        case Status.UNAVAILABLE:
            return Refusal.ERROR
        case _:
            return Refusal.INVALID


# --- Counting ---------------------------------------------------------------------------------------------------------

_ENDS = {
    "aborted": "finish = 'aborted'",
    "rate_limited": f"finish = '{Refusal.RATE_LIMIT}'",
    "over_quota": f"finish = '{Refusal.QUOTA}'",
    "not_found": f"finish = '{Refusal.NOT_FOUND}'",
    "invalid": f"finish = '{Refusal.INVALID}'",
    "failed": f"finish IN ('{Refusal.ERROR}', 'lost')",
}
_TOKENS = ("input_tokens", "cached_input_tokens", "output_tokens")
_SUMS = ("requests", *_ENDS, *_TOKENS, "cost_nano")
_HISTOGRAMS = ("first_token_counts", "latency_counts")
_KEY = "organization_id, model_name, adapter_version_id, hour_at, key_id"


def _bucket_counts(bucket: str) -> str:
    return "ARRAY[" + ", ".join(f"count(*) FILTER (WHERE {bucket} = {number})" for number in _BUCKETS) + "]::integer[]"


_COUNTS_OF_ENDS = ", ".join(f"coalesce(sum(request_count) FILTER (WHERE {end}), 0)" for end in _ENDS.values())
_BOUNDS = f"ARRAY{list(BOUNDS_MS)}"
_ADD = ", ".join(f"{name} = before.{name} + excluded.{name}" for name in _SUMS)
_ADD_HISTOGRAMS = ", ".join(
    f"{name} = ARRAY(SELECT one + more FROM unnest(before.{name}, excluded.{name})"  # noqa: S608
    " WITH ORDINALITY AS pair(one, more, place) ORDER BY place)"
    for name in _HISTOGRAMS
)
# Two expressions of record_usage's statement. They read `fresh`, the events that it inserts. All parts are constants.
COUNT_TRAFFIC = f"""
    ended AS (
        SELECT fresh.*, date_trunc('hour', occurred_at, 'UTC') AS hour_at,
               width_bucket(first_token_ms, {_BOUNDS}) AS first_token_bucket,
               CASE WHEN NOT ({" OR ".join(_ENDS.values())}) THEN width_bucket(latency_ms, {_BOUNDS}) END
                 AS latency_bucket,
               coalesce(input_tokens::numeric * read.price_nano / read.per, 0)
                 + coalesce(output_tokens::numeric * wrote.price_nano / wrote.per, 0) AS cost_nano
          FROM fresh
          LEFT JOIN catalog_pricerule AS read ON read.id = input_price_id
          LEFT JOIN catalog_pricerule AS wrote ON wrote.id = output_price_id
    ), counted AS (
        INSERT INTO billing_traffichour AS before ({_KEY}, {", ".join(_SUMS)}, {", ".join(_HISTOGRAMS)})
        SELECT {_KEY}, sum(request_count), {_COUNTS_OF_ENDS}, {", ".join(f"sum({name})" for name in _TOKENS)},
               round(sum(cost_nano)), {_bucket_counts("first_token_bucket")}, {_bucket_counts("latency_bucket")}
          FROM ended
         GROUP BY {_KEY}
         ORDER BY {_KEY}
        ON CONFLICT ({_KEY}) DO UPDATE SET {_ADD}, {_ADD_HISTOGRAMS}
    )
"""  # noqa: S608


def prune_traffic(*, now: datetime.datetime) -> int:
    """Delete the hours that ended more than KEPT_DAYS days ago; return how many rows they had."""
    return TrafficHour.objects.filter(hour_at__lt=now - datetime.timedelta(days=KEPT_DAYS)).delete()[0]


# --- Reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TrafficSum:
    """The requests of one hour or day, or of one model. `cost_nano` includes usage that is not charged yet."""

    at: datetime.datetime | None = None
    model_name: str = ""
    requests: int = 0
    aborted: int = 0
    rate_limited: int = 0
    over_quota: int = 0
    not_found: int = 0
    invalid: int = 0
    failed: int = 0
    input_tokens: int = 0
    cached_input_tokens: int = 0
    output_tokens: int = 0
    cost_nano: int = 0
    first_token_counts: Sequence[int] = ()
    latency_counts: Sequence[int] = ()

    @property
    def answered(self) -> int:
        """Return the requests that got a whole answer."""
        return self.requests - self.aborted - self.refused - self.failed

    @property
    def refused(self) -> int:
        """Return the requests with a 4xx status."""
        return self.rate_limited + self.over_quota + self.not_found + self.invalid

    @property
    def first_token_ms(self) -> tuple[int | None, int | None]:
        """Return the median and the 95th percentile of the time to the first token; None without an answer."""
        return percentile_ms(self.first_token_counts, 0.5), percentile_ms(self.first_token_counts, 0.95)

    @property
    def latency_ms(self) -> tuple[int | None, int | None]:
        """Return the median and the 95th percentile of the time to the end of whole answers; None without any."""
        return percentile_ms(self.latency_counts, 0.5), percentile_ms(self.latency_counts, 0.95)


def list_traffic(
    *,
    organization: Organization | str,
    since: datetime.datetime,
    until: datetime.datetime,
    step: Step,
    model_name: str = "",
) -> list[TrafficSum]:
    """Return the traffic of each UTC hour or day from `since` until before `until`, those without requests included.

    `since` begins an hour or day.
    """
    rows = _rows(organization, since, until)
    if model_name:
        rows = rows.filter(model_name=model_name)
    begin_of = TruncHour if step == "hour" else TruncDay
    found = {row["at"]: row for row in _summed(rows.values(at=begin_of("hour_at", tzinfo=datetime.UTC)))}
    length = _HOUR if step == "hour" else datetime.timedelta(days=1)
    begins = [since + length * number for number in range(-(-(until - since) // length))]
    return [_traffic(found.get(at, {"at": at})) for at in begins]


def list_hours_of_all(*, since: datetime.datetime, until: datetime.datetime) -> list[TrafficSum]:
    """Return the traffic of all organizations in each hour, for roles that see them, without latencies.

    Hours without requests are included. `since` begins an hour.
    """
    rows: QuerySet[TrafficHour, Any] = TrafficHour.objects.filter(hour_at__gte=since, hour_at__lt=until)
    rows = rows.values(at=F("hour_at"))
    sums = rows.annotate(**{name: Sum(name) for name in _SUMS}).order_by()
    found: dict[datetime.datetime, Mapping[str, Any]] = {row["at"]: row for row in sums}
    begins = [since + _HOUR * number for number in range((until - since) // _HOUR)]
    return [_traffic(found.get(at, {"at": at})) for at in begins]


def sum_traffic(*, since: datetime.datetime, until: datetime.datetime) -> TrafficSum:
    """Return the traffic of all organizations together with the times to the first token, for roles that see them."""
    rows = TrafficHour.objects.filter(hour_at__gte=since, hour_at__lt=until)
    sums = {name: Sum(name) for name in _SUMS} | _buckets(_HISTOGRAMS[:1])
    return _traffic({name: value or 0 for name, value in rows.aggregate(**sums).items()})


def list_traffic_hours(
    *,
    organization: Organization | str,
    since: datetime.datetime,
    until: datetime.datetime,
    key_id: str = "",
    model_name: str = "",
    project_id: str = "",
) -> QuerySet[TrafficHour]:
    """Return the counts of each hour, key and model that had requests, newest first, without latencies.

    Those of a project are the requests with its keys.
    """
    rows = _rows(organization, since, until).defer(*_HISTOGRAMS)
    rows = rows.filter(key_id=key_id) if key_id else rows
    rows = rows.filter(model_name=model_name) if model_name else rows
    if project_id:
        keys = ApiKey.objects.for_organization(organization).filter(project=project_id)
        rows = rows.filter(key_id__in=keys.values("pk"))
    return rows.order_by("-hour_at", "-id")


def list_traffic_of_models(
    *, organization: Organization | str, since: datetime.datetime, until: datetime.datetime
) -> list[TrafficSum]:
    """Return the traffic of each model, most requests first. That of refused requests that name none is under ""."""
    rows = _rows(organization, since, until).values("model_name")
    return [_traffic(row) for row in _summed(rows).order_by("-requests", "model_name")]


def list_hourly_costs(
    *,
    organization: Organization | str,
    since: datetime.datetime,
    until: datetime.datetime,
    model_names: Sequence[str],
) -> list[tuple[datetime.datetime, str, int]]:
    """Return the cost in nano-USD of each hour's requests of each of these models, and of all others under ""."""
    shown = Case(When(model_name__in=model_names, then=F("model_name")), default=Value(""))
    rows = _rows(organization, since, until).values("hour_at", shown=shown).annotate(nano=Sum("cost_nano"))
    return list(rows.order_by("hour_at", "shown").values_list("hour_at", "shown", "nano"))


def total_of(parts: Iterable[TrafficSum]) -> TrafficSum:
    """Return the sum of the parts, without a time or a model."""
    rows = list(parts)
    sums: dict[str, Any] = {name: sum(getattr(row, name) for row in rows) for name in _SUMS}
    for name in _HISTOGRAMS:
        sums[name] = tuple(map(sum, zip(*(getattr(row, name) for row in rows if getattr(row, name)), strict=True)))
    return TrafficSum(**sums)


def percentile_ms(counts: Sequence[int], share: float) -> int | None:
    """Return the milliseconds that this share of the counted requests did not exceed; None if none is counted.

    It lies in the right bucket, which ends at 1.26 times its begin. Within a bucket, requests are taken to lie evenly.
    What is beyond the last bound counts as that bound.
    """
    rank = share * sum(counts)
    low = 0
    for high, count in zip(BOUNDS_MS, counts, strict=False):
        if 0 < rank <= count:
            return round(low + (high - low) * rank / count)
        rank -= count
        low = high
    return low if rank > 0 else None


def _rows(
    organization: Organization | str, since: datetime.datetime, until: datetime.datetime
) -> QuerySet[TrafficHour]:
    return TrafficHour.objects.filter(hour_at__gte=since, hour_at__lt=until).for_organization(organization)


def _summed(groups: QuerySet[TrafficHour, Any]) -> QuerySet[TrafficHour, Any]:
    return groups.annotate(**{name: Sum(name) for name in _SUMS}, **_buckets(_HISTOGRAMS)).order_by()


def _buckets(histograms: Iterable[str]) -> dict[str, Sum]:
    return {f"{name}_{number}": Sum(F(f"{name}__{number}")) for name in histograms for number in _BUCKETS}


def _traffic(row: Mapping[str, Any]) -> TrafficSum:
    values: dict[str, Any] = {name: int(row[name]) for name in _SUMS if name in row}
    for name in _HISTOGRAMS:
        values[name] = tuple(row.get(f"{name}_{number}", 0) for number in _BUCKETS)
    return TrafficSum(at=row.get("at"), model_name=row.get("model_name", ""), **values)
