"""Creation of jobs: a request becomes a job, which is admitted at once or waits for its files."""

import datetime
from collections.abc import Mapping

import msgspec
from django.db import transaction
from django.utils.translation import gettext

from apps.accounts.members.projects import require_project
from apps.accounts.models import Membership, Organization, default_project_id, key_of
from apps.billing.budgets import attribution_of_actor
from apps.catalog.licences import require_licence
from apps.contracts.hyperparameters import Hyperparameters
from apps.core import audit
from apps.core.database import locks
from apps.core.errors import InvalidValue
from apps.core.messages import outbox, tracing
from apps.finetuning import events
from apps.finetuning.jobs.admission import admit, is_ready_to_admit
from apps.finetuning.jobs.files import usable_files
from apps.finetuning.jobs.requests import JobRequest, asked_hyperparameters, choose_recipe
from apps.finetuning.models import FineTuningJob
from apps.finetuning.quotes.delivery import required_exports
from apps.finetuning.quotes.obstacles import require_machines
from apps.finetuning.quotes.options import split_key
from apps.finetuning.recipes.start_points import find_start_point
from apps.finetuning.recipes.stored_requests import StoredRequest
from apps.finetuning.recipes.suffixes import plain_suffix
from apps.finetuning.runs.judges import require_judge
from apps.finetuning.runs.trackers import check_integrations
from apps.finetuning.usage.charges import cheapest_start_nano, require_cap
from apps.finetuning.usage.quotas import require_place_for_job

_MAX_METADATA = 16
_RETRY_WINDOW = datetime.timedelta(minutes=10)


@transaction.atomic
def create_job(
    *, organization: Organization | str, request: JobRequest, by: str, now: datetime.datetime
) -> FineTuningJob:
    """Create the job; if its files are already validated, hold its cost and queue it in the same transaction.

    Otherwise the job waits in `validating_files` without a hold, until `admit_when_ready` admits or fails it.

    The same idempotency key returns the same job, and so does a client's automatic retry within minutes. Raises
    NotFound, LicenceNotAccepted, InvalidValue, InvalidTrainingFile, DoesNotFit, CannotLaunch, QuotaExceeded,
    InsufficientBalance, and what `require_project` raises; an error leaves nothing behind.
    """
    if found := _created_before(organization, request, by, now):
        return found
    job = _new_job(organization, request, by)
    tracing.annotate({"anneal.job.id": job.pk})
    events.append(job, message="Created fine-tuning job")
    audit.record(organization=organization, by=by, action="job.created", target=job.pk, model=request.base_model)
    if is_ready_to_admit(job):
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
        locks.lock(f"job:{key_of(organization)}:{repeated}")
    jobs = FineTuningJob.objects.for_organization(organization)
    if request.idempotency_key is not None:
        return jobs.filter(idempotency_key=request.idempotency_key).first()
    if request.is_retry:
        recent = jobs.filter(created_by=by, created_at__gte=now - _RETRY_WINDOW)
        return recent.filter(requested__fingerprint=request.fingerprint).order_by("-created_at").first()
    return None


def _new_job(organization: Organization | str, request: JobRequest, by: str) -> FineTuningJob:
    start_point = find_start_point(organization=organization, model=request.base_model)
    base_model = start_point.base_model
    require_licence(organization=organization, base_model=base_model)
    training_file, validation_file = usable_files(organization, request.training_file, request.validation_file)
    chosen = choose_recipe(start_point, request, training_file=training_file, validation_file=validation_file)
    recipe = chosen.hyperparameters
    suffix = plain_suffix(request.suffix or "")
    _check_machines(request, recipe)
    _check_metadata(request.metadata)
    require_judge(organization=organization, plan=request.evaluation)
    if request.spend_cap_nano is not None and request.spend_cap_nano <= 0:
        raise InvalidValue(gettext("The spend cap must be above zero."), param="budget.max_cost_usd")
    if request.spend_cap_nano is not None:  # admission checks the cost of a start on the chosen pool
        require_cap(cap_nano=request.spend_cap_nano, least_nano=cheapest_start_nano(organization=organization))
    project_id = _project_of_member(organization, request, by)
    whose = attribution_of_actor(organization=organization, by=by, labels=request.metadata, project_id=project_id)
    return FineTuningJob.objects.create(
        organization_id=key_of(organization),
        base_model=base_model,
        training_file=training_file,
        validation_file=validation_file,
        suffix=suffix,
        method=recipe.method,
        hyperparameters=msgspec.to_builtins(recipe),
        requested=msgspec.to_builtins(
            StoredRequest(
                pool=request.pool,
                preferred_pool=request.preferred_pool,
                gpu_count=request.gpu_count,
                node_count=request.node_count,
                spend_cap_nano=request.spend_cap_nano,
                shown_max_nano=request.shown_max_nano,
                fingerprint=request.fingerprint,
                start_from=start_point.start_from,
                asked=asked_hyperparameters(request),
                objective=request.objective,
                integrations=check_integrations(organization=organization, asked=request.integrations),
                choices=chosen.choices,
                evaluation=request.evaluation,
                suffix=request.suffix or "",
                exports=tuple(required_exports(base_model=base_model, recipe=recipe, asked=request.exports)),
            )
        ),
        metadata=dict(request.metadata),
        project_id=whose.project_id,
        member_id=whose.member_id,
        labels=dict(whose.labels),
        seed=recipe.seed,
        created_by=by,
        traceparent=tracing.current(),
        idempotency_key=request.idempotency_key,
    )


def _project_of_member(organization: Organization | str, request: JobRequest, by: str) -> str:
    """Return the project that a member asks for, or the default; "" for a key, which has its own.

    Raises NotFound, InvalidState, PermissionDenied.
    """
    if not by.startswith("user_"):
        return ""
    membership = Membership.objects.for_organization(organization).filter(user_id=by).first()
    if membership is None:  # they have left since they asked for a retry or a retraining
        return request.project
    wanted = request.project or default_project_id(organization)
    return require_project(organization=organization, id=wanted, membership=membership).pk


def _check_machines(request: JobRequest, recipe: Hyperparameters) -> None:
    """Raise InvalidValue for a malformed option, and for several machines that cannot share the job."""
    require_machines(recipe, request.node_count)
    _, gpu_count = split_key(request.pool or "", gpu_count=request.gpu_count)
    if gpu_count is not None and gpu_count % request.node_count:
        message = gettext(
            "%(node_count)s machines share the %(gpu_count)s GPUs: give a multiple of %(node_count)s."
        ) % {"node_count": request.node_count, "gpu_count": gpu_count}
        raise InvalidValue(message, param="compute.gpu_count")


def _check_metadata(metadata: Mapping[str, str]) -> None:
    if len(metadata) > _MAX_METADATA or any(
        not isinstance(value, str) or len(key) > 64 or len(value) > 512 for key, value in metadata.items()
    ):
        raise InvalidValue(
            gettext("metadata has at most 16 pairs, keys up to 64 and string values up to 512 characters."),
            param="metadata",
        )
