"""Retraining plans: what they need, their limits, their history, and retrainings on request."""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from django.db import transaction
from django.db.models import Case, F, Q, QuerySet, When, Window
from django.db.models.functions import RowNumber
from django.utils.translation import gettext

from apps.accounts.members.projects import require_work_in
from apps.accounts.members.visibility import visible
from apps.accounts.models import Organization
from apps.accounts.shares import get_share_holder, share_of
from apps.contracts.evaluation.graders import StringCheckGrader
from apps.contracts.hyperparameters import Objective
from apps.core import audit
from apps.core.audit_log import count_of_hour
from apps.core.database.locks import lock, lock_row
from apps.core.database.tenancy import id_of
from apps.core.errors import InvalidState, InvalidValue, NotFound, QuotaExceeded, RateLimited
from apps.core.ids import new_id
from apps.datasets.models import Dataset
from apps.finetuning.jobs.retraining.comparisons import stop
from apps.finetuning.jobs.retraining.schedules import Schedule, schedule_of
from apps.finetuning.jobs.retraining.triggers import MAX_A_DAY, begin, is_full_day
from apps.finetuning.jobs.retraining.versions import newest_ready, require_comparable
from apps.finetuning.lifecycle import RETRAINING_OPEN, JobStatus, RetrainingTrigger
from apps.finetuning.models import FineTuningJob, Retraining, RetrainingPlan
from apps.finetuning.recipes.stored_requests import recipe_of
from apps.serving.aliases import is_imported, list_aliases
from apps.serving.evals.costs import require_model
from apps.serving.evals.criteria import PairwiseCriterion, SentCriterion, check_criteria, models_of
from apps.serving.models import Alias

