"""/api/v1/fine_tuning/retraining_plans: when jobs are repeated, what came of it, and a retraining on request."""

import dataclasses
from typing import Annotated, Any, Literal, TypedDict

import msgspec
from msgspec import UNSET, Meta, UnsetType
from rest_framework.request import Request

from apps.accounts.queries import KeyIdentity
from apps.accounts.roles import Permission
from apps.core.database.clock import db_now
from apps.core.errors import PermissionDenied
from apps.core.money import usd_decimal
from apps.finetuning.jobs.retraining import plans
from apps.finetuning.jobs.retraining.launches import RIGHTS
from apps.finetuning.jobs.retraining.plans import EXACT, PlanRequest
from apps.finetuning.jobs.retraining.schedules import Schedule, schedule_of
from apps.finetuning.lifecycle import Cadence
from apps.finetuning.models import Retraining, RetrainingPlan
from apps.interfaces.api.requests.amounts import read_nano
from apps.interfaces.api.requests.pagination import ListObject, PageQuery, SearchQuery, page, with_words_of
from apps.interfaces.api.requests.times import unix_seconds
from apps.interfaces.api.views import ApiView
from apps.serving.evals.criteria import SentCriteria

_Name = Annotated[str, Meta(min_length=1, max_length=80)]
_Named = Annotated[str, Meta(min_length=1, max_length=240)]
_Points = Annotated[float, Meta(ge=0, le=100)]
_Rows = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_Dollars = Annotated[str, Meta(max_length=30)] | int | float


class ScheduleBody(msgspec.Struct, forbid_unknown_fields=True):
    """`value`: the days between (`days`), the day of the week from 1, Monday (`week`), or the day of the month."""

    every: Cadence
    value: Annotated[int, Meta(ge=1, le=365)]
    hour_utc: Annotated[int, Meta(ge=0, le=23)] = 0


class PlansQuery(SearchQuery):
    enabled: bool | None = None


class CreatePlan(msgspec.Struct, forbid_unknown_fields=True):
    """Datasets and the alias are given by name or id. Without `held_out`, it is the job's validation dataset.

    `max_usd` is the most that one retraining costs, with its comparisons. Without `testing_criteria`, an answer passes
    if it equals the row's own.
    """

    name: _Name
    source_job: Annotated[str, Meta(max_length=64, description="A job that succeeded: it is repeated.")]
    dataset: _Named
    alias: _Named
    max_usd: _Dollars
    held_out: _Named | None = None
    regression: _Named | None = None
    max_loss_points: _Points | None = None
    min_gain_points: _Points = 0.0
    schedule: ScheduleBody | None = None
    min_new_rows: _Rows | None = None
    testing_criteria: SentCriteria | None = None
    enabled: bool = True


class ChangePlan(msgspec.Struct, forbid_unknown_fields=True):
    """What is left out stays as it is. From now on the plan acts in the name of this key."""

    name: _Name | UnsetType = UNSET
    source_job: Annotated[str, Meta(max_length=64)] | UnsetType = UNSET
    dataset: _Named | UnsetType = UNSET
    alias: _Named | UnsetType = UNSET
    max_usd: _Dollars | UnsetType = UNSET
    held_out: _Named | UnsetType = UNSET
    regression: _Named | UnsetType | None = UNSET
    max_loss_points: _Points | UnsetType | None = UNSET
    min_gain_points: _Points | UnsetType = UNSET
    schedule: ScheduleBody | UnsetType | None = UNSET
    min_new_rows: _Rows | UnsetType | None = UNSET
    testing_criteria: SentCriteria | UnsetType = UNSET
    enabled: bool | UnsetType = UNSET


class ScheduleObject(TypedDict):
    every: str
    value: int
    hour_utc: int


class NamedObject(TypedDict):
    id: str
    name: str


class RetrainingPlanObject(TypedDict):
    """`alias` is null if it was deleted: nothing can be promoted then. `next_due_at` is that of the schedule.

    `project_id` is the project of the source job.
    """

    object: Literal["fine_tuning.retraining_plan"]
    id: str
    name: str
    source_job: str
    project_id: str
    dataset: NamedObject
    held_out: NamedObject
    regression: NamedObject | None
    max_loss_points: float | None
    min_gain_points: float
    alias: NamedObject | None
    testing_criteria: list[Any]
    eval_id: str | None
    schedule: ScheduleObject | None
    min_new_rows: int | None
    max_usd: str
    enabled: bool
    next_due_at: int | None
    acts_as: str
    created_at: int


