"""Creation and admission of jobs: a request becomes a job, and its cost is held. `control` stops jobs."""

import datetime
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from django.db import transaction

from apps.accounts.models import Organization
from apps.catalog.licences import require_licence
from apps.contracts.evaluation import EvaluationPlan
from apps.contracts.runs import Hyperparameters, Method, Objective
from apps.core import audit
from apps.core.database import locks
from apps.core.database.clock import db_now
from apps.core.database.transitions import advance
from apps.core.errors import DomainError, InvalidValue, Unavailable
from apps.core.messages import outbox
from apps.datasets.lifecycle import DatasetVersionStatus
from apps.datasets.models import DatasetVersion
from apps.datasets.operations import request_count
from apps.datasets.queries import find_token_count
from apps.finetuning import events
from apps.finetuning.jobs.files import data_facts, invalid_file, require_objective, require_rows_to_train, usable_file
from apps.finetuning.lifecycle import JOB_TRANSITIONS, JobStatus
from apps.finetuning.models import FineTuningJob
from apps.finetuning.quotes.computation import snapshot, with_plan
from apps.finetuning.quotes.delivery import required_exports
from apps.finetuning.quotes.options import PoolQuote, split_key
from apps.finetuning.quotes.queries import counting_model, get_quotes, is_still_comparing, is_still_counting
from apps.finetuning.recipes import completion
from apps.finetuning.recipes.requests import StoredRequest, stored_request
from apps.finetuning.recipes.start_points import StartPoint, find_start_point
from apps.finetuning.runs import attempts, outcomes
from apps.finetuning.runs.judges import require_judge
from apps.finetuning.runs.trackers import check_integrations
from apps.finetuning.usage.charges import cheapest_start_nano, require_cap
from apps.finetuning.usage.quotas import require_place_for_job, require_room_for_job
from apps.finetuning.usage.storage import require_any_storage

SUFFIX = re.compile(r"^[a-z0-9](?:[a-z0-9-]{0,62}[a-z0-9])?$")
_MAX_METADATA = 16
_RETRY_WINDOW = datetime.timedelta(minutes=10)


class IdempotencyKeyReused(DomainError):
    """The same key came with two different requests; neither is a repetition of the other."""

    code = "idempotency_key_reused"


class DoesNotFit(DomainError):
    """No pool can hold the job; the message describes what would fit."""

    code = "job_too_large"


class CannotLaunch(DomainError):
    """The pool (or every pool) cannot take the job now; the message gives the reason."""

    code = "cannot_launch"


@dataclass(frozen=True)
class JobRequest:
    """A customer's request for a job.

    `hyperparameters` may be partial. `pool` and `gpu_count` None mean the cheapest; `pool` may be the key of an option,
    which includes its GPUs. `base_model` may name an adapter version or a checkpoint to continue from. `objective` None
    follows the rows.
    """

    base_model: str
    training_file: str
    validation_file: str | None = None
    method: Method = Method.LORA
    objective: Objective | None = None
    hyperparameters: Mapping[str, object] = field(default_factory=dict)
    pool: str | None = None
    gpu_count: int | None = None
    spend_cap_nano: int | None = None
    suffix: str = ""
    seed: int | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    integrations: Sequence[Mapping[str, object]] = ()
    evaluation: EvaluationPlan | None = None
    exports: Sequence[str] = ()
    idempotency_key: str | None = None
    fingerprint: str = ""
    is_retry: bool = False


@transaction.atomic
def create_job(
    *, organization: Organization | str, request: JobRequest, by: str, now: datetime.datetime
) -> FineTuningJob:
    """Create the job; if its files are already validated, hold its cost and queue it in the same transaction.

    Otherwise the job waits in `validating_files` without a hold, until `admit_when_ready` admits or fails it.

    The same idempotency key returns the same job, and so does a client's automatic retry within minutes. Raises
    NotFound, LicenceNotAccepted, InvalidValue, InvalidTrainingFile, DoesNotFit, CannotLaunch, QuotaExceeded,
    InsufficientBalance; an error leaves nothing behind.
    """
    if found := _created_before(organization, request, by, now):
        return found
    job = _new_job(organization, request, by)
    events.append(job, message="Created fine-tuning job")
    audit.record(organization=organization, by=by, action="job.created", target=job.pk, model=request.base_model)
    if _is_ready_to_admit(job):
        admit(job=job, now=now)
    else:
        require_place_for_job(organization=organization, but=job)
        events.append(job, message=f"Validating training file: {job.training_file.pk}")
        payload = {"job_id": job.pk}
        outbox.publish(topic="job.admit", key=f"admit:{job.pk}", payload=payload, organization=job.organization_id)
    return job


