"""Whose run starts next: among the queued runs of a pool, the organization that has had least for its weight."""

import datetime
from collections.abc import Iterator

from django.db.models import Sum

from apps.core.tenancy import system
from apps.finetuning.lifecycle import RUN_HOLDING_LEASE
from apps.finetuning.models import FineTuningJob, GpuPool, Quota, Run

_RECENT = datetime.timedelta(hours=1)
_CANDIDATES = 200
_AGING_SECONDS = 600  # after so long in the queue a run goes before younger ones, whoever's it is


def queue_order(*, pool: GpuPool, now: datetime.datetime) -> list[Run]:
    """Return the pool's queued runs in the order they should start."""
    runs = list(Run.objects.filter(pool=pool, status="queued").order_by("created_at", "id")[:_CANDIDATES])
    shares = _shares({run.organization_id for run in runs}, now)
    turns: dict[str, int] = {}

    def rank(run: Run) -> tuple[int, float, datetime.datetime]:
        waited = (now - run.created_at).total_seconds()
        turn = turns[run.organization_id] = turns.get(run.organization_id, -1) + 1
        return (-int(waited // _AGING_SECONDS), shares[run.organization_id] + turn, run.created_at)

    return [run for _, run in sorted(((rank(run), run) for run in runs), key=lambda pair: pair[0])]


def queue_position(*, run: Run, now: datetime.datetime) -> int:
    """Return 1 for the run that starts next. Raises ValueError when the run is not queued.

    Other tenants' runs are counted and never shown.
    """
    with system():
        order = [queued.pk for queued in queue_order(pool=run.pool, now=now)]
    return order.index(run.pk) + 1


def _shares(organizations: set[str], now: datetime.datetime) -> dict[str, float]:
    """GPUs held now plus GPU-hours used in the last hour, for each unit of weight."""
    weights = dict(Quota.objects.filter(organization_id__in=organizations).values_list("organization_id", "weight"))
    return {pk: load / max(weights.get(pk, 1), 1) for pk, load in _loads(organizations, now)}


def _loads(organizations: set[str], now: datetime.datetime) -> Iterator[tuple[str, float]]:
    for pk in organizations:
        held = Run.objects.filter(organization_id=pk, status__in=RUN_HOLDING_LEASE).count()
        recent = FineTuningJob.objects.filter(organization_id=pk, finished_at__gte=now - _RECENT)
        used_ms = recent.aggregate(total=Sum("billed_gpu_ms"))["total"] or 0
        yield pk, held + used_ms / 3_600_000
