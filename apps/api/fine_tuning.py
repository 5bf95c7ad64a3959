"""/v1/fine_tuning/jobs: OpenAI's surface, with our own fields beside theirs.

Ours, sent in `extra_body`: `lora {rank, alpha, dropout, target_modules}`, `quantization "nf4"` (QLoRA),
`recipe {learning_rate, epochs, …}` with the ecosystem's names, `compute {pool}`, `budget {max_cost_usd}`.
"""

import hashlib
from decimal import Decimal, InvalidOperation
from typing import Any

import msgspec
from rest_framework.request import Request
from rest_framework.response import Response

from apps.api.pagination import page
from apps.api.parsers import read_body
from apps.api.views import ApiView
from apps.contracts.runs import Method
from apps.core.clock import db_now
from apps.core.errors import InvalidValue
from apps.core.money import nano_to_usd, usd_to_nano
from apps.finetuning import operations, queries
from apps.finetuning.models import Checkpoint, FineTuningJob, JobEvent
from apps.finetuning.operations import JobRequest
from apps.finetuning.scheduling import queue_position

Auto = Any  # a number, or "auto"


class OpenAiHyperparameters(msgspec.Struct, forbid_unknown_fields=True):
    n_epochs: Auto = "auto"
    batch_size: Auto = "auto"
    learning_rate_multiplier: Auto = "auto"


class Supervised(msgspec.Struct, forbid_unknown_fields=True):
    hyperparameters: OpenAiHyperparameters = msgspec.field(default_factory=OpenAiHyperparameters)


class MethodChoice(msgspec.Struct):
    type: str = "supervised"
    supervised: Supervised | None = None


class LoraChoice(msgspec.Struct, forbid_unknown_fields=True):
    rank: int | None = None
    alpha: int | None = None
    dropout: float | None = None
    target_modules: tuple[str, ...] | None = None


class ComputeChoice(msgspec.Struct, forbid_unknown_fields=True):
    pool: str | None = None


class BudgetChoice(msgspec.Struct, forbid_unknown_fields=True):
    max_cost_usd: str | int | float | None = None


_LONGEST_KEY = 200


