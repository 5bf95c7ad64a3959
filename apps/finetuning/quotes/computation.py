"""Quotes of one job on every pool: its needs, time and cost there, and why it may not start."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from apps.catalog.models import BaseModel, PriceRule
from apps.contracts.hyperparameters import Hyperparameters
from apps.core.money import rated
from apps.estimates.errors import EstimateError
from apps.estimates.fixes import Fix
from apps.estimates.machines import shared_evenly
from apps.estimates.physics import gpus
from apps.estimates.placement import Task
from apps.estimates.quote import Estimate, PoolFacts, quote_placements
from apps.finetuning.quotes.inputs import as_invalid, facts_of, gpu_types, published_speeds, task_of_job
from apps.finetuning.quotes.obstacles import block_reason, require_machines
from apps.finetuning.quotes.options import PoolQuote, add_remedies, by_use
from apps.finetuning.quotes.pool_facts import OpenPools, PoolState
from apps.finetuning.quotes.rehearsals import rehearsal_of, with_figures
from apps.finetuning.recipes.training_data import TrainingData
from apps.finetuning.usage.charges import least_seconds

_CAP_OVER_P90 = 1.25  # margin for a slow day before a run pauses at its cap
_GPU_COUNTS = (1, 2, 4, 8)  # of one machine; a count must divide the batch, or the batch would change


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
    task = task_of_job(base_model, data, hyperparameters, node_count=node_count)
    states = pools.states(family=task.request.architecture.model_type, method=task.request.method)
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


def snapshot(estimate: Estimate) -> dict[str, object]:
    """Return the estimate as plain JSON values, to store with the job."""
    return msgspec.to_builtins(estimate)


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
    facts = facts_of(state, base_model, memory_factor)
    counts = tuple(count for count in _GPU_COUNTS if task.request.batch_size % (count * node_count) == 0) or (1,)
    if gpu_count or facts.gpu.is_cpu:
        counts = (gpu_count // node_count if gpu_count else 1,)
    try:
        estimates = [
            estimate
            for each in _by_machines(facts, counts, node_count)
            for estimate in quote_placements(
                task=task,
                pool=each,
                published=published_speeds(),
                other_gpus=tuple(gpu_types().values()),
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
