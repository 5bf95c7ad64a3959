"""Current facts about GPU pools: prices, machines, measured speeds and the work ahead.

The number of queries does not depend on the number of pools.
"""

import datetime
import math
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import msgspec
from django.db.models import Case, Count, FloatField, Q, Sum, Value, When
from django.db.models.fields.json import KeyTextTransform
from django.db.models.functions import Cast, Coalesce, NullIf

from apps.accounts.models import Organization
from apps.accounts.queries import regions_of
from apps.catalog.models import BaseModel, PriceRule
from apps.catalog.queries import list_active_prices
from apps.contracts.hyperparameters import Method
from apps.core.database.tenancy import system
from apps.estimates.calibration import Calibration, correct
from apps.estimates.requests import Correction
from apps.finetuning.lifecycle import RUN_ACTIVE, RUN_HOLDING_LEASE, RunStatus
from apps.finetuning.models import GpuPool, Run, RunMember, ThroughputProbe, Worker, WorkerKind
from apps.finetuning.usage.growth import NO_GROWTH, Growth, growth_of
from apps.finetuning.usage.offers import read_offer

_SHOWN_SHAPES = 40
_TAKEN = ("run__job__gpu_count", "run__job__node_count")  # by each machine of a group: its share of the GPUs
_LENDER = "run__pool__borrows_from"
LIVE_SECONDS = 60  # a worker silent for this long counts as offline


@dataclass(frozen=True, kw_only=True)
class PoolState:
    """The current state of one pool.

    `gpus_per_worker` is the largest GPU count of a live worker or of one that the pool can start, 0 without one;
    `worker_gpus` lists those of live workers.
    `host_memory_bytes` is the smallest memory of a live worker's machine, None if one has not reported it.

    `probe` is the newest measurement for the method: of the same model if there is one, else of any. Full training
    without its own measurement is derived from one of LoRA.

    `seconds_ahead` is the expected time of the waiting and running work, over all workers; `ahead_by_gpus` splits it by
    the GPUs needed. `free_gpus` lists the GPUs of each worker that a new job can have at once; it is empty while other
    jobs wait (`has_queue`). `has_weights`: each live worker has loaded the base model before.

    `correction` comes from finished runs of all tenants; it reveals none of them. `starts_workers`: the pool is elastic
    and starts a worker for a job; `growth` are those that it can have soon. `joining_gpus` lists the GPUs of each
    worker that trains the base model together with others, live or one that the pool can start. `regions` are those
    that the organization is limited to, None if it is not.
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
    free_gpus: tuple[int, ...] = ()
    host_memory_bytes: int | None = None
    starts_workers: bool = False
    has_queue: bool = False
    growth: Growth = NO_GROWTH
    joining_gpus: tuple[int, ...] = ()
    regions: Collection[str] | None = None


class LiveWorker(NamedTuple):
    """A live worker. A CPU worker counts as one GPU: it trains one job at a time. `leased` GPUs are in use.

    `memory_bytes` is None if the machine has not reported it.
    """

    id: str
    gpus: int
    leased: int
    memory_bytes: int | None
    joins: bool = False  # trains the base model together with other machines
    lent: int = 0  # of the leased GPUs, those that runs of borrowing pools have


@dataclass(frozen=True, kw_only=True)
class OpenPools:
    """All open pools with their facts from the database, by the pool's id."""

    pools: tuple[GpuPool, ...]
    prices: Mapping[str, PriceRule]  # by SKU
    workers: Mapping[str, Sequence[LiveWorker]]
    fetched: Collection[str]  # the workers that hold the base model's files
    probes: Mapping[tuple[str, str], ThroughputProbe]  # by pool and method
    ahead: Mapping[str, Mapping[int, float]]
    queues: Collection[str]  # the pools in which a run waits
    growth: Mapping[str, Growth]  # by pool
    regions: Collection[str] | None = None  # that the organization is limited to

    def states(self, *, family: str, method: str) -> list[PoolState]:
        """Return the pools' states for a job of this method; `family` is the architecture's model_type."""
        return [self._state(pool, family, method) for pool in self.pools]

    def _state(self, pool: GpuPool, family: str, method: str) -> PoolState:
        workers, queues = self.workers.get(pool.machines_id, ()), {pool.pk, pool.machines_id}
        ahead: dict[int, float] = defaultdict(float)
        for gpus, seconds in chain.from_iterable(self.ahead.get(each, {}).items() for each in queues):
            ahead[gpus] += seconds
        return PoolState(
            pool=pool,
            price=self.prices.get(training_sku(pool)),
            live_workers=len(workers),
            gpus_per_worker=max(_gpus_from_zero(pool), 0, *(worker.gpus for worker in workers)),
            starts_workers=bool(_gpus_from_zero(pool)),
            has_queue=bool(queues & set(self.queues)),
            growth=self.growth[pool.pk],
            joining_gpus=_joining_gpus(pool, workers),
            worker_gpus=tuple(worker.gpus for worker in workers),
            free_gpus=() if queues & set(self.queues) else tuple(_free_gpus(pool, worker) for worker in workers),
            host_memory_bytes=_least_memory(workers),
            probe=next(
                (probe for each in _probed(method) if (probe := self.probes.get((pool.machines_id, each)))), None
            ),
            seconds_ahead=sum(ahead.values()),
            ahead_by_gpus=tuple(ahead.items()),
            correction=correction_of(pool=pool, family=family, method=method),
            regions=self.regions,
            has_weights=bool(workers) and all(worker.id in self.fetched for worker in workers),
        )