MAX_PLANS = 20  # of an organization
MAX_CREATED_IN_AN_HOUR = 60  # of an organization: a new plan may begin as many retrainings a day as an old one
EXACT = StringCheckGrader(name="exact", input="{{sample.output_text}}", reference="{{item.reference}}", operation="eq")
_PLAN_WITH = ("source_job", "dataset", "held_out", "regression", "alias__version")


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What a customer asks of a plan. Datasets and the alias are given by name or id.

    `held_out` None is the dataset of the job's validation file.
    """

    name: str
    source_job: str
    dataset: str
    alias: str
    max_nano: int
    held_out: str | None = None
    regression: str | None = None
    max_loss_points: float | None = None
    min_gain_points: float = 0.0
    schedule: Schedule | None = None
    min_new_rows: int | None = None
    testing_criteria: Sequence[SentCriterion] = (EXACT,)
    is_enabled: bool = True


def list_plans(*, organization: Organization | str) -> QuerySet[RetrainingPlan]:
    """Return the plans that the request sees, each in the project of its job, with what they name."""
    plans = visible(RetrainingPlan.objects.for_organization(organization), project="source_job__project")
    return plans.select_related(*_PLAN_WITH)


def get_plan(*, organization: Organization | str, id: str) -> RetrainingPlan:
    """Return one plan. Raises NotFound, the same for unknown and foreign ids."""
    found = list_plans(organization=organization).filter(pk=id).first() if "\x00" not in id else None
    if found is None:
        raise NotFound(gettext("There is no such retraining plan."), param="plan_id")
    return found


def list_retrainings(*, plan: RetrainingPlan) -> QuerySet[Retraining]:
    """Return the retrainings of a plan."""
    rows = Retraining.objects.for_organization(plan.organization_id).filter(plan=plan)
    return rows.select_related("job__adapter_version", "production")


def list_repeatable(*, organization: Organization | str) -> QuerySet[FineTuningJob]:
    """Return the visible jobs that a plan may name, newest first; one on other rows than chats is refused later."""
    jobs = visible(FineTuningJob.objects.for_organization(organization))
    jobs = jobs.filter(status=JobStatus.SUCCEEDED, adapter_version__isnull=False)
    return jobs.select_related("base_model").order_by("-created_at", "-pk")


def is_repeatable(job: FineTuningJob) -> bool:
    """Return whether a plan may name the job."""
    is_done = job.status == JobStatus.SUCCEEDED and job.adapter_version_id is not None
    return is_done and recipe_of(job).objective == Objective.SUPERVISED


def latest_retrainings(*, organization: Organization | str, count: int) -> dict[str, list[Retraining]]:
    """Return the newest retrainings of each plan by its id, at most `count` of each."""
    newest = Window(RowNumber(), partition_by="plan_id", order_by=[F("created_at").desc(), F("pk").desc()])
    rows = Retraining.objects.for_organization(organization)
    found: dict[str, list[Retraining]] = {}
    for row in rows.annotate(place=newest).filter(place__lte=count).order_by("place"):
        found.setdefault(row.plan_id, []).append(row)
    return found


def request_of(plan: RetrainingPlan) -> PlanRequest:
    """Return what was asked of the plan, to change some of it. A deleted alias is empty."""
    return PlanRequest(
        name=plan.name,
        source_job=plan.source_job_id,
        dataset=plan.dataset_id,
        alias=plan.alias_id or "",
        max_nano=plan.max_nano,
        held_out=plan.held_out_id,
        regression=plan.regression_id,
        max_loss_points=plan.max_loss_points,
        min_gain_points=plan.min_gain_points,
        schedule=schedule_of(plan),
        min_new_rows=plan.min_new_rows,
        testing_criteria=msgspec.convert(plan.testing_criteria, list[SentCriterion]),
        is_enabled=plan.is_enabled,
    )


def draft_plan(
    *,
    organization: Organization | str,
    request: PlanRequest,
    now: datetime.datetime,
    plan: RetrainingPlan | None = None,
) -> RetrainingPlan:
    """Return the plan that the request makes, or makes of `plan`, without keeping it. Raises NotFound, InvalidValue."""
    organization_id = id_of(organization)
    drafted = RetrainingPlan(organization_id=organization_id, **_columns(organization_id, request, now))
    if plan is not None:
        drafted.pk = plan.pk
    _require_own_name(drafted)
    return drafted


@transaction.atomic
def create_plan(
    *, organization: Organization | str, request: PlanRequest, by: str, now: datetime.datetime
) -> RetrainingPlan:
    """Create a plan. Its first retraining begins at its first due time, or when the dataset has grown enough.

    Raises NotFound, InvalidValue, QuotaExceeded, RateLimited, and PermissionDenied for a viewer of the job's project.
    """
    organization_id = id_of(organization)
    lock(f"retraining:{get_share_holder(organization=organization_id)}")
    with share_of(organization) as organizations:
        if RetrainingPlan.objects.filter(organization__in=organizations).count() >= MAX_PLANS:
            text = gettext("An organization has at most %(most)s retraining plans. Delete one first.")
            raise QuotaExceeded(text % {"most": MAX_PLANS})
        of_an_hour = sum(count_of_hour(organization=each, action="retraining_plan.created") for each in organizations)
    if of_an_hour >= MAX_CREATED_IN_AN_HOUR:
        text = gettext("An organization can create at most %(most)s retraining plans an hour. Try again later.")
        raise RateLimited(text % {"most": MAX_CREATED_IN_AN_HOUR}, retry_after_seconds=600)
    plan = draft_plan(organization=organization, request=request, now=now)
    require_work_in(project_id=plan.source_job.project_id, actor=by)
    plan.created_by = plan.acts_as = by
    _count_growth_from_source(plan)
    plan.save(force_insert=True)
    audit.record(organization=organization, by=by, action="retraining_plan.created", target=plan.pk)
    return get_plan(organization=organization_id, id=plan.pk)


@transaction.atomic
def change_plan(*, plan: RetrainingPlan, request: PlanRequest, by: str, now: datetime.datetime) -> RetrainingPlan:
    """Change a plan; from now on it acts in the name of `by`. A retraining that has begun continues.

    Raises as `create_plan`, but never if the plan is only stopped.
    """
    require_work_in(project_id=plan.source_job.project_id, actor=by)
    lock(f"retraining:{get_share_holder(organization=plan.organization_id)}")
    before = lock_row(plan)
    changed = get_plan(organization=plan.organization_id, id=plan.pk)
    if request != replace(request_of(before), is_enabled=False):
        _set(changed, request, before, now)
        require_work_in(project_id=changed.source_job.project_id, actor=by)
    changed.is_enabled, changed.acts_as = request.is_enabled, by
    changed.save()
    audit.record(organization=plan.organization_id, by=by, action="retraining_plan.changed", target=plan.pk)
    return changed


def _set(changed: RetrainingPlan, request: PlanRequest, before: RetrainingPlan, now: datetime.datetime) -> None:
    for name, value in _columns(changed.organization_id, request, now).items():
        setattr(changed, name, value)
    _require_own_name(changed)
    if schedule_of(before) == request.schedule and before.is_enabled:
        changed.next_due_at = before.next_due_at
    if before.dataset_id != changed.dataset_id or before.source_job_id != changed.source_job_id:
        _count_growth_from_source(changed)
    if before.testing_criteria != changed.testing_criteria:
        changed.evaluated = None


@transaction.atomic
def delete_plan(*, plan: RetrainingPlan, by: str, now: datetime.datetime) -> None:
    """Delete a plan with its history. A job that it started continues, but is not compared. A comparison ends.

    Raises NotFound, and PermissionDenied for a viewer of the job's project.
    """
    require_work_in(project_id=plan.source_job.project_id, actor=by)
    # In this order, as the steps of a retraining lock them. With the plan locked, no retraining begins meanwhile.
    list(plan.retrainings.filter(status__in=RETRAINING_OPEN).select_for_update())
    plan = lock_row(plan)
    for retraining in plan.retrainings.filter(status__in=RETRAINING_OPEN):
        stop(retraining, now)
    audit.record(organization=plan.organization_id, by=by, action="retraining_plan.deleted", target=plan.pk)
    plan.delete()


@transaction.atomic
def request_retraining(*, plan: RetrainingPlan, by: str, now: datetime.datetime) -> Retraining:
    """Begin a retraining now, on the newest version.

    Raises InvalidState while one is open, QuotaExceeded, and PermissionDenied for a viewer of the job's project.
    """
    require_work_in(project_id=plan.source_job.project_id, actor=by)
    plan = lock_row(plan)
    if plan.retrainings.filter(status__in=RETRAINING_OPEN).exists():
        text = gettext("A retraining of this plan has not ended. Wait for it, or cancel its job.")
        raise InvalidState(text, param="plan_id")
    if is_full_day(plan, now):
        text = gettext("A plan can start at most %(most)s retrainings a day. Try again tomorrow.")
        raise QuotaExceeded(text % {"most": MAX_A_DAY})
    audit.record(organization=plan.organization_id, by=by, action="retraining_plan.requested", target=plan.pk)
    return begin(plan=plan, trigger=RetrainingTrigger.REQUEST, key=new_id("request"), by=by, now=now)


# --- What a plan needs ------------------------------------------------------------------------------------------------


def _columns(organization_id: str, request: PlanRequest, now: datetime.datetime) -> dict[str, Any]:
    """Return the columns of a plan. Raises NotFound and InvalidValue that name the field."""
    if request.schedule is None and request.min_new_rows is None:
        text = gettext("Give a schedule, min_new_rows or both: they start retrainings.")
        raise InvalidValue(text, param="schedule")
    if request.schedule is not None:
        request.schedule.check()
    if request.max_nano <= 0:
        raise InvalidValue(gettext("The maximum price must be above zero."), param="max_usd")
    job = _source_job(organization_id, request.source_job)
    datasets = _datasets(request, job)
    if (request.regression is None) != (request.max_loss_points is None):
        raise InvalidValue(
            gettext("Give regression and max_loss_points together: rows that must not get worse, and by how much."),
            param="max_loss_points",
        )
    return {
        "name": request.name,
        "source_job": job,
        **datasets,
        "alias": _alias(organization_id, request.alias, job),
        "testing_criteria": _criteria(organization_id, request.testing_criteria),
        "cadence": request.schedule.cadence if request.schedule else "",
        "cadence_value": request.schedule.value if request.schedule else None,
        "hour_utc": request.schedule.hour_utc if request.schedule else 0,
        "next_due_at": request.schedule.next_due(now) if request.schedule else None,
        "min_new_rows": request.min_new_rows,
        "max_nano": request.max_nano,
        "min_gain_points": request.min_gain_points,
        "max_loss_points": request.max_loss_points,
        "is_enabled": request.is_enabled,
    }


def _source_job(organization_id: str, job_id: str) -> FineTuningJob:
    jobs = visible(FineTuningJob.objects.for_organization(organization_id))
    job = jobs.select_related("adapter_version", "validation_file").filter(pk=job_id).first()
    if job is None:
        raise NotFound(gettext("There is no such fine-tuning job."), param="source_job")
    if job.status != JobStatus.SUCCEEDED or job.adapter_version is None:
        raise InvalidValue(gettext("Name a job that succeeded: its model is the first one."), param="source_job")
    if recipe_of(job).objective != Objective.SUPERVISED:
        text = gettext("Only jobs that train on conversations can be repeated: the models' answers are compared.")
        raise InvalidValue(text, param="source_job")
    return job


def _datasets(request: PlanRequest, job: FineTuningJob) -> dict[str, Dataset | None]:
    held_out = request.held_out or (job.validation_file.dataset_id if job.validation_file else None)
    if held_out is None:
        text = gettext("Give a dataset of held-out rows: the job has no validation file.")
        raise InvalidValue(text, param="held_out")
    found: dict[str, Dataset | None] = {
        "dataset": _dataset(job, request.dataset, "dataset"),
        "held_out": _dataset(job, held_out, "held_out"),
        "regression": None,
    }
    if request.regression is not None:
        found["regression"] = _dataset(job, request.regression, "regression")
    for param in ("held_out", "regression"):
        dataset = found[param]
        if dataset is None:
            continue
        if dataset == found["dataset"]:
            text = gettext("Compare on a dataset other than the training dataset.")
            raise InvalidValue(text, param=param)
        require_comparable(newest_ready(dataset.pk), param=param)
    return found


def _dataset(job: FineTuningJob, name: str, param: str) -> Dataset:
    """Return the dataset with this id or name, of two with one name that of the job's project. Raises NotFound."""
    rows = visible(Dataset.objects.for_organization(job.organization_id))
    rows = rows.filter(Q(pk=name) | Q(name=name), deleted_at=None)
    found = rows.order_by(Case(When(project=job.project_id, then=0), default=1), "created_at", "pk").first()
    if found is None:
        raise NotFound(gettext("There is no dataset %(name)s.") % {"name": repr(name[:80])}, param=param)
    return found


