"""/v1/fine_tuning/jobs: OpenAI's surface, with our own calls beside theirs.

A dry run returns the job's estimate and whether it would start, and creates nothing.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

from django.db.models import QuerySet
from django.http import HttpResponse
from msgspec import Meta
from rest_framework.request import Request

from apps.accounts.members.projects import get_project
from apps.accounts.queries import KeyIdentity
from apps.accounts.roles import Permission
from apps.contracts.evaluation import EvaluationPlan, GraderKind
from apps.core.database.clock import db_now
from apps.core.errors import DomainError, InvalidValue, PermissionDenied
from apps.core.http.openapi.document import FileAnswer
from apps.core.objects.store import attachment
from apps.finetuning import queries
from apps.finetuning.jobs import control, creation
from apps.finetuning.jobs.dry_runs import rehearse_job
from apps.finetuning.jobs.explanations import explain
from apps.finetuning.jobs.moves import list_moves, move_job
from apps.finetuning.jobs.project_settings import chosen_by_project, with_defaults
from apps.finetuning.jobs.requests import JobRequest, is_mark
from apps.finetuning.jobs.retries import retry_job
from apps.finetuning.jobs.suggestions import suggest
from apps.finetuning.jobs.waits import explain_wait
from apps.finetuning.lifecycle import JobStatus
from apps.finetuning.models import FineTuningJob
from apps.finetuning.quotes.delivery import deliver
from apps.finetuning.recipes.stored_requests import stored_request
from apps.finetuning.results.checkpoint_models import serve_checkpoint
from apps.finetuning.results.tensorboard import event_file, file_name, read_points
from apps.interfaces.api.native.estimates import delivery_object, options_object, parse_needed_by
from apps.interfaces.api.native.serving import ServingObject, serving_object
from apps.interfaces.api.openai.fine_tuning_bodies import (
    CreateJob,
    MoveJob,
    ResumeJob,
    RetryJob,
    cap_nano,
    evaluation_plan,
    parse_request,
    quoted_max_nano,
    shown_max_nano,
)
from apps.interfaces.api.openai.fine_tuning_objects import JobObject, job_object, job_objects
from apps.interfaces.api.openai.fine_tuning_parts import (
    CheckpointObject,
    DryRunObject,
    EventObject,
    MoveObject,
    checkpoint_object,
    dry_run_object,
    event_object,
    move_object,
)
from apps.interfaces.api.requests.idempotency import is_client_retry
from apps.interfaces.api.requests.pagination import (
    ListObject,
    PageQuery,
    SearchQuery,
    list_object,
    page,
    page_together,
    with_words_of,
)
from apps.interfaces.api.requests.sent_names import as_sent
from apps.interfaces.api.views import ApiView

_MetadataFilter = Annotated[
    dict[str, str] | Literal["null"],
    Meta(description="`metadata[key]=value`, or `metadata=null` for jobs without any."),
]

# The metadata by which the command line finds the jobs of a manifest and of an import.
# Members of a job's body, as those of a move's.
_PARAMS_OF_MOVE = {
    "compute.pool": "option", "compute.gpu_count": "option", "compute.node_count": "node_count",
    "budget.quoted_max_usd": "quoted_max_usd",
}  # fmt: skip


class JobsQuery(SearchQuery):
    status: JobStatus | None = None
    model: Annotated[str, Meta(description="The name of a base model.")] | None = None
    metadata: _MetadataFilter = {}  # with None in its type, the text "null" would be read as None
    project: Annotated[str, Meta(max_length=40, description="The id of a project.")] | None = None


class CheckpointsQuery(PageQuery):
    limit: Annotated[int, Meta(ge=1, le=100)] = 10


class JobList(ApiView):
    required_scope = {"GET": Permission.VIEW, "POST": Permission.JOB_WRITE}
    examples = {
        "POST": {
            "model": "anneal-demo",
            "training_file": "file-01m834k536k0gf5jc32faqfm5y",
            "suffix": "support",
            "method": {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 2, "batch_size": "auto"}}},
            "lora": {"rank": 16},
            "budget": {"max_cost_usd": "2.50"},
        }
    }

    def get(self, request: Request, query: JobsQuery) -> ListObject[JobObject]:
        """List jobs, newest first. `q` searches id, suffix, base model and file name."""
        jobs = queries.list_jobs(organization=self.organization)
        rows = _with_metadata(jobs, query)
        rows = rows.filter(status=query.status) if query.status else rows
        rows = rows.filter(base_model__name=query.model) if query.model else rows
        rows = rows.filter(project=query.project) if query.project else rows
        rows = with_words_of(query, rows, fields=("id", "suffix", "base_model__name", "training_file__filename"))
        return page_together(query, rows, job_objects, places=jobs)

    def post(self, request: Request, body: CreateJob) -> JobObject | DryRunObject:
        """Create a job; with `dry_run`, return its estimate and whether it would start, and create nothing.

        The key's project may choose the model, the method, the suffix and the pool of a job that names none.
        """
        with as_sent(request.data):
            return self._create(request, body)

    def _create(self, request: Request, body: CreateJob) -> JobObject | DryRunObject:
        require_scope_of_judge(self.identity, evaluation_plan(body.evaluation))
        asked = parse_request(
            body,
            request.data,
            is_retry=is_client_retry(request),
        )
        project = get_project(organization=self.organization, id=self.identity.project_id)
        filled = with_defaults(request=asked, project=project)
        if body.dry_run:
            return self._rehearse(body, asked, filled)
        if body.needed_by is not None:
            text = (
                "needed_by is answered by a dry run: send dry_run, then create the job with the compute.pool you chose."
            )
            raise InvalidValue(text, param="needed_by")
        _require_scope_of_marks(self.identity, filled.metadata)
        job = creation.create_job(organization=self.organization, request=filled, by=self.actor, now=db_now())
        return job_object(queries.get_job(organization=self.organization, id=job.pk))

    def _rehearse(self, body: CreateJob, asked: JobRequest, filled: JobRequest) -> DryRunObject:
        now = db_now()
        needed_by = parse_needed_by(body.needed_by, now)
        rehearsal = rehearse_job(organization=self.organization, request=filled, by=self.actor, now=now)
        delivery = delivery_object(
            deliver(
                organization=self.organization,
                base_model=rehearsal.base_model,
                recipe=rehearsal.recipe,
                exports=body.exports or [],
            )
        )
        options = options_object(rehearsal.quotes, needed_by=needed_by, now=now)
        from_project = chosen_by_project(asked=asked, request=filled, pool=rehearsal.pool)
        rehearsed = dry_run_object(filled, rehearsal, from_project=from_project)
        return {**rehearsed, "delivery": delivery, **options}


class JobDetail(ApiView):
    required_scope = {"GET": Permission.VIEW}

    def get(self, request: Request, job_id: str) -> JobObject:
        """Return the job. A failed one includes the blame, the evidence and the suggested change with its price."""
        job = queries.get_job(organization=self.organization, id=job_id)
        return job_object(job, why=explain(job=job, now=db_now()))


class JobCancel(ApiView):
    """Cancel a job that has not ended."""

    required_scope = {"POST": Permission.JOB_WRITE}

    def post(self, request: Request, job_id: str) -> JobObject:
        job = queries.get_job(organization=self.organization, id=job_id)
        control.request_cancellation(job=job, by=self.actor, now=db_now())
        return job_object(queries.get_job(organization=self.organization, id=job_id))


class JobPause(ApiView):
    """Pause a running job at a checkpoint."""

    required_scope = {"POST": Permission.JOB_WRITE}

    def post(self, request: Request, job_id: str) -> JobObject:
        job = queries.get_job(organization=self.organization, id=job_id)
        control.request_pause(job=job, by=self.actor, now=db_now())
        return job_object(queries.get_job(organization=self.organization, id=job_id))


class JobResume(ApiView):
    """Continue a paused job from its checkpoint, also with a new spend cap."""

    required_scope = {"POST": Permission.JOB_WRITE}
    examples = {"POST": {"budget": {"max_cost_usd": "5"}}}

    def post(self, request: Request, job_id: str, body: ResumeJob) -> JobObject:
        job = queries.get_job(organization=self.organization, id=job_id)
        control.resume(job=job, by=self.actor, now=db_now(), spend_cap_nano=cap_nano(body.budget))
        return job_object(queries.get_job(organization=self.organization, id=job_id))


class JobMoves(ApiView):
    """Start a queued job sooner, on another pool."""

    required_scope = {"GET": Permission.VIEW, "POST": Permission.JOB_WRITE}
    examples = {"POST": {"option": "h200:4", "quoted_max_usd": "5.20"}}

    def get(self, request: Request, job_id: str) -> ListObject[MoveObject]:
        """List up to three pools where a queued job would start sooner, with what it would cost there.

        Its own pool is one of them if it would start sooner there on another number of machines.
        """
        job, now = queries.get_job(organization=self.organization, id=job_id), db_now()
        moves = list_moves(job=job, wait=explain_wait(job=job, now=now), now=now)
        return list_object([move_object(each) for each in moves])

    def post(self, request: Request, job_id: str, body: MoveJob) -> JobObject:
        """Queue the job for another option. What was held returns, and the new maximum is held.

        A job that waits again after an attempt is charged for what ran, and resumes from its checkpoint. A job that a
        machine has taken is refused, and so is an option whose maximum has risen above `quoted_max_usd`.
        """
        job = queries.get_job(organization=self.organization, id=job_id)
        try:
            move_job(
                job=job, option=body.option, by=self.actor, now=db_now(), shown_max_nano=shown_max_nano(body),
                node_count=body.node_count,
            )  # fmt: skip
        except DomainError as refused:
            refused.param = _PARAMS_OF_MOVE.get(refused.param or "", refused.param)
            raise
        return job_object(queries.get_job(organization=self.organization, id=job_id))


class JobRetry(ApiView):
    """Start a failed job again with the suggested change.

    The job's `error.suggestion` shows the change and its price. Without a budget, the suggestion's amount is held.
    With `quoted_max_usd`, the job is refused if that amount has risen.
    """

    required_scope = {"POST": Permission.JOB_WRITE}
    examples = {"POST": {"budget": {"max_cost_usd": "5"}}}

    def post(self, request: Request, job_id: str, body: RetryJob) -> JobObject:
        job = queries.get_job(organization=self.organization, id=job_id)
        require_scope_of_judge(self.identity, stored_request(job).evaluation)
        _require_scope_of_marks(self.identity, job.metadata, are_copied=True)
        now = db_now()
        makes_file = job.status == JobStatus.FAILED and suggest(job=job, now=now).change.repairs
        if makes_file and Permission.DATASET_WRITE not in self.identity.scopes:
            message = "The suggested change makes a new version of a file; this key lacks the scope 'dataset.write'."
            raise PermissionDenied(message, required_scope=str(Permission.DATASET_WRITE))
        again = retry_job(
            job=job,
            by=self.actor,
            now=now,
            spend_cap_nano=cap_nano(body.budget),
            shown_max_nano=quoted_max_nano(body.budget),
        )
        return job_object(queries.get_job(organization=self.organization, id=again.pk))


class JobEvents(ApiView):
    required_scope = {"GET": Permission.VIEW}

    def get(self, request: Request, job_id: str, query: PageQuery) -> ListObject[EventObject]:
        """List the events of a job, newest first."""
        job = queries.get_job(organization=self.organization, id=job_id)
        return page(query, queries.list_events(job=job), event_object, order=("-sequence", "-id"))


class JobCheckpoints(ApiView):
    required_scope = {"GET": Permission.VIEW}

    def get(self, request: Request, job_id: str, query: CheckpointsQuery) -> ListObject[CheckpointObject]:
        """List the checkpoints of a job, the last first."""
        job = queries.get_job(organization=self.organization, id=job_id)
        return page(query, queries.list_checkpoints(job=job), checkpoint_object, order=("-step", "-id"))


class CheckpointServing(ApiView):
    """Make a checkpoint's model answer requests under its `fine_tuned_model_checkpoint`."""

    required_scope = {"POST": Permission.ADAPTER_WRITE}

    def post(self, request: Request, checkpoint_id: str) -> ServingObject:
        version = serve_checkpoint(organization=self.organization, checkpoint_id=checkpoint_id, by=self.actor)
        return serving_object(version)


