"""Held GPUs and their time: from a worker's claim to the end of the attempt, billed or not."""

import datetime
from collections import defaultdict
from collections.abc import Collection

from django.db import models
from django.db.models import ExpressionWrapper, F, QuerySet, Sum
from django.db.models.functions import Greatest, Least

from apps.finetuning.lifecycle import RUN_HOLDING_LEASE
from apps.finetuning.models import Run


def leased_gpus(*, workers: Collection[str]) -> dict[str, int]:
    """Return the number of GPUs that runs lease now, by worker; a worker without any has no entry."""
    held = Run.objects.filter(worker__in=workers, status__in=RUN_HOLDING_LEASE)
    return dict(held.order_by().values_list("worker").annotate(Sum("job__gpu_count")))


def held_gpu_seconds(
    runs: QuerySet[Run], *, by: str, begin: datetime.datetime | None, end: datetime.datetime
) -> dict[str, float]:
    """Return the GPU-seconds that the attempts held between two moments, by the field `by`; 0 without attempts.

    `begin` None counts from the first attempt. A running attempt counts up to `end`.
    """
    held = runs.filter(leased_at__lt=end)
    held = held.exclude(finished_at__lte=begin) if begin else held
    since = Greatest("leased_at", begin) if begin else F("leased_at")
    span = ExpressionWrapper((Least("finished_at", end) - since) * F("job__gpu_count"), models.DurationField())
    sums = held.order_by().values_list(by).annotate(total=Sum(Greatest(span, datetime.timedelta())))
    return defaultdict(float, {key: total.total_seconds() for key, total in sums})


def seconds_between(
    since: datetime.datetime,
    until: datetime.datetime | None,
    *,
    begin: datetime.datetime | None,
    end: datetime.datetime,
) -> float:
    """Return the seconds of a span within two moments; `until` None means that the span is still open."""
    begun = max(since, begin) if begin else since
    return max((min(until or end, end) - begun).total_seconds(), 0.0)