def _alias(organization_id: str, name: str, job: FineTuningJob) -> Alias:
    version = job.adapter_version
    assert version is not None
    named = Q(pk=name) | Q(model_name=name) | Q(name=name, adapter=version.adapter_id)
    alias = list_aliases(organization=organization_id).filter(named).first()
    if alias is None:
        text = gettext("There is no alias %(name)s. Create it first, for the model that is in production.")
        raise NotFound(text % {"name": repr(name[:80])}, param="alias")
    if is_imported(alias):
        return alias
    if alias.adapter_id != version.adapter_id:
        text = gettext("The alias belongs to another adapter than the job's. Name one of the job's adapter.")
        raise InvalidValue(text, param="alias")
    if not job.suffix:
        text = gettext("The job has no suffix, so each repeat would create another adapter. Name a job with a suffix.")
        raise InvalidValue(text, param="source_job")
    return alias


def _criteria(organization_id: str, sent: Sequence[SentCriterion]) -> object:
    checked = check_criteria(sent)
    if any(isinstance(one, PairwiseCriterion) for one in checked):
        text = gettext("Each model's answers are graded separately: use a criterion other than pairwise_model.")
        raise InvalidValue(text, param="testing_criteria")
    for place, model in models_of(checked):
        require_model(organization=organization_id, name=model, param=place)
    return msgspec.to_builtins(checked)


def _require_own_name(plan: RetrainingPlan) -> None:
    same = RetrainingPlan.objects.for_organization(plan.organization_id).filter(name=plan.name)
    if same.exclude(pk=plan.pk).exists():
        raise InvalidValue(gettext("Another retraining plan has this name."), param="name")


def _count_growth_from_source(plan: RetrainingPlan) -> None:
    """Count new rows from the version that the source job trained on; from none if that is another dataset's."""
    version = plan.source_job.training_file
    is_same = version.dataset_id == plan.dataset_id
    plan.seen_number, plan.seen_rows = (version.number, version.rows or 0) if is_same else (0, 0)
