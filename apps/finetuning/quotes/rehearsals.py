"""Rehearsed memory in quotes: the request that a quoted job makes, and the figure that a worker reported for it."""

import datetime
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import msgspec

from apps.catalog.models import BaseModel
from apps.contracts.hyperparameters import Hyperparameters
from apps.contracts.runs import MemoryReport, MemoryRequest
from apps.core.database.prepared import fetch_prepared
from apps.estimates.physics.memory import device_bytes
from apps.estimates.physics.plans import TrainingPlan
from apps.estimates.quote import Estimate

KEPT = datetime.timedelta(days=30)
_REPORTS = """
    SELECT digest, report::text FROM finetuning_memoryrehearsal
    WHERE digest = ANY(%(digests)s::text[]) AND reported_at >= statement_timestamp() - %(kept)s::interval
"""
_VERSION = "2"  # of what is traced and believed: raise it with a change of the trainer's memory
_TRACED = {"single": "single", "ddp": "ddp", "zero3": "fsdp"}  # the formula's name -> the trainer's


@dataclass(frozen=True)
class QuotedRehearsal:
    """A job's memory to rehearse on one GPU. `peak_bytes` is None until a worker has reported it."""

    request: MemoryRequest
    computed_bytes: int  # its peak by the formula
    peak_bytes: int | None = None

    @property
    def digest(self) -> str:
        """Return the name of the figure, which equal jobs of all organizations share."""
        encoded = msgspec.json.encode(self.request, order="sorted")
        return hashlib.sha256(_VERSION.encode() + encoded).hexdigest()


def rehearsal_of(
    *, base_model: BaseModel, recipe: Hyperparameters, estimate: Estimate, is_on_cpu: bool
) -> QuotedRehearsal | None:
    """Return what to rehearse of the quoted job; None if its model or its parallelism cannot be traced."""
    return _rehearsal(base_model, recipe, estimate.plan, estimate.peak_bytes, is_on_cpu)


def stored_rehearsal(
    *, base_model: BaseModel, recipe: Hyperparameters, estimate: Mapping[str, object], is_on_cpu: bool
) -> QuotedRehearsal | None:
    """Return the same from a job's stored estimate, with the figure if it is known."""
    try:
        plan = msgspec.convert(estimate.get("plan"), TrainingPlan)
        computed_bytes = msgspec.convert(estimate.get("peak_bytes"), int)
    except msgspec.ValidationError:
        return None
    found = _rehearsal(base_model, recipe, plan, computed_bytes, is_on_cpu)
    return with_figures([found])[0] if found else None


def with_figures(rehearsals: Iterable[QuotedRehearsal | None]) -> list[QuotedRehearsal | None]:
    """Return the rehearsals with the figures that workers have reported, by one query."""
    listed = list(rehearsals)
    digests = {each.digest for each in listed if each}
    if not digests:
        return listed
    rows = fetch_prepared(_REPORTS, {"digests": list(digests), "kept": KEPT})
    reports = {digest: msgspec.json.decode(report, type=MemoryReport) for digest, report in rows}
    return [
        replace(each, peak_bytes=reported_peak(each.request, reports[each.digest]))
        if each and each.digest in reports
        else each
        for each in listed
    ]


def _rehearsal(
    base_model: BaseModel, recipe: Hyperparameters, plan: TrainingPlan, computed_bytes: int, is_on_cpu: bool
) -> QuotedRehearsal | None:
    parallelism, config = _TRACED.get(plan.parallelism), base_model.config
    if parallelism is None or plan.cpu_offload or "model_type" not in config or "n_layers" in config:
        return None
    # Only what memory depends on: recipes that differ in other fields share the figure.
    shaping = Hyperparameters(
        method=recipe.method,
        objective=recipe.objective,
        gradient_accumulation_steps=min(2, plan.gradient_accumulation_steps),
        gradient_checkpointing=plan.gradient_checkpointing,
        lora_rank=recipe.lora_rank,
        lora_dropout=0.05 if recipe.lora_dropout else 0.0,
        target_modules=tuple(sorted(recipe.target_modules)),
        quantization=recipe.quantization,
        use_dora=recipe.use_dora,
        use_rslora=recipe.use_rslora,
        packing=recipe.packing,
    )
    request = MemoryRequest(
        config=dict(config),
        hyperparameters=shaping,
        rows=plan.micro_batch_size,
        row_tokens=plan.max_length,
        gpu_count=plan.shards,
        parallelism=parallelism,
        is_on_cpu=is_on_cpu,
    )
    return QuotedRehearsal(request, computed_bytes)


def reported_peak(request: MemoryRequest, report: MemoryReport) -> int:
    """Return the peak of a reported figure with the constants of the device, which the worker does not decide."""
    return device_bytes(
        allocated=report.allocated_bytes,
        resting=min(report.resting_bytes, report.allocated_bytes),
        gpu_count=request.gpu_count,
        is_cpu=request.is_on_cpu,
    )
