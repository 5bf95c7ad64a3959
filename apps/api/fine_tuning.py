"""/v1/fine_tuning/jobs: OpenAI's surface, with our own fields beside theirs.

Ours, sent in `extra_body`: `lora {rank, alpha, dropout, target_modules, use_dora, use_rslora}`, `quantization "nf4"`
(QLoRA), `recipe {method, learning_rate, epochs, …}` with the ecosystem's names, `compute {pool, gpu_count}`,
`budget {max_cost_usd}`, and `dry_run`, which answers with what the job would take and whether it would start, and
creates nothing.
"""

import hashlib
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any, Literal

import msgspec
from django.http import HttpResponse
from rest_framework.request import Request
from rest_framework.response import Response

from apps.accounts.roles import Permission
from apps.api.estimates import delivery_object, options_object, parse_needed_by, usd
from apps.api.pagination import page
from apps.api.parsers import read_body
from apps.api.recipes import LoraChoice, adapter_fields, parse_method
from apps.api.serving import serving_object
from apps.api.views import ApiView
from apps.contracts.evaluation import EvaluationPlan, Grader, GraderKind, problem_of
from apps.contracts.failures import Blame, FailureCode
from apps.contracts.runs import Hyperparameters, Objective
from apps.core.clock import db_now
from apps.core.errors import InvalidValue
from apps.core.money import nano_to_usd, usd_to_nano
from apps.core.object_store import attachment
from apps.finetuning import attempts, operations, queries, stopping
from apps.finetuning.checkpoint_models import name_of, serve_checkpoint
from apps.finetuning.delivery import deliver
from apps.finetuning.explanations import Explanation, explain
from apps.finetuning.lifecycle import JOB_TERMINAL
from apps.finetuning.models import Checkpoint, FineTuningJob, JobEvent
from apps.finetuning.operations import JobRequest
from apps.finetuning.rehearsal import Rehearsal, rehearse_job
from apps.finetuning.scheduling import queue_position
from apps.finetuning.tensorboard import event_file, file_name, read_points

Auto = Any  # a number, or "auto"


class OpenAiHyperparameters(msgspec.Struct, forbid_unknown_fields=True):
    n_epochs: Auto = "auto"
    batch_size: Auto = "auto"
    learning_rate_multiplier: Auto = "auto"


class Supervised(msgspec.Struct, forbid_unknown_fields=True):
    hyperparameters: OpenAiHyperparameters = msgspec.field(default_factory=OpenAiHyperparameters)


class DpoHyperparameters(OpenAiHyperparameters, forbid_unknown_fields=True):
    beta: Auto = "auto"


class Dpo(msgspec.Struct, forbid_unknown_fields=True):
    hyperparameters: DpoHyperparameters = msgspec.field(default_factory=DpoHyperparameters)


class MethodChoice(msgspec.Struct):
    """`text` is ours: continued pre-training on plain text."""

    type: str = "supervised"
    supervised: Supervised | None = None
    dpo: Dpo | None = None
    text: Supervised | None = None


class GraderChoice(msgspec.Struct, forbid_unknown_fields=True):
    type: GraderKind = GraderKind.EXACT_MATCH
    operation: str = "eq"
    reference: str | None = None
    pattern: str = ""
    schema: dict[str, Any] = {}


class EvaluationChoice(msgspec.Struct, forbid_unknown_fields=True):
    """How base and tuned model are compared on the validation file after training."""

    grader: GraderChoice = msgspec.field(default_factory=GraderChoice)
    max_rows: Annotated[int, msgspec.Meta(ge=1, le=2_000)] = 500
    max_answers: Annotated[int, msgspec.Meta(ge=0, le=500)] = 100


class ComputeChoice(msgspec.Struct, forbid_unknown_fields=True):
    """`pool` may be the id of an estimate's option, such as "h200:4"; left out, the cheapest is taken."""

    pool: str | None = None
    gpu_count: Annotated[int, msgspec.Meta(ge=1, le=64)] | None = None


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
    evaluation: EvaluationChoice | None = None
    exports: list[Literal["merged_16bit"]] | None = None
    compute: ComputeChoice | None = None
    budget: BudgetChoice | None = None
    dry_run: bool = False
    needed_by: int | str | None = None


