"""Quotes of one job on every pool: its needs, time and cost there, and why it may not start."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from django.utils.translation import gettext

from apps.catalog.models import BaseModel, PriceRule
from apps.contracts.adapter_files import adapted_modules
from apps.contracts.runs import Hyperparameters, Objective
from apps.contracts.worker_api import PROBE_TRAINED_SHARE, ProbeReport
from apps.core.errors import InvalidValue
from apps.core.messages.translation import translated
from apps.core.money import rated
from apps.estimates.durations import step_count
from apps.estimates.errors import EstimateError
from apps.estimates.fixes import Fix
from apps.estimates.machines import shared_evenly
from apps.estimates.models import architectures
from apps.estimates.physics import gpus
from apps.estimates.physics.throughput import ProbeRow, SpeedSource
from apps.estimates.placement import Task, task_of
from apps.estimates.published import sources
from apps.estimates.quote import Estimate, PoolFacts, QuoteRequest, quote_placements
from apps.finetuning.lifecycle import LEASE_SECONDS, MAX_CHECKPOINT_SECONDS, REAPER_SECONDS
from apps.finetuning.models import GpuPool, ThroughputProbe
from apps.finetuning.quotes.obstacles import block_reason, require_machines
from apps.finetuning.quotes.options import PoolQuote, add_remedies, by_use
from apps.finetuning.quotes.pool_facts import OpenPools, PoolState
from apps.finetuning.quotes.rehearsals import rehearsal_of, with_figures
from apps.finetuning.recipes.training_data import TrainingData
from apps.finetuning.usage.charges import MINIMUM_SECONDS, least_seconds

_CAP_OVER_P90 = 1.25  # margin for a slow day before a run pauses at its cap
_WEIGHT_BYTES = 2  # of each parameter in a hub repository, by any method
_NOTICED_SECONDS = LEASE_SECONDS + REAPER_SECONDS / 2  # from the loss of a machine until it is noticed
_DATA = Path(__file__).resolve().parents[2] / "catalog" / "data"
GPU_COUNTS = (1, 2, 4, 8)  # of one machine; a count must divide the batch, or the batch would change
# The estimator's field name -> the request's field; all others are hyperparameters.
_PARAMS = {
    "rows": "training_file",
    "tokens": "training_file",
    "trained_tokens": "training_file",
    "longest_row_tokens": "training_file",
    "row_lengths": "training_file",
    "method": "quantization",
    "gpu": "compute.pool",
}


class CannotEstimate(InvalidValue):
    """We cannot compute the memory and speed of the base model's family."""

    code = "unsupported_architecture"


def quote_pools(
    *,
    base_model: BaseModel,
    data: TrainingData,
    hyperparameters: Hyperparameters,
    pools: OpenPools,
    with_ways: bool = True,
    node_count: int = 1,
) -> list[PoolQuote]:
    """Return a quote for each open pool and sensible number of GPUs, launchable ones first, then by cost.

    `node_count` machines of the pool share the GPUs.
    `with_ways` adds the rehearsed memory, and to each quote that does not fit the changes that make it fit. Raises
    CannotEstimate and InvalidValue, which name the invalid field.
    """
    require_machines(hyperparameters, node_count)
    request = _request(base_model, data, hyperparameters, is_replicated=node_count > 1)
    task = _task(request)
    states = pools.states(family=request.architecture.model_type, method=request.method)
    quotes = [
        quoted for state in states for quoted in _quote_pool(state, task, base_model, with_ways, node_count=node_count)
    ]
    if with_ways:
        quotes = _with_rehearsals(quotes, base_model, hyperparameters)
        if any(quoted.is_oversized for quoted in quotes):
            by_pool = {state.pool.pk: state for state in states}
            smaller = [
                _smaller(quoted, by_pool[quoted.pool.pk], task, base_model) if quoted.is_oversized else quoted
                for quoted in quotes
            ]
            quotes = [
                _refused(quoted) if quoted.is_oversized and quoted.estimate.fits else quoted
                for quoted in _with_rehearsals(smaller, base_model, hyperparameters)
            ]
        quotes = add_remedies(quotes)
    return sorted(quotes, key=by_use)


