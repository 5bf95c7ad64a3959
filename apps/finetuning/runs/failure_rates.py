"""Loss rate of a pool's workers, from its own runs; the interval between checkpoints is computed from it."""

import datetime
from typing import Any

from apps.finetuning.lifecycle import RunStatus
from apps.finetuning.models import GpuPool, Run

_WINDOW = datetime.timedelta(days=30)
_MIN_FAILURES = 3  # fewer are no evidence; until then the interval is the cautious one


def seconds_between_failures(*, pool: GpuPool, now: datetime.datetime) -> float | None:
    """Return the mean training time between two lost attempts of the pool.

    If too few were lost, return the operator's expectation for a spot pool, and None for others. The login for claims
    sees every tenant: the machines are shared, and only the mean is returned.
    """
    runs = Run.objects.filter(pool=pool, training_started_at__isnull=False, finished_at__gte=now - _WINDOW)
    ended: list[Any] = list(runs.values_list("status", "training_started_at", "finished_at"))
    lost = sum(status == RunStatus.LOST for status, _, _ in ended)
    if lost < _MIN_FAILURES:
        return 3600 / pool.interruptions_per_hour if pool.is_spot else None
    return sum((finished - started).total_seconds() for _, started, finished in ended) / lost