class ResumeJob(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /v1/fine_tuning/jobs/{id}/resume; OpenAI's clients send none."""

    budget: BudgetChoice | None = None


class JobList(ApiView):
    """List jobs, newest first; create one, or rehearse it."""

    required_scope = {"GET": "view", "POST": "job.write"}

    def get(self, request: Request) -> Response:
        rows = queries.list_jobs(organization=self.organization)
        rows = _with_metadata(rows, request)
        return Response(page(request, rows, job_object))

    def post(self, request: Request) -> Response:
        body = read_body(request.data, CreateJob)
        asked = parse_request(
            body,
            request.data,
            idempotency_key=_idempotency_key(request),
            # OpenAI's SDK sends no such key, but counts its retries: one of them must not become a second job.
            is_retry=request.headers.get("X-Stainless-Retry-Count", "0") not in ("", "0"),
        )
        if body.dry_run:
            return Response(self._rehearse(body, asked))
        if body.needed_by is not None:
            text = (
                "needed_by is answered by a dry run: send dry_run, then create the job with the compute.pool you chose."
            )
            raise InvalidValue(text, param="needed_by")
        job = operations.create_job(organization=self.organization, request=asked, by=self.actor, now=db_now())
        return Response(job_object(queries.get_job(organization=self.organization, id=job.pk)))

    def _rehearse(self, body: CreateJob, asked: JobRequest) -> dict[str, Any]:
        now = db_now()
        needed_by = parse_needed_by(body.needed_by, now)
        rehearsal = rehearse_job(organization=self.organization, request=asked, by=self.actor, now=now)
        delivery = delivery_object(
            deliver(
                organization=self.organization,
                base_model=rehearsal.base_model,
                recipe=rehearsal.recipe,
                exports=body.exports or [],
            )
        )
        options = options_object(rehearsal.quotes, needed_by=needed_by, now=now)
        return dry_run_object(asked, rehearsal) | {"delivery": delivery} | options


class JobDetail(ApiView):
    required_scope = {"GET": "view"}

    def get(self, request: Request, job_id: str) -> Response:
        """Return the job; a failed one with whose fault it is, the evidence and the suggested change with its price."""
        job = queries.get_job(organization=self.organization, id=job_id)
        found = job_object(job)
        if why := explain(job=job, now=db_now()):
            found["error"] |= _explained(why)
        return Response(found)


class JobAction(ApiView):
    """POST cancel, pause or resume; each answers with the job."""

    required_scope = {"POST": "job.write"}
    action = ""

    def post(self, request: Request, job_id: str) -> Response:
        job = queries.get_job(organization=self.organization, id=job_id)
        match self.action:
            case "cancel":
                stopping.request_cancellation(job=job, by=self.actor, now=db_now())
            case "pause":
                stopping.request_pause(job=job, by=self.actor, now=db_now())
            case _:
                body = read_body(request.data, ResumeJob)
                cap_nano = _cap_nano(body.budget)
                stopping.resume(job=job, by=self.actor, now=db_now(), spend_cap_nano=cap_nano)
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


class CheckpointServing(ApiView):
    """Have the model of a checkpoint answer, under its `fine_tuned_model_checkpoint`."""

    required_scope = {"POST": Permission.ADAPTER_WRITE}

    def post(self, request: Request, checkpoint_id: str) -> Response:
        version = serve_checkpoint(organization=self.organization, checkpoint_id=checkpoint_id)
        return Response(serving_object(version))


class JobTensorBoard(ApiView):
    required_scope = {"GET": "view"}

    def get(self, request: Request, job_id: str) -> HttpResponse:
        """Return the metrics so far as a TensorBoard event file; its name is one that TensorBoard looks for."""
        job = queries.get_job(organization=self.organization, id=job_id)
        body = b"".join(event_file(read_points(job=job), began_at=job.created_at.timestamp()))
        headers = {"Content-Disposition": attachment(file_name(job)), "Cache-Control": "private, no-store"}
        return HttpResponse(body, content_type="application/octet-stream", headers=headers)


def _idempotency_key(request: Request) -> str | None:
    key = request.headers.get("Idempotency-Key")
    if key is not None and len(key) > _LONGEST_KEY:
        raise InvalidValue(f"Idempotency-Key has at most {_LONGEST_KEY} characters.", param="Idempotency-Key")
    return key


def parse_request(
    body: CreateJob, data: Any, *, idempotency_key: str | None = None, is_retry: bool = False
) -> JobRequest:
    """Return the domain's request; `data` is the body as sent. Raises InvalidValue naming the field."""
    recipe = dict(body.recipe or {})
    method = parse_method(body.quantization, recipe.pop("method", None))
    return JobRequest(
        base_model=body.model,
        training_file=body.training_file,
        validation_file=body.validation_file,
        method=method,
        objective=_objective(body.method),
        hyperparameters=_hyperparameters(body) | recipe,
        pool=body.compute.pool if body.compute else None,
        gpu_count=body.compute.gpu_count if body.compute else None,
        spend_cap_nano=_cap_nano(body.budget),
        suffix=body.suffix or "",
        seed=body.seed,
        metadata=body.metadata or {},
        integrations=body.integrations or (),
        requested={
            "method": msgspec.to_builtins(body.method) if body.method else None,
            "evaluation": _evaluation_plan(body.evaluation),
            "exports": body.exports or [],
        },
        idempotency_key=idempotency_key,
        fingerprint=hashlib.sha256(msgspec.json.encode(data, order="sorted")).hexdigest(),
        is_retry=is_retry,
    )


_OBJECTIVES = {"supervised": Objective.SUPERVISED, "dpo": Objective.DPO, "text": Objective.TEXT}


def _objective(method: MethodChoice | None) -> Objective | None:
    if method is None:
        return None
    if method.type not in _OBJECTIVES:
        offered = ", ".join(repr(name) for name in _OBJECTIVES)
        raise InvalidValue(f"method.type {method.type!r} is not offered here: use {offered}.", param="method.type")
    return _OBJECTIVES[method.type]


def _theirs(body: CreateJob) -> OpenAiHyperparameters:
    given = getattr(body.method, body.method.type) if body.method else None
    return given.hyperparameters if given else body.hyperparameters or OpenAiHyperparameters()


def _hyperparameters(body: CreateJob) -> dict[str, Any]:
    theirs = _theirs(body)
    chosen = {
        "epochs": theirs.n_epochs,
        "batch_size": theirs.batch_size,
        "learning_rate_multiplier": theirs.learning_rate_multiplier,
        "dpo_beta": theirs.beta if isinstance(theirs, DpoHyperparameters) else None,
    }
    return chosen | adapter_fields(body.lora)


def _evaluation_plan(choice: EvaluationChoice | None) -> dict[str, Any] | None:
    """Return the plan for the worker, None for the default one. Raises InvalidValue."""
    if choice is None:
        return None
    asked = choice.grader
    grader = Grader(
        kind=asked.type,
        operation=asked.operation,
        reference=asked.reference,
        pattern=asked.pattern,
        schema=asked.schema,
    )
    if problem := problem_of(grader):
        raise InvalidValue(problem, param="evaluation.grader")
    plan = EvaluationPlan(grader=grader, max_rows=choice.max_rows, max_answers=choice.max_answers)
    return dict(msgspec.to_builtins(plan))


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
        "method": _method_object(recipe, theirs),
        "trained_tokens": job.trained_tokens if job.status == "succeeded" else None,
        "result_files": [],
        "seed": job.seed,
        "error": _error(job),
        "estimated_finish": _estimated_finish(job),
        "integrations": job.requested.get("integrations") or [],
        "metadata": job.metadata,
        **_ours(job, recipe),
    }