class DeletedPlan(TypedDict):
    id: str
    object: Literal["fine_tuning.retraining_plan"]
    deleted: Literal[True]


class ComparisonObject(TypedDict):
    """Shares of the same rows that each model passes. The points are new minus production, with 95 % confidence."""

    rows: int
    new_passed: int
    production_passed: int
    only_new_passed: int
    only_production_passed: int
    difference_points: float
    low_points: float
    high_points: float


class RetrainingObject(TypedDict):
    """`code` and `reason` say why it ended as it did."""

    object: Literal["fine_tuning.retraining"]
    id: str
    plan_id: str
    trigger: str
    status: str
    training_file: str | None
    held_out_file: str | None
    regression_file: str | None
    job_id: str | None
    model: str | None
    production_model: str | None
    new_run_id: str | None
    production_run_id: str | None
    held_out: ComparisonObject | None
    regression: ComparisonObject | None
    code: str | None
    reason: str | None
    created_at: int
    finished_at: int | None


class RetrainingPlanList(ApiView):
    required_scope = {"GET": Permission.VIEW, "POST": Permission.JOB_WRITE}
    examples = {
        "POST": {
            "name": "support, weekly",
            "source_job": "ftjob-01m8",
            "dataset": "support",
            "held_out": "support-held-out",
            "alias": "production",
            "schedule": {"every": "week", "value": 1, "hour_utc": 3},
            "min_new_rows": 500,
            "max_usd": "20",
            "min_gain_points": 1,
        }
    }

    def get(self, request: Request, query: PlansQuery) -> ListObject[RetrainingPlanObject]:
        """List retraining plans, newest first. `q` searches the names of plans and datasets."""
        found = plans.list_plans(organization=self.organization)
        rows = found if query.enabled is None else found.filter(is_enabled=query.enabled)
        rows = with_words_of(query, rows, fields=("name", "dataset__name"))
        return page(query, rows, _plan_object, places=found)

    def post(self, request: Request, body: CreatePlan) -> RetrainingPlanObject:
        """Create a plan that repeats a job on a schedule, or when its dataset has grown.

        The key also needs the scopes `inference` and `adapter.write`: models are asked, and the alias is moved, in its
        name.
        """
        _require_rights(self.identity)
        asked = PlanRequest(
            name=body.name,
            source_job=body.source_job,
            dataset=body.dataset,
            alias=body.alias,
            max_nano=read_nano("max_usd", body.max_usd, example="20.00"),
            held_out=body.held_out,
            regression=body.regression,
            max_loss_points=body.max_loss_points,
            min_gain_points=body.min_gain_points,
            schedule=_schedule(body.schedule),
            min_new_rows=body.min_new_rows,
            testing_criteria=body.testing_criteria or [EXACT],
            is_enabled=body.enabled,
        )
        return _plan_object(
            plans.create_plan(organization=self.organization, request=asked, by=self.actor, now=db_now())
        )


class RetrainingPlanDetail(ApiView):
    required_scope = {"GET": Permission.VIEW, "POST": Permission.JOB_WRITE, "DELETE": Permission.JOB_WRITE}
    examples = {"POST": {"enabled": False}}

    def get(self, request: Request, plan_id: str) -> RetrainingPlanObject:
        """Return a retraining plan."""
        return _plan_object(plans.get_plan(organization=self.organization, id=plan_id))

    def post(self, request: Request, plan_id: str, body: ChangePlan) -> RetrainingPlanObject:
        """Change, stop or resume a plan. A retraining that has begun goes on.

        The key also needs the scopes `inference` and `adapter.write`.
        """
        plan = plans.get_plan(organization=self.organization, id=plan_id)
        _require_rights(self.identity)
        changed = dataclasses.replace(plans.request_of(plan), **_changes(body))
        return _plan_object(plans.change_plan(plan=plan, request=changed, by=self.actor, now=db_now()))

    def delete(self, request: Request, plan_id: str) -> DeletedPlan:
        """Delete a plan with its history. A job that it began goes on, and its model is not promoted."""
        plan = plans.get_plan(organization=self.organization, id=plan_id)
        plans.delete_plan(plan=plan, by=self.actor, now=db_now())
        return {"id": plan_id, "object": "fine_tuning.retraining_plan", "deleted": True}


