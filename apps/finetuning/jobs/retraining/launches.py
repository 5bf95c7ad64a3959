"""The job of a retraining: the plan's job again, with the newest rows and within the plan's maximum price."""

import datetime
from dataclasses import replace

import msgspec
from django.utils.translation import gettext

from apps.accounts.members.projects import may_see
from apps.accounts.queries import find_actor
from apps.accounts.roles import Permission, has_permission
from apps.contracts.hyperparameters import Method, Objective
from apps.core.database.transitions import advance
from apps.core.errors import InvalidState, PermissionDenied
from apps.core.money import dollars
from apps.datasets.models import DatasetVersion
from apps.finetuning.jobs.admission import MaximumRaised
from apps.finetuning.jobs.creation import create_job
from apps.finetuning.jobs.requests import JobRequest
from apps.finetuning.jobs.retraining.endings import finish
from apps.finetuning.jobs.retraining.versions import newest_ready, require_comparable
from apps.finetuning.lifecycle import (
    RETRAINING_TRANSITIONS,
    JobStatus,
    RetrainingCode,
    RetrainingStatus,
    RetrainingTrigger,
)
from apps.finetuning.models import Retraining, RetrainingPlan
from apps.finetuning.recipes.stored_requests import recipe_of, stored_request

# What a plan does in the name of a member or key: it starts jobs, asks models and moves an alias.
RIGHTS = (Permission.JOB_WRITE, Permission.INFERENCE, Permission.ADAPTER_WRITE)
MAX_FAILED_JOBS = 3  # of a plan on one version; then its schedule waits for the next version


def require_actor(retraining: Retraining, now: datetime.datetime) -> None:
    """Raise PermissionDenied unless the member or key in whose name it acts may do now what it does."""
    actor = find_actor(organization=retraining.organization_id, actor=retraining.created_by, now=now)
    if actor is None or not all(has_permission(actor.role, right) for right in RIGHTS):
        text = gettext(
            "The member or key that last changed the plan is no longer allowed to run it. Change the plan with "
            "another key."
        )
        raise PermissionDenied(text)
    plan = retraining.plan
    datasets = [each for each in (plan.dataset, plan.held_out, plan.regression) if each is not None]
    projects = {plan.source_job.project_id, *(each.project_id for each in datasets)}
    if plan.alias is not None:
        projects.add(plan.alias.adapter.project_id)
    for project_id in projects:
        if not may_see(
            organization=retraining.organization_id, id=project_id, actor=retraining.created_by, membership=actor
        ):
            text = gettext("The member or key that changed the plan last no longer sees its job or its datasets.")
            raise PermissionDenied(text)


def launch(retraining: Retraining, now: datetime.datetime) -> None:
    """Create the job, or skip a scheduled retraining without new rows. Raises the errors of `create_job`."""
    plan = retraining.plan
    training = newest_ready(plan.dataset_id)
    if training is None:
        raise InvalidState(gettext("The dataset has no version that is ready."))
    if retraining.trigger == RetrainingTrigger.SCHEDULE and _is_done(plan, training):
        text = "The plan has already used the newest version of the dataset."
        finish(retraining, to=RetrainingStatus.SKIPPED, code=RetrainingCode.NOTHING_NEW, reason=text, now=now)
        return
    require_actor(retraining, now)
    held_out = require_comparable(newest_ready(plan.held_out_id), param="held_out")
    regression = None
    if plan.regression_id is not None:
        regression = require_comparable(newest_ready(plan.regression_id), param="regression")
    request = replace(
        job_request(plan, training, held_out),
        shown_max_nano=retraining.max_nano,
        metadata={"retraining_plan": retraining.plan_id, "retraining": retraining.pk},
        idempotency_key=f"retraining:{retraining.pk}",
        fingerprint=retraining.pk,
    )
    try:
        job = create_job(organization=retraining.organization_id, request=request, by=retraining.created_by, now=now)
    except MaximumRaised:
        finish(
            retraining, to=RetrainingStatus.REFUSED, code=RetrainingCode.ABOVE_MAXIMUM,
            reason=above_maximum(retraining), now=now,
        )  # fmt: skip
        return
    advance(
        retraining,
        to=RetrainingStatus.TRAINING,
        transitions=RETRAINING_TRANSITIONS,
        job=job,
        training_file=training,
        held_out_file=held_out,
        regression_file=regression,
        attempts=0,
    )


def above_maximum(retraining: Retraining) -> str:
    """Return the reason of a retraining whose job may cost too much."""
    return f"The job may cost more than the plan's maximum of {dollars(retraining.max_nano)}. Raise it, or use less."


def _is_done(plan: RetrainingPlan, version: DatasetVersion) -> bool:
    """Return whether the source job or a retraining has trained on the version, or too many retrainings failed to."""
    tried = plan.retrainings.filter(training_file=version)
    is_trained = version.pk == plan.source_job.training_file_id or (
        tried.exclude(job__status__in=(JobStatus.FAILED, JobStatus.CANCELLED)).exists()
    )
    return is_trained or tried.filter(status=RetrainingStatus.FAILED).count() >= MAX_FAILED_JOBS


def job_request(plan: RetrainingPlan, training: DatasetVersion, held_out: DatasetVersion) -> JobRequest:
    """Return the request of the plan's source job with other files: what was left open is chosen again for them."""
    job = plan.source_job
    before = stored_request(job)
    asked = dict(before.asked or {})
    asked.pop("validation_share", None)  # the held-out rows take its place
    return JobRequest(
        base_model=before.start_from.name or job.base_model.name,
        training_file=training.pk,
        validation_file=held_out.pk,
        method=Method(job.method),
        objective=Objective(recipe_of(job).objective),
        hyperparameters=asked,
        pool=before.pool,
        preferred_pool=before.preferred_pool,
        gpu_count=before.gpu_count,
        node_count=before.node_count,
        suffix=before.suffix or job.suffix,
        project=job.project_id,
        integrations=[msgspec.to_builtins(each) for each in before.integrations],
        evaluation=before.evaluation,
        exports=before.exports,
    )