def with_plan(hyperparameters: Hyperparameters, estimate: Estimate) -> Hyperparameters:
    """Return the recipe with the micro-batch and checkpointing that fit in the estimate."""
    return msgspec.structs.replace(
        hyperparameters,
        gradient_accumulation_steps=estimate.plan.gradient_accumulation_steps,
        gradient_checkpointing=estimate.plan.gradient_checkpointing,
    )


def architecture_of(base_model: BaseModel) -> architectures.Architecture:
    """Return the model's dimensions from its config.json, or from its seeded catalogue row. Raises CannotEstimate."""
    config = base_model.config
    try:
        if "n_layers" in config:
            return architectures.from_catalog_row(config)
        return architectures.from_config(config)
    except architectures.ArchitectureError as error:
        raise CannotEstimate(
            gettext("%(display_name)s cannot be estimated: %(error)s")
            % {"display_name": base_model.display_name, "error": translated(str(error))},
            param="model",
        ) from error


def snapshot(estimate: Estimate) -> dict[str, object]:
    """Return the estimate as plain JSON values, to store with the job."""
    return msgspec.to_builtins(estimate)


# --- the request ------------------------------------------------------------------------------------------------------


def _request(
    base_model: BaseModel, data: TrainingData, recipe: Hyperparameters, *, is_replicated: bool
) -> QuoteRequest:
    if not data.tokens or not data.trained_tokens or not data.rows:
        raise InvalidValue(
            gettext(
                "The file has no trained tokens: every row needs an assistant's answer, and within "
                "%(max_length)s tokens it must be reached."
            )
            % {"max_length": f"{recipe.max_length:,}"},
            param="training_file",
            code="invalid_training_file",
        )
    try:
        return QuoteRequest(
            architecture=architecture_of(base_model),
            method=recipe.method,
            max_length=recipe.max_length,
            batch_size=recipe.batch_size,
            epochs=recipe.epochs,
            rows=data.rows,
            tokens=data.tokens,
            trained_tokens=data.trained_tokens,
            longest_row_tokens=data.longest_row_tokens,
            lora_rank=recipe.lora_rank,
            lora_dropout=recipe.lora_dropout,
            target_modules=recipe.target_modules,
            use_dora=recipe.use_dora,
            use_rslora=recipe.use_rslora,
            cpu_offload=recipe.cpu_offload,
            pads_rows=recipe.packing is False,
            is_preference=recipe.objective.is_preference,
            is_replicated=is_replicated,
            splits_rows=data.is_split,
            has_reference=recipe.objective is Objective.DPO,
            row_lengths=data.row_lengths,
            evaluations=_evaluations(recipe, data) if data.evaluation_tokens else 0,
            evaluation_tokens=data.evaluation_tokens,
            checkpoints=None,
        )
    except EstimateError as error:
        raise as_invalid(error) from error


