"""What is known of GPU pools at this moment: prices, machines, measured speeds and the work ahead.

A quote of thirty pools asks the database a handful of questions, not a handful a pool.
"""

import datetime
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from django.db.models import Case, Q, Value, When

from apps.catalog.models import BaseModel, PriceRule
from apps.catalog.queries import list_active_prices
from apps.contracts.runs import Method
from apps.core.tenancy import system
from apps.estimates.requests import Correction
from apps.finetuning.corrections import correction_of
from apps.finetuning.lifecycle import RUN_ACTIVE
from apps.finetuning.models import GpuPool, Run, ThroughputProbe, Worker

_SHOWN_SHAPES = 40
LIVE_SECONDS = 60  # a worker not heard of for so long counts as away


@dataclass(frozen=True, kw_only=True)
class PoolState:
    """One pool as it stands. `gpus_per_worker` is the most GPUs a live worker has, 0 without one; `worker_gpus` are
    those of each, and `host_memory_bytes` the least memory a live worker's machine has, None where one has not said.

    `probe` is the newest measurement for the method: of the same model if there is one, else of any. Full training
    is told from one of LoRA where it was not measured itself.
    `seconds_ahead` is the expected time of the work waiting or running, over all workers, and `ahead_by_gpus` the same
    by the GPUs it needs; `has_weights`: each live
    worker has loaded the base model before.
    `correction` is what finished runs taught; all tenants' runs teach, none is shown.
    """

    pool: GpuPool
    price: PriceRule | None
    live_workers: int
    gpus_per_worker: int
    probe: ThroughputProbe | None
    seconds_ahead: float
    correction: Correction | None
    has_weights: bool = False
    worker_gpus: tuple[int, ...] = ()
    ahead_by_gpus: tuple[tuple[int, float], ...] = ()
    host_memory_bytes: int | None = None


def open_pool_states(
    *, base_model: BaseModel, family: str, method: str, now: datetime.datetime, organization: Any = None
) -> list[PoolState]:
    """Return every pool that takes jobs, with what is known of it, at the organization's prices.

    `family` is the architecture's model_type.
    """
    pools = list(GpuPool.objects.filter(is_open=True).select_related("gpu_type", "calibration").order_by("name"))
    prices = {rule.sku: rule for rule in list_active_prices(prefix="training:", organization=organization)}
    workers = _live_workers(pools, now)
    fetched = _with_weights(base_model, [worker for each in workers.values() for worker in each])
    probes = _newest_probes(pools, base_model, method)
    ahead = _seconds_ahead(pools)
    memory = _host_memory([worker_id for each in workers.values() for worker_id in each])
    return [
        PoolState(
            pool=pool,
            price=prices.get(training_sku(pool)),
            live_workers=len(workers[pool.pk]),
            gpus_per_worker=max(workers[pool.pk].values(), default=0),
            worker_gpus=tuple(workers[pool.pk].values()),
            host_memory_bytes=memory.get(pool.pk),
            probe=probes.get(pool.pk),
            seconds_ahead=sum(ahead[pool.pk].values()),
            ahead_by_gpus=tuple(ahead[pool.pk].items()),
            correction=correction_of(pool=pool, family=family, method=method),
            has_weights=bool(workers[pool.pk]) and workers[pool.pk].keys() <= fetched,
        )
        for pool in pools
    ]


def training_sku(pool: GpuPool) -> str:
    return f"training:{pool.name}"


def live_worker_filter(now: datetime.datetime) -> Q:
    """Return the condition of a trainer that may take work now."""
    seen = now - datetime.timedelta(seconds=LIVE_SECONDS)
    return Q(kind="trainer", last_seen_at__gte=seen, cordoned_at=None, drain_requested_at=None, revoked_at=None)


def newest_probes(*, pool: GpuPool) -> list[ThroughputProbe]:
    """Return the pool's newest measurement of each base model and method."""
    probes = ThroughputProbe.objects.filter(pool=pool, base_model__isnull=False).select_related("base_model", "worker")
    return list(probes.order_by("base_model", "method", "-measured_at").distinct("base_model", "method"))


