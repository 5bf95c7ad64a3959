"""/v1/fine_tuning/jobs: OpenAI's surface, with our own fields beside theirs.

Ours, sent in `extra_body`: `lora {rank, alpha, dropout, target_modules, use_dora, use_rslora}`, `quantization "nf4"`
(QLoRA), `recipe {method, learning_rate, epochs, …}` with the ecosystem's names, `compute {pool, gpu_count}`, `budget
{max_cost_usd}`, and `dry_run`. A dry run returns the job's estimate and whether it would start, and creates nothing.
"""

import hashlib
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any, Literal

import msgspec
from django.http import HttpResponse
from rest_framework.request import Request
from rest_framework.response import Response

from apps.accounts.queries import KeyIdentity
from apps.accounts.roles import Permission
from apps.contracts.evaluation import EvaluationPlan, Grader, GraderKind, problem_of
from apps.contracts.runs import Objective
from apps.core.database.clock import db_now
from apps.core.errors import InvalidValue, PermissionDenied
from apps.core.money import LARGEST_USD, usd_to_nano
from apps.core.objects.store import attachment
from apps.finetuning import queries
from apps.finetuning.jobs import control, creation
from apps.finetuning.jobs.creation import JobRequest
from apps.finetuning.jobs.dry_runs import rehearse_job
from apps.finetuning.jobs.explanations import explain
from apps.finetuning.jobs.retries import retry_job
from apps.finetuning.jobs.suggestions import suggest
from apps.finetuning.quotes.delivery import deliver
from apps.finetuning.recipes.requests import stored_request
from apps.finetuning.results.checkpoint_models import serve_checkpoint
from apps.finetuning.results.tensorboard import event_file, file_name, read_points
from apps.interfaces.api.native.estimates import delivery_object, options_object, parse_needed_by
from apps.interfaces.api.native.serving import serving_object
from apps.interfaces.api.openai.fine_tuning_objects import (
    checkpoint_object,
    dry_run_object,
    event_object,
    explained,
    job_object,
)
from apps.interfaces.api.requests.pagination import page
from apps.interfaces.api.requests.parsers import read_body
from apps.interfaces.api.requests.recipes import LoraChoice, adapter_fields, parse_method, parse_objective
from apps.interfaces.api.requests.sent_names import as_sent
from apps.interfaces.api.views import ApiView

Auto = Any  # a number, or "auto"


class OpenAiHyperparameters(msgspec.Struct, forbid_unknown_fields=True):
    n_epochs: Auto = "auto"
    batch_size: Auto = "auto"
    learning_rate_multiplier: Auto = "auto"


class Supervised(msgspec.Struct, forbid_unknown_fields=True):
    hyperparameters: OpenAiHyperparameters = msgspec.field(default_factory=OpenAiHyperparameters)


class PreferenceHyperparameters(OpenAiHyperparameters, forbid_unknown_fields=True):
    beta: Auto = "auto"


class Preference(msgspec.Struct, forbid_unknown_fields=True):
    hyperparameters: PreferenceHyperparameters = msgspec.field(default_factory=PreferenceHyperparameters)


class MethodChoice(msgspec.Struct, forbid_unknown_fields=True):
    """`text` (continued pre-training on plain text) and `orpo` (preferences without a reference) are ours."""

    type: str = "supervised"
    supervised: Supervised | None = None
    dpo: Preference | None = None
    orpo: Preference | None = None
    text: Supervised | None = None


class GraderChoice(msgspec.Struct, forbid_unknown_fields=True):
    type: GraderKind = GraderKind.EXACT_MATCH
    operation: str = "eq"
    reference: str | None = None
    pattern: str = ""
    schema: dict[str, Any] = {}
    model: str = ""
    instructions: str = ""


class EvaluationChoice(msgspec.Struct, forbid_unknown_fields=True):
    """How base and tuned model are compared on the validation file after training."""

    grader: GraderChoice = msgspec.field(default_factory=GraderChoice)
    max_rows: Annotated[int, msgspec.Meta(ge=1, le=2_000)] = 500
    max_answers: Annotated[int, msgspec.Meta(ge=0, le=500)] = 100


class ComputeChoice(msgspec.Struct, forbid_unknown_fields=True):
    """`pool` may be the id of an estimate's option, such as "h200:4". If it is missing, the cheapest option is used."""

    pool: str | None = None
    gpu_count: Annotated[int, msgspec.Meta(ge=1, le=64)] | None = None


class BudgetChoice(msgspec.Struct, forbid_unknown_fields=True):
    max_cost_usd: str | int | float | None = None


_MAX_KEY = 200


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
    exports: list[Literal["merged_16bit", "gguf"]] | None = None
    compute: ComputeChoice | None = None
    budget: BudgetChoice | None = None
    dry_run: bool = False
    needed_by: int | str | None = None