def _evaluations(recipe: Hyperparameters, data: TrainingData) -> int:
    """Return the number of evaluations of the held-out rows."""
    if recipe.eval_steps is None:
        return recipe.epochs
    steps = step_count(rows=data.rows, batch_size=recipe.batch_size, epochs=recipe.epochs)
    return -(-steps // recipe.eval_steps)


def _task(request: QuoteRequest) -> Task:
    try:
        return task_of(request)
    except EstimateError as error:
        raise as_invalid(error) from error


def as_invalid(error: EstimateError) -> InvalidValue:
    """Return the error with the public name of the invalid field."""
    return InvalidValue(translated(f"{error}."), param=_PARAMS.get(error.field, f"hyperparameters.{error.field}"))


def _facts(state: PoolState, base_model: BaseModel, memory_factor: float = 1.0) -> PoolFacts:
    report = msgspec.convert(state.probe.report, ProbeReport) if state.probe else None
    price, startup_seconds = state.price, report.startup_seconds if report else 0.0
    return PoolFacts(
        gpu=gpu_of(state.pool),
        memory_factor=memory_factor,
        probe=probe_row(state.probe, report) if state.probe and report else None,
        price_nano=price.price_nano * 1000 if price else None,  # a rule's price is for `per` milliseconds
        price_per_seconds=price.per if price else 3600,
        live_workers=state.live_workers,
        seconds_ahead=state.seconds_ahead,
        startup_seconds=startup_seconds,
        correction=state.correction,
        gpus_per_worker=max(1, state.gpus_per_worker),
        worker_gpus=state.worker_gpus,
        ahead_by_gpus=state.ahead_by_gpus,
        free_gpus=state.free_gpus,
        host_memory_bytes=state.host_memory_bytes,
        is_spot=state.pool.is_spot,
        interruptions_per_hour=state.pool.interruptions_per_hour,
        restart_seconds=_NOTICED_SECONDS + startup_seconds,
        checkpoint_seconds_apart=MAX_CHECKPOINT_SECONDS,
        download_bytes=0 if base_model.path or state.has_weights else _WEIGHT_BYTES * base_model.parameter_count,
        bills_redone_work=False,  # an attempt is billed up to its last durable step
        minimum_seconds=MINIMUM_SECONDS,
    )


def probe_row(probe: ThroughputProbe, report: ProbeReport) -> ProbeRow:
    """Return a base model's measured speed as the estimator's input. Raises ValueError for made-up weights."""
    if probe.base_model is None:
        raise ValueError("a point on made-up weights is no base model's speed")
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
        target_modules=adapted_modules(probe.base_model.config),
        waited_share=report.waited_share,
        trained_share=PROBE_TRAINED_SHARE,
        source=source,
    )


def gpu_of(pool: GpuPool) -> gpus.Gpu:
    """Return the pool's GPU type, with the memory that one job may use."""
    if pool.gpu_type_id == "cpu":
        return gpus.cpu(memory_bytes=pool.memory_bytes)
    return msgspec.structs.replace(_gpu_types()[pool.gpu_type_id], memory_bytes=pool.memory_bytes)


# --- the quotes -------------------------------------------------------------------------------------------------------