def find_open_pools(
    *,
    base_model: BaseModel,
    methods: Collection[str],
    now: datetime.datetime,
    organization: Organization | str | None = None,
    max_age_seconds: float = 0.0,
) -> OpenPools:
    """Return the facts about the open pools for jobs on this model by these methods, at the organization's prices.

    All but the prices and regions are the same for every tenant, and may have been read up to `max_age_seconds` ago.
    """
    key, moment = (base_model.pk, frozenset(methods)), time.monotonic()
    read_at, shared = _recent.get(key, (-math.inf, None))
    if shared is None or moment - read_at >= max_age_seconds:
        shared = _read_open_pools(base_model, methods, now)
        if not base_model._state.adding:  # an unsaved model has a new key each time
            _recent[key] = moment, shared
    prices = list_active_prices(prefix="training:", organization=organization)
    regions = None if organization is None else regions_of(organization=organization)
    return replace(shared, prices={rule.sku: rule for rule in prices}, regions=regions)


_recent: dict[tuple[str, frozenset[str]], tuple[float, OpenPools]] = {}  # by base model and methods: a few hundred


def _read_open_pools(base_model: BaseModel, methods: Collection[str], now: datetime.datetime) -> OpenPools:
    pools = GpuPool.objects.filter(is_open=True).order_by("name")
    pools = pools.select_related("gpu_type", "calibration", "capacity", "borrows_from__calibration")
    machines = {pool.machines_id for pool in pools}
    with system():  # the queue is shared: other tenants' work counts, but only sums are shown
        ahead, queues, leased = _work_ahead(Q(pool__in=machines) | Q(pool__borrows_from__in=machines))
    workers = _live_workers(base_model, machines, now, leased)
    return OpenPools(
        pools=tuple(pools),
        prices={},
        workers=workers,
        fetched=_with_weights(base_model, [worker.id for each in workers.values() for worker in each]),
        probes=_newest_probes(base_model, machines, methods),
        ahead=ahead,
        queues=queues,
        growth={pool.pk: growth_of(pool=pool, now=now) for pool in pools},
    )


