"""API objects of jobs: OpenAI's members, and ours beside them."""

import datetime
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired, TypedDict

import msgspec

from apps.contracts.failures import Blame, FailureCode
from apps.contracts.hyperparameters import Objective
from apps.core.database.clock import db_now
from apps.finetuning.jobs.explanations import Explanation
from apps.finetuning.jobs.progress import JobProgress, finish_of, list_progress
from apps.finetuning.jobs.waits import Wait, explain_waits
from apps.finetuning.lifecycle import JOB_TERMINAL, JobStatus
from apps.finetuning.models import FineTuningJob
from apps.finetuning.recipes.stored_requests import StoredRequest, recipe_of, stored_request
from apps.finetuning.results.missing_parts import list_missing
from apps.finetuning.results.result_file import result_file_id
from apps.finetuning.runs import attempts
from apps.interfaces.api.native.estimates import usd
from apps.interfaces.api.requests.times import unix_seconds


class MissingPartObject(TypedDict):
    kind: str
    cause: str
    fix: str


class StartObject(TypedDict):
    """Unix times between which the job starts, by the estimates of the work before it."""

    earliest: int
    latest: int


class WaitMembers(TypedDict):
    """Why a queued job waits. All are null for others; the start is null if it is unknown."""

    queue_position: int | None
    waiting_for: Literal["capacity", "group", "share", "quota", "budget", "region"] | None
    waiting_reason: str | None
    estimated_start: StartObject | None


class OurMembers(TypedDict):
    """What a job has beside OpenAI's members. Amounts in dollars are exact decimal texts.

    `base_model` is the one that is fine-tuned, also if `model` is a fine-tuned model or a checkpoint to continue.
    `spend_cap_usd` is the maximum that you pay. If `price_policy` is "firm", a slower run continues at our expense; if
    it is "metered", it pauses there.
    """

    base_model: str
    user_provided_suffix: str | None
    recipe: dict[str, Any]
    recipe_choices: list[dict[str, Any]]
    continues: dict[str, Any] | None
    delivered_as: Literal["adapter", "model"]
    pool: str | None
    gpu_count: int | None
    node_count: int | None
    gpu_type: str | None
    estimate: dict[str, Any] | None
    step: int
    total_steps: int | None
    seconds_remaining: float | None
    price_policy: Literal["firm", "metered"] | None
    spend_cap_usd: str | None
    held_usd: str | None
    billed_gpu_seconds: float
    cost_usd: str | None
    missing: list[MissingPartObject]
    adapter_status: str | None


class SuggestionObject(TypedDict):
    text: str
    changes: dict[str, Any]
    estimated_cost_usd: str | None
    hold_usd: str | None
    pool: str | None
    obstacle: str | None


class JobError(TypedDict):
    """The members after `blame` come with a single job, not with lists."""

    code: str
    message: str
    param: str | None
    blame: str
    cause: NotRequired[str]
    evidence: NotRequired[list[Any]]
    log_tail: NotRequired[str | None]
    suggestion: NotRequired[SuggestionObject]


class JobObject(OurMembers, WaitMembers):
    """OpenAI's job, with Anneal's members."""

    id: str
    object: Literal["fine_tuning.job"]
    created_at: int
    finished_at: int | None
    model: str
    fine_tuned_model: str | None
    organization_id: str
    project_id: str
    status: str
    training_file: str
    validation_file: str | None
    hyperparameters: dict[str, Any]
    method: dict[str, Any]
    trained_tokens: int | None
    result_files: list[str]
    seed: int
    error: JobError | None
    estimated_finish: int | None
    integrations: list[dict[str, Any]]
    metadata: dict[str, str]


def job_object(job: FineTuningJob, *, why: Explanation | None = None) -> JobObject:
    """Return the job as OpenAI's object, with our additional members. `why` explains the failure of a failed job."""
    (found,) = job_objects([job])
    return {**found, "error": _error(job, why)}


def job_objects(jobs: Sequence[FineTuningJob]) -> list[JobObject]:
    """Return the jobs as `job_object` does. Further queued jobs take no further statements."""
    now = db_now()
    progress, waits = list_progress(jobs=jobs, now=now), explain_waits(jobs=jobs, now=now)
    with_hold = [job for job in jobs if job.hold_id]
    holding = [job for job in with_hold if job.status not in JOB_TERMINAL and job.status != JobStatus.PAUSED]
    held = {job.pk: 0 for job in with_hold} | attempts.resume_holds_nano(jobs=holding)
    return [_job_object(job, progress[job.pk], waits.get(job.pk), held.get(job.pk), now) for job in jobs]