def _created_before(
    organization: Organization | str, request: JobRequest, by: str, now: datetime.datetime
) -> FineTuningJob | None:
    """Return the job that an earlier copy of this request created; wait for one that is being created."""
    if repeated := request.idempotency_key or request.fingerprint:
        organization_id = organization if isinstance(organization, str) else organization.pk
        locks.lock(f"job:{organization_id}:{repeated}")
    jobs = FineTuningJob.objects.for_organization(organization)
    if request.idempotency_key is not None:
        found = jobs.filter(idempotency_key=request.idempotency_key).first()
        if found is not None and stored_request(found).fingerprint != request.fingerprint:
            raise IdempotencyKeyReused("This Idempotency-Key was sent with another body: use a new key for a new job.")
        return found
    if request.is_retry:
        recent = jobs.filter(created_by=by, created_at__gte=now - _RETRY_WINDOW)
        return recent.filter(requested__fingerprint=request.fingerprint).order_by("-created_at").first()
    return None


def _new_job(organization: Organization | str, request: JobRequest, by: str) -> FineTuningJob:
    start_point = find_start_point(organization=organization, model=request.base_model)
    base_model = start_point.base_model
    require_licence(organization=organization, base_model=base_model)
    training_file = usable_file(organization, request.training_file, "training_file")
    validation_file = request.validation_file and usable_file(organization, request.validation_file, "validation_file")
    chosen = choose_recipe(start_point, request, training_file=training_file, validation_file=validation_file or None)
    recipe = chosen.hyperparameters
    if request.suffix and not SUFFIX.fullmatch(request.suffix):
        raise InvalidValue(
            "suffix has up to 64 of a-z, 0-9 and -, and starts and ends with a letter or digit.", param="suffix"
        )
    _check_metadata(request.metadata)
    require_judge(organization=organization, plan=request.evaluation)
    if request.spend_cap_nano is not None and request.spend_cap_nano <= 0:
        raise InvalidValue("The spend cap must be above zero.", param="budget.max_cost_usd")
    if request.spend_cap_nano is not None:  # admission checks the cost of a start on the chosen pool
        require_cap(cap_nano=request.spend_cap_nano, least_nano=cheapest_start_nano(organization=organization))
    return FineTuningJob.objects.create(
        organization_id=organization if isinstance(organization, str) else organization.pk,
        base_model=base_model,
        training_file=training_file,
        validation_file=validation_file or None,
        suffix=request.suffix,
        method=request.method,
        hyperparameters=msgspec.to_builtins(recipe),
        requested=msgspec.to_builtins(
            StoredRequest(
                pool=request.pool,
                gpu_count=request.gpu_count,
                spend_cap_nano=request.spend_cap_nano,
                fingerprint=request.fingerprint,
                start_from=start_point.start_from,
                asked=_asked(request),
                objective=request.objective,
                integrations=check_integrations(organization=organization, asked=request.integrations),
                choices=chosen.choices,
                evaluation=request.evaluation,
                exports=tuple(required_exports(base_model=base_model, recipe=recipe, asked=request.exports)),
            )
        ),
        metadata=dict(request.metadata),
        seed=recipe.seed,
        created_by=by,
        idempotency_key=request.idempotency_key,
    )


def choose_recipe(
    start_point: StartPoint,
    request: JobRequest,
    *,
    training_file: DatasetVersion,
    validation_file: DatasetVersion | None,
) -> completion.Recipe:
    """Return the recipe of the request. Raises InvalidValue and InvalidTrainingFile."""
    chosen = completion.choose(
        base_model=start_point.base_model,
        method=request.method,
        asked=start_point.require_shape(_asked(request), method=request.method),
        objective=require_objective(request.objective, training_file, validation_file),
        data=data_facts(
            version=training_file,
            validation=validation_file,
            count=find_token_count(version=training_file, base_model=start_point.base_model),
        ),
    )
    if validation_file is not None and chosen.hyperparameters.validation_share:
        message = "Give a validation file or a share to hold out, not both."
        raise InvalidValue(message, param="hyperparameters.validation_share")
    require_rows_to_train(training_file, validation_file)
    return chosen