class CreateJob(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /v1/fine_tuning/jobs."""

    model: str
    training_file: str
    validation_file: str | None = None
    suffix: str | None = None
    seed: int | None = None
    metadata: dict[str, str] | None = None
    integrations: list[dict[str, Any]] | None = None
    hyperparameters: OpenAiHyperparameters | None = None
    method: MethodChoice | None = None
    lora: LoraChoice | None = None
    quantization: str | None = None
    recipe: dict[str, Any] | None = None
    compute: ComputeChoice | None = None
    budget: BudgetChoice | None = None


class JobList(ApiView):
    """List jobs, newest first; create one."""

    required_scope = {"GET": "view", "POST": "job.write"}

    def get(self, request: Request) -> Response:
        rows = queries.list_jobs(organization=self.organization)
        rows = _with_metadata(rows, request)
        return Response(page(request, rows, job_object))

    def post(self, request: Request) -> Response:
        asked = parse_request(
            request.data,
            idempotency_key=_idempotency_key(request),
            # OpenAI's SDK sends no such key, but counts its retries: one of them must not become a second job.
            is_retry=request.headers.get("X-Stainless-Retry-Count", "0") not in ("", "0"),
        )
        job = operations.create_job(organization=self.organization, request=asked, by=self.actor, now=db_now())
        return Response(job_object(queries.get_job(organization=self.organization, id=job.pk)))


class JobDetail(ApiView):
    required_scope = {"GET": "view"}

    def get(self, request: Request, job_id: str) -> Response:
        return Response(job_object(queries.get_job(organization=self.organization, id=job_id)))


class JobAction(ApiView):
    """POST cancel, pause or resume; each answers with the job."""

    required_scope = {"POST": "job.write"}
    action = ""

    def post(self, request: Request, job_id: str) -> Response:
        job = queries.get_job(organization=self.organization, id=job_id)
        act = {
            "cancel": operations.request_cancellation,
            "pause": operations.request_pause,
            "resume": operations.resume,
        }[self.action]
        act(job=job, by=self.actor, now=db_now())
        return Response(job_object(queries.get_job(organization=self.organization, id=job_id)))


class JobEvents(ApiView):
    required_scope = {"GET": "view"}

    def get(self, request: Request, job_id: str) -> Response:
        job = queries.get_job(organization=self.organization, id=job_id)
        return Response(page(request, queries.list_events(job=job), event_object, order=("-sequence", "-id")))


class JobCheckpoints(ApiView):
    required_scope = {"GET": "view"}

    def get(self, request: Request, job_id: str) -> Response:
        job = queries.get_job(organization=self.organization, id=job_id)
        rows = queries.list_checkpoints(job=job)
        return Response(page(request, rows, checkpoint_object, default_limit=10, order=("-step", "-id")))


def _idempotency_key(request: Request) -> str | None:
    key = request.headers.get("Idempotency-Key")
    if key is not None and len(key) > _LONGEST_KEY:
        raise InvalidValue(f"Idempotency-Key has at most {_LONGEST_KEY} characters.", param="Idempotency-Key")
    return key


def parse_request(data: Any, *, idempotency_key: str | None = None, is_retry: bool = False) -> JobRequest:
    """Return the domain's request. Raises InvalidValue naming the field."""
    body = read_body(data, CreateJob)
    if body.method is not None and body.method.type != "supervised":
        raise InvalidValue(
            f"method.type {body.method.type!r} is not offered here: use 'supervised'.", param="method.type"
        )
    if body.integrations:
        raise InvalidValue("No integration is available on this platform.", param="integrations")
    method = parse_method(body.quantization)
    return JobRequest(
        base_model=body.model,
        training_file=body.training_file,
        validation_file=body.validation_file,
        method=method,
        hyperparameters=_hyperparameters(body),
        pool=body.compute.pool if body.compute else None,
        spend_cap_nano=_cap_nano(body.budget),
        suffix=body.suffix or "",
        seed=body.seed,
        metadata=body.metadata or {},
        requested={"method": msgspec.to_builtins(body.method) if body.method else None},
        idempotency_key=idempotency_key,
        fingerprint=hashlib.sha256(msgspec.json.encode(data, order="sorted")).hexdigest(),
        is_retry=is_retry,
    )


def parse_method(quantization: str | None) -> Method:
    if quantization not in (None, "none", "nf4"):
        raise InvalidValue("quantization must be 'nf4' (QLoRA) or left out (LoRA).", param="quantization")
    return Method.QLORA if quantization == "nf4" else Method.LORA


def _hyperparameters(body: CreateJob) -> dict[str, Any]:
    supervised = body.method.supervised if body.method else None
    theirs = supervised.hyperparameters if supervised else body.hyperparameters or OpenAiHyperparameters()
    lora = body.lora or LoraChoice()
    return {
        "epochs": theirs.n_epochs,
        "batch_size": theirs.batch_size,
        "learning_rate_multiplier": theirs.learning_rate_multiplier,
        "lora_rank": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": lora.target_modules,
    } | (body.recipe or {})


def _cap_nano(budget: BudgetChoice | None) -> int | None:
    if budget is None or budget.max_cost_usd is None:
        return None
    try:
        return usd_to_nano(Decimal(str(budget.max_cost_usd)))
    except (InvalidOperation, ValueError) as error:
        raise InvalidValue(
            "max_cost_usd is an amount in dollars, such as 2.50.", param="budget.max_cost_usd"
        ) from error


def _with_metadata(rows: Any, request: Request) -> Any:
    if request.query_params.get("metadata") == "null":
        return rows.filter(metadata={})
    wanted = {
        name[len("metadata[") : -1]: value
        for name, value in request.query_params.items()
        if name.startswith("metadata[") and name.endswith("]")
    }
    return rows.filter(metadata__contains=wanted) if wanted else rows


# --- objects ----------------------------------------------------------------------------------------------------


def job_object(job: FineTuningJob) -> dict[str, Any]:
    """Return the job as OpenAI's object, with what we know beyond it."""
    recipe = job.hyperparameters
    theirs = {
        "n_epochs": recipe["epochs"],
        "batch_size": recipe["batch_size"],
        "learning_rate_multiplier": "auto",
    }
    return {
        "id": job.pk,
        "object": "fine_tuning.job",
        "created_at": _unix(job.created_at),
        "finished_at": _unix(job.finished_at),
        "model": job.base_model.name,
        "fine_tuned_model": job.adapter_version.model_name if job.adapter_version else None,
        "organization_id": job.organization_id,
        "status": job.status,
        "training_file": job.training_file_id,
        "validation_file": job.validation_file_id,
        "hyperparameters": theirs,
        "method": {"type": "supervised", "supervised": {"hyperparameters": theirs}},
        "trained_tokens": job.trained_tokens if job.status == "succeeded" else None,
        "result_files": [],
        "seed": job.seed,
        "error": _error(job),
        "estimated_finish": _estimated_finish(job),
        "integrations": [],
        "metadata": job.metadata,
        **_ours(job, recipe),
    }


def _ours(job: FineTuningJob, recipe: dict[str, Any]) -> dict[str, Any]:
    return {
        "recipe": recipe,
        "pool": job.pool.name if job.pool else None,
        "gpu_type": job.pool.gpu_type.name if job.pool else None,
        "estimate": job.estimate or None,
        "step": job.step,
        "total_steps": job.total_steps,
        "queue_position": _queue_position(job),
        "waiting_reason": job.waiting_reason or None,
        "held_usd": str(nano_to_usd(job.spend_cap_nano)) if job.hold_id else None,
        "billed_gpu_seconds": job.billed_gpu_ms / 1000,
        "cost_usd": str(nano_to_usd(job.cost_nano)),
    }


def _queue_position(job: FineTuningJob) -> int | None:
    """The place among the organization's own view of the queue; other tenants' runs are counted, never shown."""
    run = queries.get_active_run(job=job) if job.status == "queued" else None
    return queue_position(run=run, now=db_now()) if run and run.status == "queued" else None


def _error(job: FineTuningJob) -> dict[str, Any] | None:
    if job.status != "failed":
        return None
    return {"code": job.error_code, "message": job.error_message, "param": job.error_param or None}


def _estimated_finish(job: FineTuningJob) -> int | None:
    seconds = job.estimate.get("train_seconds_p50")
    if job.status not in ("queued", "running") or seconds is None or job.started_at is None:
        return None
    return int(job.started_at.timestamp() + seconds)


def event_object(event: JobEvent) -> dict[str, Any]:
    return {
        "id": event.pk,
        "object": "fine_tuning.job.event",
        "created_at": _unix(event.created_at),
        "level": event.level,
        "message": event.message,
        "type": "metrics" if event.type == "metrics" else "message",
        "data": event.data or None,
    }


def checkpoint_object(row: Checkpoint) -> dict[str, Any]:
    metrics = {name: value for name, value in row.metrics.items() if value is not None}
    return {
        "id": row.pk,
        "object": "fine_tuning.job.checkpoint",
        "created_at": _unix(row.created_at),
        "fine_tuned_model_checkpoint": f"{row.job.base_model.name}:ckpt-step-{row.step}",
        "fine_tuning_job_id": row.job_id,
        "step_number": row.step,
        "metrics": metrics,
    }


def _unix(moment: Any) -> int | None:
    return int(moment.timestamp()) if moment else None
