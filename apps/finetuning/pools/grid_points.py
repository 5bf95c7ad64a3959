"""The calibration grid as a pool's first observations: each point is predicted like a job, then compared."""

import msgspec

from apps.contracts.worker_api import ProbeReport
from apps.estimates.calibration import Observation, predict_point
from apps.estimates.errors import EstimateError
from apps.estimates.models.architectures import from_config
from apps.estimates.requests import PoolFacts
from apps.finetuning.models import GpuPool, ThroughputProbe
from apps.finetuning.quotes.inputs import gpu_of, probe_row
from apps.finetuning.quotes.pool_facts import newest_probes


def observe_grid(*, pool: GpuPool) -> list[Observation]:
    """Return measured / predicted for the newest measurement of each grid point of the pool."""
    found = ThroughputProbe.objects.filter(pool=pool, base_model=None).order_by("measured_at")
    newest = {_point_of(report): report for report in (msgspec.convert(probe.report, ProbeReport) for probe in found)}
    # The newest probe of each method is the basis of quotes for models without their own probe.
    probed = sorted(newest_probes(pool=pool), key=lambda probe: probe.measured_at) if newest else []
    probes = {probe.method: probe for probe in probed}
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


def _observe(report: ProbeReport, pool: GpuPool, probe: ThroughputProbe | None) -> Observation | None:
    try:
        row = probe_row(probe, msgspec.convert(probe.report, ProbeReport)) if probe else None
        estimate, predicted = predict_point(report, pool=PoolFacts(gpu=gpu_of(pool), probe=row))
    except EstimateError:
        return None  # skip a shape that the estimator cannot read
    return Observation(
        family=from_config(report.config or {}).model_type,
        method=report.method,
        time_ratio=predicted / report.tokens_per_second if predicted else None,
        memory_ratio=report.peak_memory_bytes / estimate.peak_bytes if estimate.peak_bytes else None,
        is_point=True,
    )