def list_shape_probes(*, pool: GpuPool) -> list[ThroughputProbe]:
    """Return the points of the pool's newest calibrations on made-up weights, newest first."""
    return list(ThroughputProbe.objects.filter(pool=pool, base_model=None).order_by("-measured_at")[:_SHOWN_SHAPES])


def seconds_ahead(*, pool: GpuPool) -> float:
    """Return the estimated seconds of the runs waiting or running in the pool, by the work still to do."""
    return sum(_seconds_ahead([pool])[pool.pk].values())


def _live_workers(pools: Sequence[GpuPool], now: datetime.datetime) -> dict[str, dict[str, int]]:
    """The GPUs of each live worker, by pool; a CPU worker trains one job at a time, as one GPU does."""
    found: dict[str, dict[str, int]] = defaultdict(dict)
    workers = Worker.objects.filter(live_worker_filter(now), pool__in=pools)
    for pool_id, worker_id, gpus in workers.values_list("pool_id", "pk", "gpus"):
        found[pool_id][worker_id] = max(1, len(gpus))
    return found


def _host_memory(workers: Sequence[str]) -> dict[str, int]:
    """The least memory of these workers' machines, by pool; not of a pool with one that has not said."""
    known: dict[str, list[int | None]] = defaultdict(list)
    for pool_id, memory_bytes in Worker.objects.filter(pk__in=workers).values_list("pool_id", "memory_bytes"):
        known[pool_id].append(memory_bytes)
    return {
        pool_id: min(each for each in found if each is not None)
        for pool_id, found in known.items()
        if None not in found
    }


def _with_weights(base_model: BaseModel, workers: Sequence[str]) -> set[str]:
    """The workers that have measured or trained the base model, and so hold its files."""
    if base_model.path:
        return set(workers)
    probed = ThroughputProbe.objects.filter(base_model=base_model, worker__in=workers)
    with system():  # whoever's run it was, the files are there
        trained = Run.objects.filter(job__base_model=base_model, worker__in=workers, training_started_at__isnull=False)
        found = [*probed.values_list("worker_id", flat=True), *trained.values_list("worker_id", flat=True)]
    return {worker_id for worker_id in found if worker_id}


def _newest_probes(pools: Sequence[GpuPool], base_model: BaseModel, method: str) -> dict[str, ThroughputProbe]:
    is_other = Case(When(base_model=base_model, then=Value(0)), default=Value(1))
    methods = [method, Method.LORA] if method == Method.FULL else [method]  # nobody probes full training at start
    is_other_method = Case(When(method=method, then=Value(0)), default=Value(1))
    probes = ThroughputProbe.objects.filter(pool__in=pools, method__in=methods, base_model__isnull=False)
    ranked = probes.select_related("base_model").annotate(is_other=is_other, is_other_method=is_other_method)
    newest = ranked.order_by("pool", "is_other_method", "is_other", "-measured_at").distinct("pool")
    return {probe.pool_id: probe for probe in newest}


def _seconds_ahead(pools: Sequence[GpuPool]) -> dict[str, dict[int, float]]:
    """By pool and the GPUs that the work needs."""
    ahead: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    with system():  # the queue is shared: other tenants' work counts, and only the sum is shown
        runs = Run.objects.filter(pool__in=pools, status__in=RUN_ACTIVE).values_list(
            "pool_id", "job__gpu_count", "job__step", "job__total_steps", "job__estimate__train_seconds_p50",
            "job__estimate__run_seconds_p50",
        )  # fmt: skip
        for pool_id, gpu_count, step, total_steps, training, whole in runs:
            done = step / total_steps if total_steps else 0.0
            beside = (whole or 0.0) - (training or 0.0) if whole and not step else 0.0  # download and start-up
            ahead[pool_id][gpu_count] += (training or 0.0) * (1.0 - done) + beside
    return ahead
