"""What the estimator reads, in its own types: the job, its base model, the pools and the measured speeds."""

from functools import cache
from pathlib import Path

import msgspec
from django.utils.translation import gettext

from apps.catalog.models import BaseModel
from apps.contracts.adapter_files import adapted_modules
from apps.contracts.hyperparameters import Hyperparameters, Objective
from apps.contracts.worker_api import PROBE_TRAINED_SHARE, ProbeReport
from apps.core.errors import InvalidValue
from apps.core.messages.translation import translated
from apps.estimates.durations import step_count
from apps.estimates.errors import EstimateError
from apps.estimates.models import architectures
from apps.estimates.physics import gpus
from apps.estimates.physics.throughput import ProbeRow, SpeedSource
from apps.estimates.placement import Task, task_of
from apps.estimates.published import sources
from apps.estimates.quote import PoolFacts, QuoteRequest
from apps.finetuning.lifecycle import LEASE_SECONDS, MAX_CHECKPOINT_SECONDS, REAPER_SECONDS
from apps.finetuning.models import GpuPool, ThroughputProbe
from apps.finetuning.quotes.pool_facts import PoolState
from apps.finetuning.recipes.training_data import TrainingData
from apps.finetuning.usage.charges import MINIMUM_SECONDS

_WEIGHT_BYTES = 2  # of each parameter in a hub repository, by any method
_NOTICED_SECONDS = LEASE_SECONDS + REAPER_SECONDS / 2  # from the loss of a machine until it is noticed
_DATA = Path(__file__).resolve().parents[2] / "catalog" / "data"
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


class NothingTrained(InvalidValue):
    """Every row, cut to the recipe's longest row, loses its trained tokens; the message gives the least length."""

    code = "no_trainable_tokens"


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


def task_of_job(base_model: BaseModel, data: TrainingData, recipe: Hyperparameters, *, node_count: int) -> Task:
    """Return what the job asks of any pool.

    Raises CannotEstimate, NothingTrained and InvalidValue, which name the invalid field.
    """
    if recipe.max_length < data.least_length:
        raise NothingTrained(
            gettext(
                "No row would train anything: no assistant's answer begins within its first %(max_length)s tokens. "
                "Set max_length to %(least)s or more."
            )
            % {"max_length": f"{recipe.max_length:,}", "least": f"{data.least_length:,}"},
            param="hyperparameters.max_length",
            least_max_length=data.least_length,
        )
    if not data.tokens or not data.trained_tokens or not data.rows:
        raise InvalidValue(
            gettext(
                "The file has no trained tokens: every row needs an assistant's answer that begins within its first "
                "%(max_length)s tokens."
            )
            % {"max_length": f"{recipe.max_length:,}"},
            param="training_file",
            code="invalid_training_file",
        )
    try:
        request = QuoteRequest(
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
            node_count=node_count,
            splits_rows=data.is_split,
            has_reference=recipe.objective is Objective.DPO,
            row_lengths=data.row_lengths,
            evaluations=_evaluations(recipe, data) if data.held_out_tokens else 0,
            evaluation_tokens=_evaluation_tokens(recipe, data),
            held_out_rows=data.held_out_rows,
            checkpoints=None,
        )
        return task_of(request)
    except EstimateError as error:
        raise as_invalid(error) from error


def _evaluation_tokens(recipe: Hyperparameters, data: TrainingData) -> int:
    """Return the tokens that each evaluation reads: of a large validation file, a part."""
    steps = step_count(rows=data.rows, batch_size=recipe.batch_size, epochs=1)
    read = min(recipe.evaluated_rows(steps_per_epoch=steps), data.held_out_rows)
    return round(data.held_out_tokens * read / max(data.held_out_rows, 1))


def _evaluations(recipe: Hyperparameters, data: TrainingData) -> int:
    """Return the number of evaluations of the held-out rows."""
    if recipe.eval_steps is None:
        return recipe.epochs
    steps = step_count(rows=data.rows, batch_size=recipe.batch_size, epochs=recipe.epochs)
    return -(-steps // recipe.eval_steps)


def as_invalid(error: EstimateError) -> InvalidValue:
    """Return the error with the public name of the invalid field."""
    return InvalidValue(translated(f"{error}."), param=_PARAMS.get(error.field, f"hyperparameters.{error.field}"))


def facts_of(state: PoolState, base_model: BaseModel, memory_factor: float = 1.0) -> PoolFacts:
    """Return what the estimator needs of a pool. `memory_factor` raises its figures of memory."""
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
        has_queue=state.has_queue,
        further_gpus=(state.growth.gpus,) * len(state.growth.ready_after),
        start_seconds=max(state.growth.ready_after, default=0.0),
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
    return msgspec.structs.replace(gpu_types()[pool.gpu_type_id], memory_bytes=pool.memory_bytes)


@cache
def published_speeds() -> tuple[ProbeRow, ...]:
    """Return the speeds that others published."""
    return sources.load(_DATA)


@cache
def gpu_types() -> dict[str, gpus.Gpu]:
    """Return the GPU types of the catalogue by their keys."""
    return gpus.load(_DATA / "gpus.json")
