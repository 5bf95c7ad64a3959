"""Quoting one job on every pool: what it needs, takes and costs there, and why it may not start."""

import datetime
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from django.db.models import Q

from apps.catalog.models import BaseModel, PriceRule
from apps.catalog.queries import active_price
from apps.contracts.runs import Hyperparameters
from apps.contracts.worker_api import ProbeReport
from apps.core.errors import InvalidValue
from apps.core.money import rated
from apps.core.tenancy import system
from apps.datasets.models import DatasetVersion, TokenCount
from apps.estimates import architectures, gpus, published
from apps.estimates.quote import Estimate, PoolFacts, QuoteRequest, quote
from apps.estimates.throughput import ProbeRow, SpeedSource
from apps.finetuning.lifecycle import RUN_ACTIVE
from apps.finetuning.models import CalibrationPoint, GpuPool, Run, ThroughputProbe

LIVE_SECONDS = 60  # a worker not heard of for so long counts as away
_CAP_OVER_P90 = 1.25  # room for a slow day before a run pauses at its cap
_LEAST_CAP_SECONDS = 60
_DATA = Path(__file__).resolve().parents[1] / "catalog" / "data"


class CannotEstimate(InvalidValue):
    """The base model is of a family whose memory and speed we cannot compute."""

    code = "unsupported_architecture"


@dataclass(frozen=True)
class PoolQuote:
    """One row of the compute table. `cap_nano` is the spend cap we suggest, and what launching would hold."""

    pool: GpuPool
    estimate: Estimate
    price: PriceRule | None
    live_workers: int
    cap_nano: int | None
    block_reason: str

    @property
    def is_launchable(self) -> bool:
        return not self.block_reason


def quote_pools(
    *,
    base_model: BaseModel,
    version: DatasetVersion,
    count: TokenCount,
    hyperparameters: Hyperparameters,
    now: datetime.datetime,
) -> list[PoolQuote]:
    """Return a quote for each open pool, launchable ones first, then by cost."""
    request = _request(base_model, version, count, hyperparameters)
    pools = GpuPool.objects.filter(is_open=True).select_related("gpu_type")
    quotes = [_quote_pool(pool, request, base_model, now) for pool in pools]
    return sorted(quotes, key=lambda q: (not q.is_launchable, q.estimate.cost_nano_p50 or math.inf, q.pool.name))


def live_worker_filter(now: datetime.datetime) -> Q:
    """Return the condition of a trainer that may take work now."""
    seen = now - datetime.timedelta(seconds=LIVE_SECONDS)
    return Q(kind="trainer", last_seen_at__gte=seen, cordoned_at=None, drain_requested_at=None, revoked_at=None)


def with_plan(hyperparameters: Hyperparameters, estimate: Estimate) -> Hyperparameters:
    """Return the recipe with the micro-batch and checkpointing that the estimate found to fit."""
    return msgspec.structs.replace(
        hyperparameters,
        gradient_accumulation_steps=estimate.plan.gradient_accumulation_steps,
        gradient_checkpointing=estimate.plan.gradient_checkpointing,
    )


def training_sku(pool: GpuPool) -> str:
    return f"training:{pool.name}"


def _request(
    base_model: BaseModel, version: DatasetVersion, count: TokenCount, recipe: Hyperparameters
) -> QuoteRequest:
    return QuoteRequest(
        architecture=architecture_of(base_model),
        method=recipe.method,
        max_length=recipe.max_length,
        batch_size=recipe.batch_size,
        epochs=recipe.epochs,
        rows=version.rows or 1,
        tokens=max(count.tokens, 1),
        trained_tokens=max(count.trained_tokens, 1),
        longest_row_tokens=max(count.longest_row_tokens, 1),
        lora_rank=recipe.lora_rank,
        target_modules=recipe.target_modules,
    )


def _quote_pool(pool: GpuPool, request: QuoteRequest, base_model: BaseModel, now: datetime.datetime) -> PoolQuote:
    price = active_price(sku=training_sku(pool))
    live = pool.workers.filter(live_worker_filter(now)).count()
    facts = _facts(pool, request, base_model, price, live)
    estimate = quote(request=request, pool=facts, published=_published(), other_gpus=tuple(_gpu_types().values()))
    return PoolQuote(
        pool=pool,
        estimate=estimate,
        price=price,
        live_workers=live,
        cap_nano=_cap_nano(estimate, price),
        block_reason=_block_reason(estimate, base_model, price, live),
    )


def _facts(
    pool: GpuPool, request: QuoteRequest, base_model: BaseModel, price: PriceRule | None, live: int
) -> PoolFacts:
    probe = newest_probe(pool=pool, base_model=base_model, method=request.method)
    report = msgspec.convert(probe.report, ProbeReport) if probe else None
    return PoolFacts(
        gpu=_gpu_of(pool),
        probe=_probe_row(probe, report) if probe and report else None,
        price_nano=price.price_nano if price else None,
        price_per_seconds=price.per // 1000 if price else 3600,
        live_workers=live,
        seconds_ahead=seconds_ahead(pool=pool),
        startup_seconds=report.startup_seconds if report else 0.0,
        finished_ratios=_finished_ratios(pool),
    )