class JobTensorBoard(ApiView):
    required_scope = {"GET": Permission.VIEW}

    def get(self, request: Request, job_id: str) -> Annotated[HttpResponse, FileAnswer("application/octet-stream")]:
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


def _require_scope_of_marks(identity: KeyIdentity, metadata: Mapping[str, str], *, are_copied: bool = False) -> None:
    """Raise PermissionDenied for metadata of `anneal apply` or `anneal import` from a key that may not move aliases.

    The commands point an alias at the model of the newest job with their metadata, whichever key created it. A job's
    metadata is copied to its retry.
    """
    mark = next(filter(is_mark, metadata), None)
    if mark is not None and Permission.ADAPTER_WRITE not in identity.scopes:
        message = (
            f"A job with the metadata '{mark}' decides where an alias points, and this API key lacks the scope "
            f"'adapter.write'. {'Use another key.' if are_copied else 'Use another key, or another name.'}"
        )
        param = None if are_copied else f"metadata.{mark}"
        raise PermissionDenied(message, param=param, required_scope=str(Permission.ADAPTER_WRITE))


def _with_metadata(rows: QuerySet[FineTuningJob], query: JobsQuery) -> QuerySet[FineTuningJob]:
    match query.metadata:
        case "null":
            return rows.filter(metadata={})
        case dict(wanted) if wanted:
            return rows.filter(metadata__contains=wanted)
    return rows
