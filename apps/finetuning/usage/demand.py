"""An organization's use of what its limits count: now, and in the last 30 days."""

import datetime
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from django.db.models import Max, Q, Sum

from apps.accounts.models import Organization
from apps.billing.models import StorageSample, UsageSeries
from apps.finetuning.lifecycle import JOB_OPEN
from apps.finetuning.models import FineTuningJob, Run
from apps.finetuning.usage.occupancy import seconds_between
from apps.finetuning.usage.storage import stored_bytes

WINDOW = datetime.timedelta(days=30)
Span = tuple[datetime.datetime, datetime.datetime | None, int]  # begin, end (None: not over) and how many


@dataclass(frozen=True, kw_only=True)
class Demand:
    """The use of one organization. `most_` figures are of the last 30 days, as are sums without another period."""

    gpus: int
    most_gpus: int
    jobs: int
    most_jobs: int
    gpu_seconds: int
    gpu_seconds_of_month: int
    storage_bytes: int
    most_storage_bytes: int
    requests: int
    most_requests_of_day: int
    tokens: int
    most_tokens_of_day: int


def get_demand(*, organization: Organization, now: datetime.datetime) -> Demand:
    """Return what the organization uses, without others that share its limits."""
    begin, month = now - WINDOW, now.astimezone(datetime.UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    ended = Q(finished_at__gt=min(begin, month))
    runs = Run.objects.for_organization(organization).filter(Q(finished_at=None) | ended)
    spans = runs.values_list("leased_at", "finished_at", "job__gpu_count").order_by()
    held: list[Span] = [(leased, finished, gpus) for leased, finished, gpus in spans if leased is not None]
    jobs = FineTuningJob.objects.for_organization(organization).order_by().values_list("created_at", "finished_at")
    # Two statements, each with an index of its own.
    unfinished: list[Span] = [(*span, 1) for each in (Q(status__in=JOB_OPEN), ended) for span in jobs.filter(each)]
    samples = StorageSample.objects.for_organization(organization).filter(hour_at__gt=begin)
    stored = stored_bytes(organizations=[organization.pk])[organization.pk]
    days = UsageSeries.objects.for_organization(organization).filter(sku__startswith="inference:", day__gt=begin.date())
    of_input = Q(sku__startswith="inference:input:")  # each request has one line of input
    sums = days.values("day").annotate(requests=Sum("request_count", filter=of_input), tokens=Sum("quantity"))
    by_day = list(sums.order_by())
    requests, tokens = [day["requests"] or 0 for day in by_day], [day["tokens"] for day in by_day]
    return Demand(
        gpus=count_now(held),
        most_gpus=most_at_once(held, begin),
        jobs=count_now(unfinished),
        most_jobs=most_at_once(unfinished, begin),
        gpu_seconds=held_seconds(held, begin, now),
        gpu_seconds_of_month=held_seconds(held, month, now),
        storage_bytes=stored,
        most_storage_bytes=max(stored, samples.aggregate(most=Max("bytes"))["most"] or 0),
        requests=sum(requests),
        most_requests_of_day=max(requests, default=0),
        tokens=sum(tokens),
        most_tokens_of_day=max(tokens, default=0),
    )


def count_now(spans: Iterable[Span]) -> int:
    """Return how many are not over."""
    return sum(count for _, until, count in spans if until is None)


def most_at_once(spans: Iterable[Span], begin: datetime.datetime) -> int:
    """Return how many there were at most at one moment since `begin`."""
    late = [span for span in spans if span[1] is None or span[1] > begin]
    changes = [(max(since, begin), count) for since, _, count in late]
    changes += [(until, -count) for _, until, count in late if until is not None]
    return max(accumulate(change for _, change in sorted(changes)), default=0)


def held_seconds(spans: Iterable[Span], begin: datetime.datetime, end: datetime.datetime) -> int:
    """Return the seconds of all spans between two moments, each times how many."""
    return int(sum(gpus * seconds_between(since, until, begin=begin, end=end) for since, until, gpus in spans))