def _finished_ratios(pool: GpuPool) -> tuple[float, ...]:
    """How long finished runs of the pool took beside their estimates; all tenants' runs teach, none is shown."""
    with system():
        points = CalibrationPoint.objects.filter(run__pool=pool, estimated_seconds__gt=0).order_by("-id")[:200]
        return tuple(point.actual_seconds / point.estimated_seconds for point in points if point.estimated_seconds)


def newest_probe(*, pool: GpuPool, base_model: BaseModel, method: str) -> ThroughputProbe | None:
    """Return the pool's newest measurement for this method: of the same model if there is one, else of any."""
    probes = ThroughputProbe.objects.filter(pool=pool, method=method).select_related("base_model")
    return (
        probes.filter(base_model=base_model).order_by("-measured_at").first() or probes.order_by("-measured_at").first()
    )


def newest_probes(*, pool: GpuPool) -> list[ThroughputProbe]:
    """Return the pool's newest measurement of each base model and method."""
    probes = ThroughputProbe.objects.filter(pool=pool).select_related("base_model", "worker")
    return list(probes.order_by("base_model", "method", "-measured_at").distinct("base_model", "method"))


def seconds_ahead(*, pool: GpuPool) -> float:
    """Return the estimated training seconds of the runs waiting or running in the pool, by the work still to do."""
    ahead = 0.0
    with system():  # the queue is shared: other tenants' work counts, and only the sum is shown
        runs = list(Run.objects.filter(pool=pool, status__in=RUN_ACTIVE).select_related("job"))
    for run in runs:
        job = run.job
        done = job.step / job.total_steps if job.total_steps else 0.0
        ahead += (job.estimate.get("train_seconds_p50") or 0.0) * (1.0 - done)
    return ahead


def _probe_row(probe: ThroughputProbe, report: ProbeReport) -> ProbeRow:
    source = SpeedSource(
        kind="probe",
        text=f"Measured on this pool with {probe.base_model.display_name}",
        measured_at=probe.measured_at.isoformat(),
    )
    return ProbeRow(
        gpu_key=report.gpu_key,
        architecture=architecture_of(probe.base_model),
        method=report.method,
        tokens_per_second=report.tokens_per_second,
        tokens_per_second_low=report.tokens_per_second_low,
        tokens_per_second_high=report.tokens_per_second_high,
        tokens_per_micro_step=report.micro_batch_size * report.sequence_length,
        sequence_length=report.sequence_length,
        lora_rank=report.lora_rank,
        source=source,
    )


def architecture_of(base_model: BaseModel) -> architectures.Architecture:
    """Return the model's dimensions from its config.json, or from its seeded catalogue row. Raises CannotEstimate."""
    config = base_model.config
    try:
        if "n_layers" in config:
            return architectures.from_catalog_row(config)
        return architectures.from_config(config)
    except architectures.ArchitectureError as error:
        raise CannotEstimate(f"{base_model.display_name} cannot be estimated: {error}", param="model") from error


def _gpu_of(pool: GpuPool) -> gpus.Gpu:
    if pool.gpu_type_id == "cpu":
        return gpus.cpu(memory_bytes=pool.memory_bytes)
    return msgspec.structs.replace(_gpu_types()[pool.gpu_type_id], memory_bytes=pool.memory_bytes)


def _cap_nano(estimate: Estimate, price: PriceRule | None) -> int | None:
    if price is None or estimate.billed_seconds_p90 is None:
        return None
    seconds = max(math.ceil(estimate.billed_seconds_p90 * _CAP_OVER_P90), _LEAST_CAP_SECONDS)
    return rated(quantity=seconds * 1000, price_nano=price.price_nano, per=price.per)


def _block_reason(estimate: Estimate, base_model: BaseModel, price: PriceRule | None, live_workers: int) -> str:
    if not estimate.fits:
        return estimate.reason or "Does not fit."
    if not base_model.is_installed:
        return f"{base_model.display_name} is not installed on this platform: it can be quoted, not trained."
    if price is None:
        return "No price is set for this pool."
    if not live_workers:
        return "No worker of this pool is online."
    if estimate.cost_nano_p90 is None:
        return f"No time estimate yet: {estimate.speed_source.text}"
    return ""


@cache
def _published() -> tuple[ProbeRow, ...]:
    return published.load(_DATA)


@cache
def _gpu_types() -> dict[str, gpus.Gpu]:
    return gpus.load(_DATA / "gpus.json")


def snapshot(estimate: Estimate) -> dict[str, Any]:
    """Return the estimate as plain JSON values, to be kept with the job."""
    return msgspec.to_builtins(estimate)