class RetrainingList(ApiView):
    required_scope = {"GET": Permission.VIEW, "POST": Permission.JOB_WRITE}

    def get(self, request: Request, plan_id: str, query: PageQuery) -> ListObject[RetrainingObject]:
        """List the latest 200 retrainings of a plan, newest first, with their comparisons and reasons."""
        plan = plans.get_plan(organization=self.organization, id=plan_id)
        return page(query, plans.list_retrainings(plan=plan), _retraining_object)

    def post(self, request: Request, plan_id: str) -> RetrainingObject:
        """Begin a retraining now, on the newest version of the dataset.

        The key also needs the scopes `inference` and `adapter.write`: it acts in its name.
        """
        plan = plans.get_plan(organization=self.organization, id=plan_id)
        _require_rights(self.identity)
        return _retraining_object(plans.request_retraining(plan=plan, by=self.actor, now=db_now()))


def _require_rights(identity: KeyIdentity) -> None:
    """Raise PermissionDenied unless the key may do all that a plan does in its name."""
    for right in RIGHTS:
        if right not in identity.scopes:
            text = f"A plan starts jobs, asks models and moves an alias in the name of this key, which lacks '{right}'."
            raise PermissionDenied(text, required_scope=str(right))


def _changes(body: ChangePlan) -> dict[str, Any]:
    sent = {name: getattr(body, name) for name in body.__struct_fields__}
    changes = {name: value for name, value in sent.items() if value is not UNSET}
    if "schedule" in changes:
        changes["schedule"] = _schedule(changes["schedule"])
    if "max_usd" in changes:
        changes["max_nano"] = read_nano("max_usd", changes.pop("max_usd"), example="20.00")
    if "enabled" in changes:
        changes["is_enabled"] = changes.pop("enabled")
    return changes


def _schedule(sent: ScheduleBody | None) -> Schedule | None:
    return Schedule(sent.every, sent.value, sent.hour_utc) if sent else None


def _plan_object(plan: RetrainingPlan) -> RetrainingPlanObject:
    schedule = schedule_of(plan)
    return {
        "object": "fine_tuning.retraining_plan",
        "id": plan.pk,
        "name": plan.name,
        "source_job": plan.source_job_id,
        "project_id": plan.source_job.project_id,
        "dataset": {"id": plan.dataset.pk, "name": plan.dataset.name},
        "held_out": {"id": plan.held_out.pk, "name": plan.held_out.name},
        "regression": {"id": plan.regression.pk, "name": plan.regression.name} if plan.regression else None,
        "max_loss_points": plan.max_loss_points,
        "min_gain_points": plan.min_gain_points,
        "alias": {"id": plan.alias.pk, "name": plan.alias.model_name} if plan.alias else None,
        "testing_criteria": plan.testing_criteria,
        "eval_id": plan.evaluated_id,
        "schedule": (
            {"every": schedule.cadence.value, "value": schedule.value, "hour_utc": schedule.hour_utc}
            if schedule
            else None
        ),
        "min_new_rows": plan.min_new_rows,
        "max_usd": usd_decimal(plan.max_nano),
        "enabled": plan.is_enabled,
        "next_due_at": int(plan.next_due_at.timestamp()) if plan.next_due_at and plan.is_enabled else None,
        "acts_as": plan.acts_as,
        "created_at": int(plan.created_at.timestamp()),
    }


def _retraining_object(retraining: Retraining) -> RetrainingObject:
    version = retraining.job.adapter_version if retraining.job else None
    return {
        "object": "fine_tuning.retraining",
        "id": retraining.pk,
        "plan_id": retraining.plan_id,
        "trigger": retraining.trigger,
        "status": retraining.status,
        "training_file": retraining.training_file_id,
        "held_out_file": retraining.held_out_file_id,
        "regression_file": retraining.regression_file_id,
        "job_id": retraining.job_id,
        "model": version.model_name if version else None,
        "production_model": retraining.production.model_name if retraining.production else None,
        "new_run_id": retraining.new_run_id,
        "production_run_id": retraining.production_run_id,
        "held_out": _comparison_object(retraining.held_out_result),
        "regression": _comparison_object(retraining.regression_result),
        "code": retraining.code or None,
        "reason": retraining.reason or None,
        "created_at": int(retraining.created_at.timestamp()),
        "finished_at": unix_seconds(retraining.finished_at),
    }


def _comparison_object(result: dict[str, Any] | None) -> ComparisonObject | None:
    if result is None:
        return None
    value, low, high = (round(100 * result["difference"][name], 3) for name in ("value", "low", "high"))
    return {
        "rows": result["rows"],
        "new_passed": result["new_passed"],
        "production_passed": result["old_passed"],
        "only_new_passed": result["only_new"],
        "only_production_passed": result["only_old"],
        "difference_points": value,
        "low_points": low,
        "high_points": high,
    }