def _job_object(
    job: FineTuningJob, progress: JobProgress, wait: Wait | None, held_nano: int | None, now: datetime.datetime
) -> JobObject:
    recipe, requested = job.hyperparameters, stored_request(job)
    theirs = {
        "n_epochs": _asked(requested, "epochs", recipe),
        "batch_size": _asked(requested, "batch_size", recipe),
        "learning_rate_multiplier": _asked(requested, "learning_rate_multiplier", {}),
    }
    kind = str(recipe.get("objective", Objective.SUPERVISED.value))
    beta = {"beta": _asked(requested, f"{kind}_beta", recipe)} if Objective(kind).is_preference else {}
    return {
        "id": job.pk,
        "object": "fine_tuning.job",
        "created_at": int(job.created_at.timestamp()),
        "finished_at": unix_seconds(job.finished_at),
        "model": requested.start_from.sent_name or job.base_model.name,
        "fine_tuned_model": job.adapter_version.model_name if job.adapter_version else None,
        "organization_id": job.organization_id,
        "project_id": job.project_id,
        "status": job.status,
        "training_file": job.training_file_id,
        "validation_file": job.validation_file_id,
        "hyperparameters": theirs,
        "method": {"type": kind, kind: {"hyperparameters": theirs | beta}},
        "trained_tokens": job.trained_tokens if job.status == JobStatus.SUCCEEDED else None,
        "result_files": [file_id] if (file_id := result_file_id(job)) else [],
        "seed": job.seed,
        "error": _error(job, None),
        "estimated_finish": unix_seconds(finish_of(progress, now=now)),
        "integrations": msgspec.to_builtins(requested.integrations),
        "metadata": job.metadata,
        **_ours(job, requested, progress, held_nano),
        **_wait_members(wait, now),
    }


def _asked(requested: StoredRequest, name: str, recipe: Mapping[str, object]) -> object:
    """Return a hyperparameter as it was sent, or "auto". A job without this record returns what the recipe has."""
    found = (recipe if requested.asked is None else requested.asked).get(name)
    return "auto" if found is None else found


def _ours(job: FineTuningJob, requested: StoredRequest, progress: JobProgress, held_nano: int | None) -> OurMembers:
    return {
        "base_model": job.base_model.name,
        "user_provided_suffix": requested.suffix or job.suffix or None,
        "recipe": job.hyperparameters,
        "recipe_choices": msgspec.to_builtins(requested.choices),
        "continues": msgspec.to_builtins(requested.start_from) or None,
        "delivered_as": "adapter" if recipe_of(job).is_servable else "model",
        "pool": job.pool.name if job.pool else None,
        "gpu_count": job.gpu_count if job.pool else None,
        "node_count": job.node_count if job.pool else None,
        "gpu_type": job.pool.gpu_type.name if job.pool else None,
        "estimate": job.estimate or None,
        "step": job.step,
        "total_steps": job.total_steps,
        "seconds_remaining": None if progress.seconds_left is None else round(progress.seconds_left, 1),
        "price_policy": ("firm" if job.is_firm else "metered") if job.hold_id else None,
        "spend_cap_usd": usd(job.spend_cap_nano) if job.hold_id else None,
        "held_usd": usd(held_nano),
        "billed_gpu_seconds": job.billed_gpu_ms / 1000,
        "cost_usd": usd(job.cost_nano),
        "missing": [
            {"kind": part.kind, "cause": part.cause, "fix": part.fix} for part in list_missing(job.adapter_version)
        ],
        "adapter_status": job.adapter_version.status if job.adapter_version else None,
    }


def _wait_members(wait: Wait | None, now: datetime.datetime) -> WaitMembers:
    start: StartObject | None = None
    if wait and wait.starts_after:
        earliest, latest = (int(now.timestamp() + seconds) for seconds in wait.starts_after)
        start = {"earliest": earliest, "latest": latest}
    return {
        "queue_position": wait.position if wait else None,
        "waiting_for": wait.cause.value if wait else None,
        "waiting_reason": wait.reason if wait else None,
        "estimated_start": start,
    }


def _error(job: FineTuningJob, why: Explanation | None) -> JobError | None:
    if job.status != JobStatus.FAILED:
        return None
    # A code that is not a run's failure was refused before anything ran.
    blame = FailureCode(job.error_code).blame if job.error_code in list(FailureCode) else Blame.CUSTOMER
    error: JobError = {
        "code": job.error_code,
        "message": job.error_message,
        "param": job.error_param or None,
        "blame": blame.value,
    }
    if why is None:
        return error
    advice = why.suggestion
    return {
        **error,
        "cause": why.cause,
        "evidence": msgspec.to_builtins(why.evidence),
        "log_tail": why.log_tail or None,
        "suggestion": {
            "text": advice.text,
            "changes": advice.changes,
            "estimated_cost_usd": usd(advice.price_nano),
            "hold_usd": usd(advice.hold_nano),
            "pool": advice.pool or None,
            "obstacle": advice.obstacle or None,
        },
    }