class ResumeJob(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /v1/fine_tuning/jobs/{id}/resume. OpenAI's clients send none."""

    budget: BudgetChoice | None = None


class StartJobAgain(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /api/v1/fine_tuning/jobs/{id}/retry. Without a budget, the suggestion's amount is held."""

    budget: BudgetChoice | None = None


class JobList(ApiView):
    """List jobs, newest first; create one, or make a dry run."""

    required_scope = {"GET": "view", "POST": "job.write"}

    def get(self, request: Request) -> Response:
        rows = queries.list_jobs(organization=self.organization)
        rows = _with_metadata(rows, request)
        return Response(page(request, rows, job_object))

    def post(self, request: Request) -> Response:
        body = read_body(request.data, CreateJob)
        with as_sent(request.data):
            return Response(self._create(request, body))

    def _create(self, request: Request, body: CreateJob) -> dict[str, Any]:
        require_scope_of_judge(self.identity, _evaluation_plan(body.evaluation))
        asked = parse_request(
            body,
            request.data,
            idempotency_key=_idempotency_key(request),
            # OpenAI's SDK sends no such key but counts its retries. A retry must not become a second job.
            is_retry=request.headers.get("X-Stainless-Retry-Count", "0") not in ("", "0"),
        )
        if body.dry_run:
            return self._rehearse(body, asked)
        if body.needed_by is not None:
            text = (
                "needed_by is answered by a dry run: send dry_run, then create the job with the compute.pool you chose."
            )
            raise InvalidValue(text, param="needed_by")
        job = creation.create_job(organization=self.organization, request=asked, by=self.actor, now=db_now())
        return job_object(queries.get_job(organization=self.organization, id=job.pk))

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
        """Return the job. A failed one includes the blame, the evidence and the suggested change with its price."""
        job = queries.get_job(organization=self.organization, id=job_id)
        found = job_object(job)
        if why := explain(job=job, now=db_now()):
            found["error"] |= explained(why)
        return Response(found)


class JobAction(ApiView):
    """POST cancel, pause or resume. Each returns the job."""

    required_scope = {"POST": "job.write"}
    action = ""

    def post(self, request: Request, job_id: str) -> Response:
        job = queries.get_job(organization=self.organization, id=job_id)
        match self.action:
            case "cancel":
                control.request_cancellation(job=job, by=self.actor, now=db_now())
            case "pause":
                control.request_pause(job=job, by=self.actor, now=db_now())
            case _:
                body = read_body(request.data, ResumeJob)
                cap_nano = _cap_nano(body.budget)
                control.resume(job=job, by=self.actor, now=db_now(), spend_cap_nano=cap_nano)
        return Response(job_object(queries.get_job(organization=self.organization, id=job_id)))


class JobRetry(ApiView):
    """Start a failed job again with the suggested change.

    The job's `error.suggestion` shows the change and its price.
    """

    required_scope = {"POST": "job.write"}

    def post(self, request: Request, job_id: str) -> Response:
        body = read_body(request.data, StartJobAgain)
        job = queries.get_job(organization=self.organization, id=job_id)
        require_scope_of_judge(self.identity, stored_request(job).evaluation)
        now = db_now()
        if job.status == "failed" and suggest(job=job, now=now).change.repairs:
            self._require_scope_of_files()
        again = retry_job(job=job, by=self.actor, now=now, spend_cap_nano=_cap_nano(body.budget))
        return Response(job_object(queries.get_job(organization=self.organization, id=again.pk)))

    def _require_scope_of_files(self) -> None:
        if Permission.DATASET_WRITE not in self.identity.scopes:
            message = "The suggested change makes a new version of a file; this key lacks the scope 'dataset.write'."
            raise PermissionDenied(message, required_scope=str(Permission.DATASET_WRITE))


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
    """Make a checkpoint's model answer requests under its `fine_tuned_model_checkpoint`."""

    required_scope = {"POST": Permission.ADAPTER_WRITE}

    def post(self, request: Request, checkpoint_id: str) -> Response:
        version = serve_checkpoint(organization=self.organization, checkpoint_id=checkpoint_id)
        return Response(serving_object(version))


class JobTensorBoard(ApiView):
    required_scope = {"GET": "view"}

    def get(self, request: Request, job_id: str) -> HttpResponse:
        """Return the metrics so far as a TensorBoard event file, under a name that TensorBoard recognizes."""
        job = queries.get_job(organization=self.organization, id=job_id)
        body = b"".join(event_file(read_points(job=job), began_at=job.created_at.timestamp()))
        headers = {"Content-Disposition": attachment(file_name(job)), "Cache-Control": "private, no-store"}
        return HttpResponse(body, content_type="application/octet-stream", headers=headers)


def require_scope_of_judge(identity: KeyIdentity, plan: EvaluationPlan | None) -> None:
    """Raise PermissionDenied if a judge is requested by a key without the scope for inference.

    A judge's calls are inference in the name of the key.
    """
    is_judged = plan is not None and plan.grader.kind is GraderKind.JUDGE
    if is_judged and Permission.INFERENCE not in identity.scopes:
        message = "A judge asks a model in the name of this API key, which lacks the scope 'inference'."
        raise PermissionDenied(message, param="evaluation.grader", required_scope=str(Permission.INFERENCE))


def _idempotency_key(request: Request) -> str | None:
    key = request.headers.get("Idempotency-Key")
    if key is not None and len(key) > _MAX_KEY:
        raise InvalidValue(f"Idempotency-Key has at most {_MAX_KEY} characters.", param="Idempotency-Key")
    return key


def parse_request(
    body: CreateJob, data: Any, *, idempotency_key: str | None = None, is_retry: bool = False
) -> JobRequest:
    """Return the domain's request; `data` is the body as sent. Raises InvalidValue that names the field."""
    recipe = dict(body.recipe or {})
    _require_one_method(body.method)
    method = parse_method(body.quantization, recipe.pop("method", None))
    return JobRequest(
        base_model=body.model,
        training_file=body.training_file,
        validation_file=body.validation_file,
        method=method,
        objective=parse_objective(body.method.type if body.method else None),
        hyperparameters=_hyperparameters(body) | recipe,
        pool=body.compute.pool if body.compute else None,
        gpu_count=body.compute.gpu_count if body.compute else None,
        spend_cap_nano=_cap_nano(body.budget),
        suffix=body.suffix or "",
        seed=body.seed,
        metadata=body.metadata or {},
        integrations=body.integrations or (),
        evaluation=_evaluation_plan(body.evaluation),
        exports=body.exports or (),
        idempotency_key=idempotency_key,
        fingerprint=hashlib.sha256(msgspec.json.encode(data, order="sorted")).hexdigest(),
        is_retry=is_retry,
    )


def _require_one_method(method: MethodChoice | None) -> None:
    """Raise InvalidValue if settings of a method other than the chosen one were sent, because they have no effect."""
    if method is None:
        return
    names = [field.name for field in msgspec.structs.fields(method) if field.name != "type"]
    for name in names:
        if name != method.type and getattr(method, name) is not None:
            text = f"'method.type' is '{method.type}': send 'method.{method.type}' in place of 'method.{name}'."
            raise InvalidValue(text, param=f"method.{name}")


def _theirs(body: CreateJob) -> OpenAiHyperparameters:
    given = getattr(body.method, body.method.type, None) if body.method else None
    return given.hyperparameters if given else body.hyperparameters or OpenAiHyperparameters()


def _hyperparameters(body: CreateJob) -> dict[str, Any]:
    theirs = _theirs(body)
    is_orpo = body.method is not None and body.method.type == Objective.ORPO
    chosen = {
        "epochs": theirs.n_epochs,
        "batch_size": theirs.batch_size,
        "learning_rate_multiplier": theirs.learning_rate_multiplier,
        "orpo_beta" if is_orpo else "dpo_beta": getattr(theirs, "beta", None),
    }
    return chosen | adapter_fields(body.lora)


def _evaluation_plan(choice: EvaluationChoice | None) -> EvaluationPlan | None:
    """Return the plan for the worker; None for the default plan. Raises InvalidValue."""
    if choice is None:
        return None
    asked = choice.grader
    grader = Grader(
        kind=asked.type,
        operation=asked.operation,
        reference=asked.reference,
        pattern=asked.pattern,
        schema=asked.schema,
        model=asked.model,
        instructions=asked.instructions,
    )
    if problem := problem_of(grader):
        raise InvalidValue(problem, param="evaluation.grader")
    return EvaluationPlan(grader=grader, max_rows=choice.max_rows, max_answers=choice.max_answers)


def _cap_nano(budget: BudgetChoice | None) -> int | None:
    if budget is None or budget.max_cost_usd is None:
        return None
    try:
        return usd_to_nano(Decimal(str(budget.max_cost_usd)))
    except (InvalidOperation, ValueError) as error:
        text = f"'budget.max_cost_usd' is an amount in dollars, such as 2.50: at most {LARGEST_USD:,}, nine decimals."
        raise InvalidValue(text, param="budget.max_cost_usd") from error


def _with_metadata(rows: Any, request: Request) -> Any:
    if request.query_params.get("metadata") == "null":
        return rows.filter(metadata={})
    wanted = {
        name[len("metadata[") : -1]: value
        for name, value in request.query_params.items()
        if name.startswith("metadata[") and name.endswith("]")
    }
    return rows.filter(metadata__contains=wanted) if wanted else rows
