"""Measurements that a pool still needs, and storage of those that its workers report."""

import datetime

import msgspec
from django.db.models import Q

from apps.catalog.models import BaseModel
from apps.catalog.references import base_model_ref
from apps.contracts.hyperparameters import Hyperparameters, Method
from apps.contracts.worker_api import ProbeReport, ProbeRequest
from apps.core.database.clock import db_now
from apps.core.errors import InvalidValue, NotFound, PermissionDenied, RateLimited
from apps.finetuning.models import GpuPool, ThroughputProbe, Worker, WorkerKind
from apps.finetuning.pools import operations

_MAX_PROBE_TOKENS = 512
_MAX_SHAPE_NAME = 60
_MAX_REPORT_BYTES = 64 * 1024  # each is kept, with its config.json
_MAX_A_DAY = 1_000  # per worker: a calibration's grid has some hundred points of ten seconds each
_LONGEST_MEASUREMENT = datetime.timedelta(minutes=30)
_PROBED = (Method.LORA, Method.QLORA)
# Full training holds weights, gradients and two moments in float32; as much room is left for activations.
_FULL_TRAINING_BYTES = 2 * 16  # of each parameter


def list_missing(*, worker: Worker, about_to_measure: str = "") -> tuple[ProbeRequest, ...]:
    """Return the missing measurements: each installed base model and probed method without a row in the worker's pool.

    Full training is measured on CPUs alone: on GPUs, its duration follows from LoRA's and the data sheet.

    Each worker measures each model of a hub once, so that it has downloaded the model before a job needs it. Those of a
    method that the pool has not measured at all come first.

    The hub's token of a gated model comes only with the base model that the worker is about to measure. A machine that
    accepts no work measures nothing. Raises RateLimited for a token while another measurement is open.
    """
    users = GpuPool.objects.filter(Q(pk=worker.pool_id) | Q(borrows_from=worker.pool_id))
    if not (worker.takes_work and users.filter(is_open=True).exists()):
        return ()
    measured = set(ThroughputProbe.objects.filter(pool=worker.pool).values_list("base_model_id", "method"))
    models = BaseModel.objects.filter(is_installed=True, retired_at=None).order_by("parameter_count")
    held = set(ThroughputProbe.objects.filter(worker=worker).values_list("base_model_id", flat=True))
    missing = [
        (each, method)
        for each in models
        for method in _probed(each, worker.pool)
        if (each.pk, method.value) not in measured or (method is Method.LORA and not each.path and each.pk not in held)
    ]
    if any(each.is_gated and each.pk == about_to_measure for each, _ in missing):
        # Only if its last one was reported or is old: a worker could collect every token otherwise.
        now = db_now()
        is_free = Q(measuring=None) | Q(measuring=about_to_measure) | Q(measuring_since__lt=now - _LONGEST_MEASUREMENT)
        opened = Worker.objects.filter(is_free, pk=worker.pk).update(measuring=about_to_measure, measuring_since=now)
        if not opened:
            message = "A worker measures one gated base model at a time: report it first, or wait half an hour."
            raise RateLimited(message, retry_after_seconds=60)
    known = {method for base_model_id, method in measured if base_model_id}
    first = set(_PROBED) - known  # without its own measurement, full training is quoted by that of LoRA
    requests = [
        _request(each, method, has_token=each.pk == about_to_measure, is_first=method in first)
        for each, method in missing
    ]
    return tuple(sorted(requests, key=lambda request: not request.is_first))


def _probed(base_model: BaseModel, pool: GpuPool) -> tuple[Method, ...]:
    is_small = _FULL_TRAINING_BYTES * base_model.parameter_count <= pool.memory_bytes
    return (*_PROBED, Method.FULL) if pool.gpu_type_id == "cpu" and is_small else _PROBED


def _request(base_model: BaseModel, method: Method, *, has_token: bool, is_first: bool) -> ProbeRequest:
    recipe = base_model.default_recipe
    usual = recipe.get("typical_row_tokens", _MAX_PROBE_TOKENS)
    return ProbeRequest(
        base_model=base_model_ref(base_model, has_token=has_token),
        method=method,
        micro_batch_size=recipe.get("batch_size", Hyperparameters().batch_size),
        sequence_length=min(usual, base_model.context_length),
        lora_rank=recipe.get("lora_rank", Hyperparameters().lora_rank),
        is_first=is_first,
    )


def record(*, worker: Worker, report: ProbeReport) -> None:
    """Store a trainer's report.

    Raises NotFound for a base model that is not in the catalogue, InvalidValue for another method or GPU, or without a
    base model or a valid shape, PermissionDenied for another kind of worker, RateLimited for a worker that reports more
    than a machine can measure.
    """
    if worker.kind != WorkerKind.TRAINER:
        raise PermissionDenied("A trainer measures; a replica does not.")
    if report.method not in list(Method):
        raise InvalidValue(f"method is one of {', '.join(Method)}.", param="method")
    if report.gpu_key != worker.pool.gpu_type_id:  # no quote can be made of it
        raise InvalidValue(
            f"gpu_key must be that of the worker's pool, {worker.pool.gpu_type_id}. Set ANNEAL_GPU_KEY to it, "
            "or enrol the machine in the pool of its GPU.",
            param="gpu_key",
        )
    if len(msgspec.json.encode(report)) > _MAX_REPORT_BYTES:
        raise InvalidValue(f"A measurement has at most {_MAX_REPORT_BYTES // 1024} KiB.", param="config")
    a_day_ago = db_now() - datetime.timedelta(days=1)
    if ThroughputProbe.objects.filter(worker=worker, measured_at__gte=a_day_ago).count() >= _MAX_A_DAY:
        raise RateLimited(f"A worker reports at most {_MAX_A_DAY} measurements a day.", retry_after_seconds=3600)
    operations.record_probe(
        worker=worker,
        base_model=_base_model(report),
        shape=report.shape,
        method=report.method,
        report=msgspec.to_builtins(report),
    )
    Worker.objects.filter(pk=worker.pk, measuring=report.base_model_id).update(measuring=None)


def _base_model(report: ProbeReport) -> BaseModel | None:
    """Return the measured model; None for made-up weights, which the report describes by their shape."""
    if not report.base_model_id:
        if not report.shape or len(report.shape) > _MAX_SHAPE_NAME or not report.config:
            raise InvalidValue("A measurement is of a base model, or of a shape with its config.", param="shape")
        return None
    base_model = BaseModel.objects.filter(pk=report.base_model_id).first()
    if base_model is None:
        raise NotFound("No base model has this id.", param="base_model_id")
    return base_model