def _joining_gpus(pool: GpuPool, workers: Sequence[LiveWorker]) -> tuple[int, ...]:
    """Return the GPUs of the workers that train together with others; all nodes that a pool starts do."""
    live = tuple(worker.gpus for worker in workers if worker.joins)
    if not _gpus_from_zero(pool):
        return live
    return live + (pool.capacity.gpus_per_node,) * max(pool.capacity.maximum - len(workers), 0)


def _gpus_from_zero(pool: GpuPool) -> int:
    """Return the GPUs of a worker that the pool can start, 0 if it is not elastic."""
    capacity = getattr(pool, "capacity", None)
    return capacity.gpus_per_node if capacity is not None and capacity.is_elastic else 0


def training_sku(pool: GpuPool) -> str:
    return f"training:{pool.name}"


def live_worker_filter(now: datetime.datetime) -> Q:
    """Return the condition of a trainer that may take work now."""
    seen = now - datetime.timedelta(seconds=LIVE_SECONDS)
    return Q(
        kind=WorkerKind.TRAINER, last_seen_at__gte=seen, cordoned_at=None, drain_requested_at=None, revoked_at=None
    )


def newest_probes(*, pool: GpuPool) -> list[ThroughputProbe]:
    """Return the pool's newest measurement of each base model and method."""
    probes = ThroughputProbe.objects.filter(pool=pool, base_model__isnull=False).select_related("base_model", "worker")
    return list(probes.order_by("base_model", "method", "-measured_at").distinct("base_model", "method"))


def list_shape_probes(*, pool: GpuPool) -> list[ThroughputProbe]:
    """Return the pool's newest measurements on made-up weights, newest first."""
    return list(ThroughputProbe.objects.filter(pool=pool, base_model=None).order_by("-measured_at")[:_SHOWN_SHAPES])


def seconds_ahead(*, pool: GpuPool) -> float:
    """Return the estimated GPU-seconds of remaining work of the pool's waiting and running runs."""
    with system():
        ahead, _, _ = _work_ahead(Q(pool=pool))
    return sum(gpus * seconds for gpus, seconds in ahead[pool.pk].items())


def _free_gpus(pool: GpuPool, worker: LiveWorker) -> int:
    """Return the GPUs that a run of the pool can have at once: what is lent returns to the pool that lends it."""
    return worker.gpus - worker.leased + (0 if pool.borrows_from_id else worker.lent)


def _live_workers(
    base_model: BaseModel, pools: Collection[str], now: datetime.datetime, leased: Mapping[str, tuple[int, int]]
) -> dict[str, list[LiveWorker]]:
    """Return the pools' live workers by pool; `leased` are the GPUs in use, and those lent of them, by worker."""
    found: dict[str, list[LiveWorker]] = defaultdict(list)
    workers = Worker.objects.filter(live_worker_filter(now), pool__in=pools)
    for pool_id, worker_id, gpus, *rest in workers.values_list("pool_id", "pk", "gpus", "memory_bytes", "offer"):
        memory_bytes, offer = rest
        joins = offer is not None and read_offer(offer).has_model(base_model.pk)
        taken, lent = leased.get(worker_id, (0, 0))
        found[pool_id].append(LiveWorker(worker_id, max(1, len(gpus)), taken, memory_bytes, joins, lent))
    return found


def _least_memory(workers: Sequence[LiveWorker]) -> int | None:
    """Return the smallest memory of the machines; None if one has not reported it."""
    known = [worker.memory_bytes for worker in workers]
    return None if None in known else min((each for each in known if each is not None), default=None)


def _with_weights(base_model: BaseModel, workers: Sequence[str]) -> set[str]:
    """Return the workers that have measured or trained the base model, and so hold its files."""
    if base_model.path:
        return set(workers)
    probed = ThroughputProbe.objects.filter(base_model=base_model, worker__in=workers)
    with system():  # a run of any tenant leaves the files there
        trained = Run.objects.filter(job__base_model=base_model, worker__in=workers, training_started_at__isnull=False)
        found = [*probed.values_list("worker_id", flat=True), *trained.values_list("worker_id", flat=True)]
    return {worker_id for worker_id in found if worker_id}