def _asked(request: JobRequest) -> dict[str, object]:
    """Return the hyperparameters the customer set."""
    return dict(request.hyperparameters) | ({} if request.seed is None else {"seed": request.seed})


def _check_metadata(metadata: Mapping[str, str]) -> None:
    if len(metadata) > _MAX_METADATA or any(
        not isinstance(value, str) or len(key) > 64 or len(value) > 512 for key, value in metadata.items()
    ):
        raise InvalidValue(
            "metadata has at most 16 pairs, keys up to 64 and string values up to 512 characters.", param="metadata"
        )


def _is_ready_to_admit(job: FineTuningJob) -> bool:
    files = [job.training_file, *([job.validation_file] if job.validation_file else [])]
    if any(version.status != DatasetVersionStatus.READY for version in files):
        return False
    count = find_token_count(version=job.training_file, base_model=job.base_model)
    if is_still_counting(version=job.training_file, count=count, base_model=job.base_model):
        return False
    return not is_still_comparing(version=job.training_file, validation=job.validation_file)


def admit(*, job: FineTuningJob, now: datetime.datetime) -> None:
    """Choose the pool, hold the cost and queue the first attempt. Raises the errors of `create_job`."""
    require_objective(Objective(job.hyperparameters["objective"]), job.training_file, job.validation_file)
    require_rows_to_train(job.training_file, job.validation_file)
    quoted = _choose_pool(job, now)
    estimate = quoted.estimate
    cap_nano = stored_request(job).spend_cap_nano or quoted.cap_nano
    if quoted.price is None or cap_nano is None:
        raise CannotLaunch("The job has no price.", param="compute.pool")
    require_cap(cap_nano=cap_nano, least_nano=quoted.least_cap_nano or 0)
    job.gpu_count = estimate.gpu_count
    require_any_storage(organization=job.organization_id)
    run_seconds = estimate.run_seconds_p50 or estimate.train_seconds_p50 or 0.0
    require_room_for_job(job=job, seconds=run_seconds * job.gpu_count, now=now)
    recipe = with_plan(msgspec.convert(job.hyperparameters, Hyperparameters), estimate)
    held = attempts.hold_cap(
        job=job,
        price_rule=quoted.price,
        amount_nano=cap_nano,
        by=job.created_by,
        idempotency_key=f"hold:{job.pk}",
    )
    advance(
        job,
        to=JobStatus.QUEUED,
        transitions=JOB_TRANSITIONS,
        pool=quoted.pool,
        gpu_count=estimate.gpu_count,
        price_rule=quoted.price,
        estimate=snapshot(estimate) | outcomes.provenance(base_model=job.base_model, correction=quoted.correction),
        hyperparameters=msgspec.to_builtins(recipe),
        spend_cap_nano=cap_nano,
        hold_id=held.pk,
        queued_at=now,
        total_steps=estimate.steps,
    )
    attempts.queue_attempt(job=job)
    events.append(
        job,
        type="state",
        message=f"Files validated, moving job to queued state on {_place(quoted)}",
        hold_nano=cap_nano,
        pool=quoted.pool.name,
        gpu_count=estimate.gpu_count,
    )


def _place(quoted: PoolQuote) -> str:
    return quoted.pool.name if quoted.gpu_count == 1 else f"{quoted.gpu_count} GPUs of {quoted.pool.name}"


def _choose_pool(job: FineTuningJob, now: datetime.datetime) -> PoolQuote:
    recipe = msgspec.convert(job.hyperparameters, Hyperparameters)
    quotes = get_quotes(
        base_model=job.base_model,
        version=job.training_file,
        recipe=recipe,
        now=now,
        validation=job.validation_file,
    )
    asked = stored_request(job)
    name, gpu_count = split_key(asked.pool or "", gpu_count=asked.gpu_count)
    if name:
        quotes = [quoted for quoted in quotes if quoted.pool.name == name]
        if not quotes:
            raise InvalidValue(f"There is no open GPU pool named {name!r}.", param="compute.pool")
    if not quotes:
        raise CannotLaunch("No GPU pool is open on this platform.", param="compute.pool")
    quotes = _with_gpus(quotes, gpu_count)
    if not any(quoted.estimate.fits for quoted in quotes):
        raise DoesNotFit(
            _suggest_fit(quotes[0]),
            param="compute.pool",
            fixes=[msgspec.to_builtins(fix) for fix in quotes[0].estimate.fixes],
        )
    if not quotes[0].is_launchable:
        raise CannotLaunch(f"{quotes[0].pool.name}: {quotes[0].block_reason}", param="compute.pool")
    return quotes[0]


