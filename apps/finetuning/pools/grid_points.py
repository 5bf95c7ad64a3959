"""The calibration grid as a pool's first observations: each point is predicted like a job, then compared."""

from collections.abc import Iterable

import msgspec

from apps.contracts.adapter_files import adapted_modules
from apps.contracts.worker_api import ProbeReport
from apps.estimates.calibration import Observation
from apps.estimates.errors import EstimateError
from apps.estimates.intervals import whole_job_factor
from apps.estimates.models import architectures
from apps.estimates.quote import PoolFacts, QuoteRequest, quote
from apps.finetuning.models import GpuPool, ThroughputProbe
from apps.finetuning.quotes.computation import gpu_of, probe_row
from apps.finetuning.quotes.pool_facts import newest_probes

_TRAINED_SHARE = 0.5  # of a made-up row, as gpu_workers.bench.probe makes it
_ROWS = 64  # an arbitrary number: rates do not depend on it


def observe_grid(*, pool: GpuPool) -> list[Observation]:
    """Return measured / predicted for the newest measurement of each grid point of the pool."""
    found = ThroughputProbe.objects.filter(pool=pool, base_model=None).order_by("measured_at")
    newest = {_point_of(report): report for report in (msgspec.convert(probe.report, ProbeReport) for probe in found)}
    probes = _probes_by_method(newest_probes(pool=pool)) if newest else {}
    return [
        observation
        for report in newest.values()
        if (observation := _observe(report, pool, probes.get(report.method))) is not None
    ]


def _point_of(report: ProbeReport) -> tuple[object, ...]:
    return (
        report.shape, report.method, report.lora_rank, report.sequence_length, report.micro_batch_size,
        report.gradient_checkpointing,
    )  # fmt: skip


def _probes_by_method(probes: Iterable[ThroughputProbe]) -> dict[str, ThroughputProbe]:
    """Return the newest probe of each method: the basis of quotes for models without their own probe."""
    return {probe.method: probe for probe in sorted(probes, key=lambda probe: probe.measured_at)}


def _observe(report: ProbeReport, pool: GpuPool, probe: ThroughputProbe | None) -> Observation | None:
    try:
        request = _request(report)
        row = probe_row(probe, msgspec.convert(probe.report, ProbeReport)) if probe else None
        facts = PoolFacts(gpu=gpu_of(pool), probe=row)
        estimate = quote(request=request, pool=facts)
    except EstimateError:
        return None  # skip a shape that the estimator cannot read
    predicted = whole_job_factor(facts) * (estimate.tokens_per_second or 0.0)  # of the loop alone, as it was measured
    return Observation(
        family=request.architecture.model_type,
        method=report.method,
        time_ratio=predicted / report.tokens_per_second if predicted else None,
        memory_ratio=report.peak_memory_bytes / estimate.peak_bytes if estimate.peak_bytes else None,
        is_point=True,
    )


def _request(report: ProbeReport) -> QuoteRequest:
    tokens = _ROWS * report.micro_batch_size * report.sequence_length
    return QuoteRequest(
        architecture=architectures.from_config(report.config or {}),
        method=report.method,
        max_length=report.sequence_length,
        batch_size=report.micro_batch_size,
        epochs=1,
        rows=_ROWS * report.micro_batch_size,
        tokens=tokens,
        trained_tokens=max(1, round(tokens * _TRAINED_SHARE)),
        longest_row_tokens=report.sequence_length,
        row_lengths=((report.sequence_length, _ROWS * report.micro_batch_size),),
        lora_rank=report.lora_rank,
        target_modules=adapted_modules(report.config or {}),
        lora_dropout=0.0,
        checkpoints=0,
        micro_batch_size=report.micro_batch_size,
        gradient_checkpointing=report.gradient_checkpointing,
    )