def _probed(method: str) -> tuple[str, ...]:
    """Return the methods whose probes give a method's speed, nearest first.

    Workers probe full training on CPUs alone, of small models, and last.
    """
    return (method, Method.LORA) if method == Method.FULL else (method,)


def _newest_probes(
    base_model: BaseModel, pools: Collection[str], methods: Iterable[str]
) -> dict[tuple[str, str], ThroughputProbe]:
    """Return probes by pool and method: of the same model if there is one, else of any."""
    is_other = Case(When(base_model=base_model, then=Value(0)), default=Value(1))
    wanted = {each for method in methods for each in _probed(method)}
    probes = ThroughputProbe.objects.filter(pool__in=pools, method__in=wanted, base_model__isnull=False)
    ranked = probes.select_related("base_model").annotate(is_other=is_other)
    newest = ranked.order_by("pool", "method", "is_other", "-measured_at").distinct("pool", "method")
    return {(probe.pool_id, probe.method): probe for probe in newest}


def _work_ahead(of_pools: Q) -> tuple[dict[str, dict[int, float]], set[str], dict[str, tuple[int, int]]]:
    """Return the work of waiting and running runs, the pools in which runs wait, and the leased GPUs by worker.

    Of the leased GPUs, those follow that runs of borrowing pools have.

    The caller sees all tenants. The work is in seconds, by pool and by the number of GPUs that it needs. The database
    sums it, because thousands of runs may wait.
    """
    training, whole = (
        Cast(KeyTextTransform(name, "job__estimate"), FloatField()) for name in ("train_seconds_p50", "run_seconds_p50")
    )
    done = Coalesce(Cast("job__step", FloatField()) / NullIf("job__total_steps", Value(0)), 0.0)
    # Before its first step, a run needs download and start-up too. Each look at an estimate takes its time.
    left = Case(When(job__step=0, then=Coalesce(NullIf(whole, Value(0.0)), training)), default=training * (1.0 - done))
    ahead: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    queues: set[str] = set()
    leased: dict[str, int] = defaultdict(int)
    lent: dict[str, int] = defaultdict(int)
    runs = Run.objects.filter(of_pools, status__in=RUN_ACTIVE)
    sums = runs.values_list("pool_id", "pool__borrows_from", "worker_id", "job__gpu_count", "job__node_count").annotate(
        seconds=Sum(left, default=0.0),
        waiting=Count("pk", filter=Q(status=RunStatus.QUEUED)),
        held=Count("pk", filter=Q(status__in=RUN_HOLDING_LEASE)),
    )
    has_groups = False
    for pool_id, lender_id, worker_id, gpu_count, node_count, seconds, waiting, held in sums:
        ahead[pool_id][gpu_count] += seconds
        if waiting:
            queues.add(pool_id)
        if held:
            leased[str(worker_id)] += held * (gpu_count // node_count)
            lent[str(worker_id)] += held * (gpu_count // node_count) if lender_id else 0
            has_groups |= node_count > 1
    if has_groups:
        joined = RunMember.objects.filter(run__status__in=RUN_HOLDING_LEASE, left_at=None)
        for worker_id, lender_id, gpu_count, node_count in joined.values_list("worker_id", _LENDER, *_TAKEN):
            leased[worker_id] += gpu_count // node_count
            lent[worker_id] += gpu_count // node_count if lender_id else 0
    return ahead, queues, {worker_id: (gpus, lent[worker_id]) for worker_id, gpus in leased.items()}


def correction_of(*, pool: GpuPool, family: str, method: str) -> Correction | None:
    """Return the correction from the version in use of the pool with the machines; None without one."""
    version = pool.machines.calibration
    if version is None:
        return None
    return correct(msgspec.convert(version.calibration, Calibration), family=family, method=method)