def _method_object(recipe: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    kind = recipe.get("objective", Objective.SUPERVISED.value)
    beta = {"beta": recipe["dpo_beta"]} if kind == Objective.DPO else {}
    return {"type": kind, kind: {"hyperparameters": theirs | beta}}


def dry_run_object(asked: JobRequest, rehearsal: Rehearsal) -> dict[str, Any]:
    """Return what creating the job would have done; `refusal` is the error that it would have been answered with."""
    refusal = rehearsal.refusal
    return {
        "object": "fine_tuning.job.dry_run",
        "model": asked.base_model,
        "training_file": asked.training_file,
        "validation_file": asked.validation_file,
        "recipe": msgspec.to_builtins(rehearsal.recipe),
        "would_start": refusal is None,
        "refusal": refusal.as_openai()["error"] if refusal else None,
        "pool": rehearsal.pool,
        "gpu_count": rehearsal.gpu_count,
        "hold_usd": usd(rehearsal.hold_nano),
    }


def _ours(job: FineTuningJob, recipe: dict[str, Any]) -> dict[str, Any]:
    return {
        "recipe": recipe,
        "recipe_choices": job.requested.get("choices", []),
        "continues": job.requested.get("start_from") or None,
        "delivered_as": "adapter" if msgspec.convert(recipe, Hyperparameters).is_servable else "model",
        "pool": job.pool.name if job.pool else None,
        "gpu_count": job.gpu_count if job.pool else None,
        "gpu_type": job.pool.gpu_type.name if job.pool else None,
        "estimate": job.estimate or None,
        "step": job.step,
        "total_steps": job.total_steps,
        "queue_position": _queue_position(job),
        "waiting_reason": job.waiting_reason or None,
        "spend_cap_usd": str(nano_to_usd(job.spend_cap_nano)) if job.hold_id else None,
        "held_usd": str(nano_to_usd(_held_nano(job))) if job.hold_id else None,
        "billed_gpu_seconds": job.billed_gpu_ms / 1000,
        "cost_usd": str(nano_to_usd(job.cost_nano)),
        "adapter_status": job.adapter_version.status if job.adapter_version else None,
    }


def _held_nano(job: FineTuningJob) -> int:
    """What is set aside now: nothing once the job is paused or ended."""
    is_held = job.status not in JOB_TERMINAL and job.status != "paused"
    return attempts.resume_hold_nano(job=job) if is_held else 0


def _queue_position(job: FineTuningJob) -> int | None:
    """The place in the pool's whole queue; other tenants' runs are counted, never shown."""
    run = queries.get_active_run(job=job) if job.status == "queued" else None
    return queue_position(run=run, now=db_now()) if run and run.status == "queued" else None


def _error(job: FineTuningJob) -> dict[str, Any] | None:
    if job.status != "failed":
        return None
    return {
        "code": job.error_code,
        "message": job.error_message,
        "param": job.error_param or None,
        "blame": _blame(job.error_code),
    }


def _explained(why: Explanation) -> dict[str, Any]:
    advice = why.suggestion
    price = advice.price_nano if advice else None
    return {
        "cause": why.cause,
        "evidence": msgspec.to_builtins(why.evidence),
        "suggestion": advice
        and {
            "text": advice.text,
            "changes": advice.changes,
            "estimated_cost_usd": None if price is None else str(nano_to_usd(price)),
            "pool": advice.pool or None,
        },
    }


def _blame(code: str) -> str:
    """Whose fault it is; what is no run's failure was refused before anything ran."""
    return FailureCode(code).blame.value if code in list(FailureCode) else Blame.CUSTOMER.value


def _estimated_finish(job: FineTuningJob) -> int | None:
    seconds = job.estimate.get("run_seconds_p50") or job.estimate.get("train_seconds_p50")
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
        "fine_tuned_model_checkpoint": name_of(row),
        "fine_tuning_job_id": row.job_id,
        "step_number": row.step,
        "metrics": metrics,
    }


def _unix(moment: Any) -> int | None:
    return int(moment.timestamp()) if moment else None
