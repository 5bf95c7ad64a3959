"""Restarts of a failed job as a new job, with the suggested change, at the price that was shown."""

import datetime
from contextlib import suppress
from typing import Any

import msgspec
from django.db import transaction
from django.utils.translation import gettext

from apps.accounts.members.projects import require_work_in
from apps.contracts.hyperparameters import Objective
from apps.core.database import locks
from apps.core.errors import DomainError, InvalidState
from apps.core.messages.translation import translated
from apps.core.objects.store import ObjectMissing
from apps.datasets.intake.revisions import fit_version, repair_version
from apps.datasets.lifecycle import DatasetVersionStatus
from apps.datasets.models import DatasetVersion
from apps.datasets.queries import find_token_count, get_version
from apps.datasets.validation.repair import RepairMode
from apps.finetuning import events
from apps.finetuning.jobs.admission import CannotLaunch, require_maximum
from apps.finetuning.jobs.creation import create_job
from apps.finetuning.jobs.requests import JobRequest
from apps.finetuning.jobs.suggestions import Suggestion, suggest
from apps.finetuning.lifecycle import JobStatus
from apps.finetuning.models import FineTuningJob
from apps.finetuning.quotes.queries import count_files, counting_model
from apps.finetuning.recipes.completion import CHOSEN_BY_US
from apps.finetuning.recipes.limits import get_limits
from apps.finetuning.recipes.stored_requests import recipe_of, stored_request


@transaction.atomic
def retry_job(
    *,
    job: FineTuningJob,
    by: str,
    now: datetime.datetime,
    spend_cap_nano: int | None = None,
    shown_max_nano: int | None = None,
) -> FineTuningJob:
    """Return a new job that starts a failed one again with the suggested change; a second call returns the same job.

    If a file must be repaired first, the repair creates a new version, and the job waits for it. `spend_cap_nano` None
    holds the suggested amount. Raises InvalidState unless the job failed, CannotLaunch if the suggestion cannot be
    started from here, MaximumRaised if it would hold more than `shown_max_nano`, and the errors of `create_job` and the
    repair, and PermissionDenied for a viewer of the job's project.
    """
    require_work_in(project_id=job.project_id, actor=by)
    if job.status != JobStatus.FAILED:
        raise InvalidState(
            gettext("%(id)s is %(status)s: only a job that failed is started again.")
            % {"id": job.pk, "status": job.status},
            param="fine_tuning_job_id",
        )
    key = f"retry:{job.pk}"
    locks.lock(f"job:{job.organization_id}:{key}")
    before = FineTuningJob.objects.for_organization(job.organization_id).filter(idempotency_key=key).first()
    if before is not None:
        return before
    for version in filter(None, (job.training_file, job.validation_file)):
        if version.status != DatasetVersionStatus.DELETED:  # the suggestion says so
            get_version(organization=job.organization_id, id=version.pk)  # raises if the request does not see it
    # Count and compare the job's files where that is missing. A file that cannot be counted may be repaired.
    counting, version, validation = counting_model(job.base_model), job.training_file, job.validation_file
    count = find_token_count(version=version, base_model=counting)
    with suppress(DomainError, ObjectMissing):
        count_files(version=version, count=count, validation=validation, counting=counting)
    suggestion = suggest(job=job, now=now)
    if suggestion.hold_nano is None:
        raise CannotLaunch(
            f"{translated(suggestion.text)} {translated(suggestion.obstacle)}", param="fine_tuning_job_id"
        )
    cap_nano = suggestion.hold_nano if spend_cap_nano is None else spend_cap_nano
    require_maximum(cap_nano=cap_nano, shown_nano=shown_max_nano)
    files = _files(job, suggestion, by=by, now=now)
    request = _request(job, suggestion, files, cap_nano=cap_nano, key=key)
    again = create_job(organization=job.organization_id, request=request, by=by, now=now)
    events.append(again, message=f"Starts {job.pk} again. {suggestion.text}")
    return again


def _files(
    job: FineTuningJob, suggestion: Suggestion, *, by: str, now: datetime.datetime
) -> dict[str, DatasetVersion | None]:
    """Return the files to train on by their param, repaired where the suggestion needs it."""
    change = suggestion.change
    validation = None if change.without_validation else job.validation_file
    files: dict[str, DatasetVersion | None] = {"training_file": job.training_file, "validation_file": validation}
    for param in change.repairs:
        version = files[param]
        assert version is not None
        if version.status == DatasetVersionStatus.INVALID:
            files[param] = repair_version(version=version, mode=RepairMode.REPAIR, by=by, now=now)
        else:
            files[param] = fit_version(version=version, base_model=job.base_model, by=by, now=now)
    return files


def _request(
    job: FineTuningJob, suggestion: Suggestion, files: dict[str, DatasetVersion | None], *, cap_nano: int, key: str
) -> JobRequest:
    """Return the original request, with every value of its recipe pinned to the priced one."""
    recipe = msgspec.structs.replace(recipe_of(job), **suggestion.change.recipe)
    limits = get_limits(base_model=job.base_model)
    values: dict[str, Any] = msgspec.to_builtins(recipe)
    before = stored_request(job)
    training, validation = files["training_file"], files["validation_file"]
    assert training is not None
    return JobRequest(
        base_model=before.start_from.name or job.base_model.name,
        training_file=training.pk,
        validation_file=validation.pk if validation else None,
        method=recipe.method,
        objective=Objective(recipe.objective),
        hyperparameters={
            name: value for name, value in values.items() if name not in CHOSEN_BY_US and limits.of(name) is not None
        },
        pool=suggestion.pool,
        gpu_count=None if ":" in suggestion.pool else 1,  # an option's key includes its GPUs
        node_count=before.node_count,
        spend_cap_nano=cap_nano,
        suffix=before.suffix or job.suffix,
        project=job.project_id,
        metadata=job.metadata,
        integrations=[msgspec.to_builtins(each) for each in before.integrations],
        evaluation=before.evaluation,
        exports=before.exports,
        idempotency_key=key,
        fingerprint=key,
    )
