"""Dry runs: a job is created by the real code, with all its checks, and rolled back."""

import datetime
from dataclasses import dataclass, replace

from django.conf import settings
from django.db import transaction

from apps.accounts.models import Organization
from apps.catalog.licences import LicenceNotAccepted
from apps.catalog.models import BaseModel
from apps.contracts.hyperparameters import Hyperparameters
from apps.core.errors import DomainError, QuotaExceeded
from apps.datasets.inspection.comparisons import find_or_compare
from apps.datasets.queries import get_version
from apps.finetuning.jobs.admission import CannotLaunch, DoesNotFit, MaximumRaised
from apps.finetuning.jobs.creation import create_job
from apps.finetuning.jobs.files import require_ready
from apps.finetuning.jobs.requests import JobRequest, choose_recipe
from apps.finetuning.models import FineTuningJob
from apps.finetuning.quotes.options import PoolQuote
from apps.finetuning.quotes.queries import get_quotes
from apps.finetuning.recipes.start_points import find_start_point

# Reasons why a valid request cannot start now. Any other error is in the request itself.
_REFUSALS = (DoesNotFit, CannotLaunch, MaximumRaised, QuotaExceeded, LicenceNotAccepted)


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """The result that creating the job would have had. If it was refused, pool, GPUs, machines and hold are None."""

    base_model: BaseModel
    recipe: Hyperparameters
    left_out_rows: int  # they repeat the validation file, `near_rows` of them only nearly, and are not trained on
    near_rows: int
    quotes: list[PoolQuote]
    pool: str | None
    gpu_count: int | None
    node_count: int | None
    hold_nano: int | None
    refusal: DomainError | None


class _Undo(Exception):
    """Carries the job out of the transaction that is rolled back."""

    def __init__(self, job: FineTuningJob) -> None:
        super().__init__(job.pk)
        self.job = job


def rehearse_job(
    *, organization: Organization | str, request: JobRequest, by: str, now: datetime.datetime
) -> Rehearsal:
    """Create the job and roll it back.

    Raises NotFound, InvalidValue and InvalidTrainingFile as `create_job` does, and StillValidating for files whose
    validation is not finished. An error that only prevents the launch is returned instead.
    """
    beginning = find_start_point(organization=organization, model=request.base_model)
    version = get_version(organization=organization, id=request.training_file, param="training_file")
    require_ready(version, "training_file")
    validation = None
    if request.validation_file:
        validation = get_version(organization=organization, id=request.validation_file, param="validation_file")
        require_ready(validation, "validation_file")
    recipe = choose_recipe(beginning, request, training_file=version, validation_file=validation).hyperparameters
    quotes = get_quotes(
        base_model=beginning.base_model,
        version=version,
        recipe=recipe,
        now=now,
        validation=validation,
        max_age_seconds=settings.ESTIMATE_FACTS_SECONDS,
        node_count=request.node_count,
    )
    compared = find_or_compare(version=version, other=validation) if validation else None
    job, refusal = _create_and_undo(organization, request, by, now)
    return Rehearsal(
        base_model=beginning.base_model,
        recipe=recipe,
        left_out_rows=compared.left_out_rows if compared else 0,
        near_rows=compared.near_rows if compared else 0,
        quotes=quotes,
        pool=job.pool.name if job and job.pool else None,
        gpu_count=job.gpu_count if job and job.pool else None,
        node_count=job.node_count if job and job.pool else None,
        hold_nano=job.spend_cap_nano if job else None,
        refusal=refusal,
    )


def _create_and_undo(
    organization: Organization | str, request: JobRequest, by: str, now: datetime.datetime
) -> tuple[FineTuningJob | None, DomainError | None]:
    fresh = replace(request, idempotency_key=None, is_retry=False)
    try:
        with transaction.atomic():
            raise _Undo(create_job(organization=organization, request=fresh, by=by, now=now))
    except _Undo as undone:
        return undone.job, None
    except _REFUSALS as refused:
        return None, refused