def _with_gpus(quotes: list[PoolQuote], gpu_count: int | None) -> list[PoolQuote]:
    """Return the options with this number of GPUs, all for None. Raises InvalidValue listing the numbers offered."""
    found = [quoted for quoted in quotes if gpu_count in (None, quoted.gpu_count)]
    if not found:
        offered = ", ".join(str(count) for count in sorted({quoted.gpu_count for quoted in quotes}))
        raise InvalidValue(
            f"This job is not offered on {gpu_count} GPUs: they would not share its batch evenly, not hold it, or not "
            f"be faster. Offered: {offered}.",
            param="compute.gpu_count",
        )
    return found


def _suggest_fit(quoted: PoolQuote) -> str:
    fixes = " ".join(fix.text for fix in quoted.estimate.fixes) or "Choose a smaller base model."
    return f"The job fits no open pool. {quoted.pool.name}: {quoted.estimate.reason} {fixes}"


@transaction.atomic
def admit_when_ready(*, job_id: str) -> None:
    """Admit a job whose files are now validated, or fail it with the reason; leave it if it must still wait."""
    job = (
        FineTuningJob.objects.select_for_update(of=("self",))
        .select_related("training_file", "validation_file", "base_model")
        .get(pk=job_id)
    )
    if job.status != JobStatus.VALIDATING_FILES:
        return
    now = db_now()
    try:
        with transaction.atomic():
            _admit_if_validated(job, now)
    except Unavailable:
        return  # temporary: the job is checked again in some seconds
    except DomainError as refused:
        job.refresh_from_db()
        _refuse(job, refused, now)


def _admit_if_validated(job: FineTuningJob, now: datetime.datetime) -> None:
    for version, param in ((job.training_file, "training_file"), (job.validation_file, "validation_file")):
        if version is None:
            continue
        if version.status in (DatasetVersionStatus.INVALID, DatasetVersionStatus.DELETED):
            raise invalid_file(version, param)
        if version.status != DatasetVersionStatus.READY:
            return
    counting = counting_model(job.base_model)
    count = find_token_count(version=job.training_file, base_model=counting)
    if counting.is_installed and is_still_counting(version=job.training_file, count=count, base_model=counting):
        request_count(version=job.training_file, base_model=counting)
        return
    if is_still_comparing(version=job.training_file, validation=job.validation_file):
        return
    _choose_again(job)
    admit(job=job, now=now)


def _choose_again(job: FineTuningJob) -> None:
    """Choose again the values the customer left open, now that the rows are known.

    A job that waited for its file gets the same recipe as one created after validation.
    """
    stored = stored_request(job)
    if stored.asked is None:
        return  # the job is older than this field
    model = stored.start_from.name or job.base_model.name
    asked = JobRequest(
        base_model=model,
        training_file=job.training_file.pk,
        method=Method(job.method),
        objective=stored.objective,
        hyperparameters=stored.asked,
    )
    chosen = choose_recipe(
        find_start_point(organization=job.organization_id, model=model),
        asked,
        training_file=job.training_file,
        validation_file=job.validation_file,
    )
    job.hyperparameters = msgspec.to_builtins(chosen.hyperparameters)
    job.requested = msgspec.to_builtins(msgspec.structs.replace(stored, choices=chosen.choices))
    job.save(update_fields=["hyperparameters", "requested"])


def _refuse(job: FineTuningJob, refused: DomainError, now: datetime.datetime) -> None:
    advance(
        job,
        to=JobStatus.FAILED,
        transitions=JOB_TRANSITIONS,
        finished_at=now,
        error_code=refused.code,
        error_message=refused.message[:500],
        error_param=refused.param or "",
    )
    events.append(job, type="state", level="error", message=f"Failed: {refused.message}", status=JobStatus.FAILED)
    audit.record(organization=job.organization_id, by="system", action="job.failed", target=job.pk, code=refused.code)