def _quote_pool(
    state: PoolState,
    task: Task,
    base_model: BaseModel,
    with_fixes: bool,
    *,
    memory_factor: float = 1.0,
    gpu_count: int | None = None,
    node_count: int = 1,
) -> list[PoolQuote]:
    facts = _facts(state, base_model, memory_factor)
    counts = tuple(count for count in GPU_COUNTS if task.request.batch_size % (count * node_count) == 0) or (1,)
    if gpu_count or facts.gpu.is_cpu:
        counts = (gpu_count // node_count if gpu_count else 1,)
    try:
        estimates = [
            estimate
            for each in _by_machines(facts, counts, node_count)
            for estimate in quote_placements(
                task=task,
                pool=each,
                published=_published(),
                other_gpus=tuple(_gpu_types().values()),
                gpu_counts=counts if node_count == 1 else (each.max_gpu_count or node_count,),
                with_fixes=with_fixes,
            )
        ]
    except EstimateError as error:
        raise as_invalid(error) from error
    return [
        PoolQuote(
            pool=state.pool,
            estimate=estimate,
            price=state.price,
            live_workers=state.live_workers,
            cap_nano=_cap_nano(estimate, state.price),
            block_reason=block_reason(state, estimate, base_model, node_count),
            correction=state.correction,
            node_count=node_count,
            joining_workers=len(state.joining_gpus),
        )
        for estimate in _sensible(estimates)
    ]


def _by_machines(facts: PoolFacts, counts: Sequence[int], node_count: int) -> tuple[PoolFacts, ...]:
    """Return the pool's facts for each number of GPUs of a machine, if several machines share the job."""
    if node_count == 1:
        return (facts,)
    return tuple(shared_evenly(facts, gpu_count=count * node_count, node_count=node_count) for count in counts)


def _with_rehearsals(quotes: list[PoolQuote], base_model: BaseModel, recipe: Hyperparameters) -> list[PoolQuote]:
    """Return the quotes with what to rehearse of those that fit, and the figures that are known."""
    asked = [
        rehearsal_of(
            base_model=base_model,
            recipe=recipe,
            estimate=quoted.estimate,
            is_on_cpu=quoted.pool.gpu_type_id == "cpu",
        )
        if quoted.estimate.fits
        else quoted.rehearsal
        for quoted in quotes
    ]
    return [replace(quoted, rehearsal=found) for quoted, found in zip(quotes, with_figures(asked), strict=True)]


def _smaller(quoted: PoolQuote, state: PoolState, task: Task, base_model: BaseModel) -> PoolQuote:
    """Quote the job again with fewer rows at a time, as its rehearsal needs more than the GPU holds.

    The formula's figures count by the factor by which the one of this job was too low. The result has the formula's own
    figures again, because finished runs are compared with those.
    """
    estimate = quoted.estimate
    factor = _rehearsed_bytes(quoted) / estimate.peak_bytes
    [other] = _quote_pool(
        state,
        task,
        base_model,
        True,
        memory_factor=factor,
        gpu_count=estimate.gpu_count,
        node_count=quoted.node_count,
    )
    if not other.estimate.fits:
        return _refused(quoted, fixes=other.estimate.fixes)
    found = other.estimate
    low, peak, high = (round(each / factor) for each in (found.peak_bytes_p10, found.peak_bytes, found.peak_bytes_p90))
    real = msgspec.structs.replace(
        found,
        peak_bytes_p10=low,
        peak_bytes=peak,
        peak_bytes_p90=high,
        headroom_bytes=found.capacity_bytes - peak,
    )
    return replace(other, estimate=real)


def _refused(quoted: PoolQuote, *, fixes: tuple[Fix, ...] = ()) -> PoolQuote:
    """Return the quote of a job that does not fit after all: without times and cost, as those of other such jobs."""
    needed, held = _rehearsed_bytes(quoted) / gpus.GIB, quoted.estimate.capacity_bytes / gpus.GIB
    reason = f"The rehearsal needed {needed:,.1f} GiB; {quoted.pool.gpu_type.name} holds {held:,.1f} GiB."
    unknown: dict[str, Any] = {field.name: None for field in msgspec.structs.fields(Estimate) if field.default is None}
    estimate = msgspec.structs.replace(
        quoted.estimate, fits=False, reason=reason, fixes=fixes, time_parts=(), **unknown
    )
    return replace(quoted, estimate=estimate, block_reason=reason, cap_nano=None)


def _rehearsed_bytes(quoted: PoolQuote) -> int:
    return (quoted.rehearsal.peak_bytes if quoted.rehearsal else None) or quoted.estimate.peak_bytes


def _sensible(estimates: Sequence[Estimate]) -> list[Estimate]:
    """Keep one GPU, even if it does not fit, to show what is missing; keep more GPUs if the job fits and is faster."""
    kept = list(estimates[:1])
    for estimate in estimates[1:]:
        before = min((each.train_seconds_p50 for each in kept if each.train_seconds_p50 is not None), default=math.inf)
        is_more = estimate.gpu_count > kept[-1].gpu_count
        if is_more and estimate.fits and (estimate.train_seconds_p50 or 0.0) < before:
            kept.append(estimate)
    return kept


def _cap_nano(estimate: Estimate, price: PriceRule | None) -> int | None:
    if price is None or estimate.billed_seconds_p90 is None:
        return None
    step_seconds = (estimate.train_seconds_p90 or 0.0) / max(estimate.steps, 1)
    seconds = max(math.ceil(estimate.billed_seconds_p90 * _CAP_OVER_P90), least_seconds(step_seconds=step_seconds))
    cap_nano = rated(quantity=seconds * estimate.gpu_count * 1000, price_nano=price.price_nano, per=price.per)
    return max(cap_nano, 1)  # a free pool still needs a hold above zero


@cache
def _published() -> tuple[ProbeRow, ...]:
    return sources.load(_DATA)


@cache
def _gpu_types() -> dict[str, gpus.Gpu]:
    return gpus.load(_DATA / "gpus.json")
