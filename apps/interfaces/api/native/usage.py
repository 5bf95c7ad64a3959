"""Limits and their use, allowances, budgets, and usage by hour, key and model."""

import datetime
from typing import Annotated, Literal, TypedDict

import msgspec
from msgspec import Meta
from rest_framework.request import Request

from apps.accounts.members.projects import get_project
from apps.accounts.models import Organization
from apps.accounts.roles import Permission
from apps.billing.budget_settings import DEFAULT_THRESHOLDS, MAX_THRESHOLDS, end_budget, set_budget
from apps.billing.budgets import get_budget, get_states, list_budgets, list_with_ended
from apps.billing.models import Budget, TrafficHour
from apps.billing.usage.traffic import list_traffic_hours
from apps.core.database.clock import db_now
from apps.core.errors import InvalidValue
from apps.core.http.forms import LARGEST_BIG_INTEGER, LARGEST_INTEGER
from apps.core.money import usd_decimal
from apps.finetuning.models import Allowance
from apps.finetuning.usage.allowances import ALLOWED, end_allowance, get_allowance, list_allowances, set_allowance
from apps.finetuning.usage.quota_use import TargetUse, list_quota_use, list_target_use
from apps.interfaces.api.requests.amounts import read_nano
from apps.interfaces.api.requests.pagination import (
    ListObject,
    LongPageQuery,
    PageQuery,
    list_object,
    page,
    page_together,
)
from apps.interfaces.api.requests.times import Moment, time_of
from apps.interfaces.api.views import ApiView

_OLDEST_FIRST = ("pk", "id")


class QuotaObject(TypedDict):
    """`limit` is null if there is none. `held` is what unfinished jobs are promised beside what they used.

    Rates have no `used`: answers of the gateway say what is left of the minute.
    """

    id: str
    object: Literal["quota"]
    limit: int | None
    used: int | None
    held: int | None
    available: int | None


class QuotaList(ApiView):
    required_scope = {"GET": Permission.VIEW}

    def get(self, request: Request) -> ListObject[QuotaObject]:
        """Return each limit of the organization, how much of it is used and held, and how much is available."""
        found: list[QuotaObject] = [
            {
                "id": quota.name,
                "object": "quota",
                "limit": quota.limit,
                "used": quota.used,
                "held": quota.held,
                "available": quota.available,
            }
            for quota in list_quota_use(organization=self.organization, now=db_now())
        ]
        return list_object(found)


class SetAllowance(msgspec.Struct, forbid_unknown_fields=True):
    """`target` is the id of a member's user or of a project, or a label as name=value.

    A limit that is missing or null is none. Requests and tokens are those of all API keys of the target together. Only
    a member can have a limit of storage.
    """

    scope: Literal["member", "label", "project"]
    target: Annotated[str, Meta(max_length=577, examples=["team=search"])]
    concurrent_gpus: Annotated[int, Meta(ge=0, le=LARGEST_INTEGER)] | None = None
    gpu_seconds_per_month: Annotated[int, Meta(ge=0, le=LARGEST_BIG_INTEGER)] | None = None
    queued_jobs: Annotated[int, Meta(ge=0, le=LARGEST_INTEGER)] | None = None
    storage_bytes: Annotated[int, Meta(ge=0, le=LARGEST_BIG_INTEGER)] | None = None
    requests_per_minute: Annotated[int, Meta(ge=0, le=LARGEST_INTEGER)] | None = None
    tokens_per_minute: Annotated[int, Meta(ge=0, le=LARGEST_INTEGER)] | None = None


class AllowedUse(TypedDict):
    """As in a quota: rates have no `used`, and neither has the storage of a label or project."""

    limit: int | None
    used: int | None
    held: int | None
    available: int | None


class RecentUseObject(TypedDict):
    """The most GPUs and unfinished jobs at once, the GPU-seconds, and requests that no limit refused.

    `stored_bytes` are those of what a member stored in this time and keeps.
    """

    most_concurrent_gpus: int
    gpu_seconds: int
    most_queued_jobs: int
    stored_bytes: int
    requests: int
    most_requests_of_hour: int
    tokens: int
    most_tokens_of_hour: int


class AllowanceObject(TypedDict):
    """What an organization lets a member, label or project use, within its quota, and what it uses."""

    object: Literal["allowance"]
    id: str
    scope: str
    target: str
    concurrent_gpus: AllowedUse
    gpu_seconds_per_month: AllowedUse
    queued_jobs: AllowedUse
    storage_bytes: AllowedUse
    requests_per_minute: AllowedUse
    tokens_per_minute: AllowedUse
    last_30_days: RecentUseObject
    updated_at: int


class DeletedAllowance(TypedDict):
    id: str
    object: Literal["allowance"]
    deleted: Literal[True]


class AllowanceList(ApiView):
    required_scope = {"GET": Permission.VIEW, "POST": Permission.ORGANIZATION_MANAGE}
    examples = {"POST": {"scope": "label", "target": "team=search", "concurrent_gpus": 1}}

    def get(self, request: Request, query: LongPageQuery) -> ListObject[AllowanceObject]:
        """List what the organization allows its members, labels and projects, and what they use. At most 100."""
        rows = list_allowances(organization=self.organization)
        return page_together(
            query, rows, lambda found: _allowance_objects(self.organization, found), order=_OLDEST_FIRST
        )

    def post(self, request: Request, body: SetAllowance) -> AllowanceObject:
        """Set what a member, label or project may use, within the organization's quota.

        It replaces the allowance before, and counts what is used already.
        """
        allowance = set_allowance(
            organization=self.organization,
            scope=body.scope,
            target=body.target,
            limits={name: getattr(body, name) for name in ALLOWED},
            by=self.actor,
            now=db_now(),
        )
        return _allowance_objects(self.organization, [allowance])[0]


class AllowanceDetail(ApiView):
    required_scope = {"GET": Permission.VIEW, "DELETE": Permission.ORGANIZATION_MANAGE}

    def get(self, request: Request, allowance_id: str) -> AllowanceObject:
        """Return an allowance, and what is used of it."""
        allowance = get_allowance(organization=self.organization, id=allowance_id)
        return _allowance_objects(self.organization, [allowance])[0]

    def delete(self, request: Request, allowance_id: str) -> DeletedAllowance:
        """End an allowance. Jobs that it held back can start, within the organization's quota."""
        allowance = get_allowance(organization=self.organization, id=allowance_id)
        end_allowance(organization=self.organization, allowance_id=allowance.pk, by=self.actor)
        return {"id": allowance_id, "object": "allowance", "deleted": True}


def _allowance_objects(organization: Organization, found: list[Allowance]) -> list[AllowanceObject]:
    uses = list_target_use(organization=organization, now=db_now())
    use_of = {each.allowance.pk: each for each in uses if each.allowance}
    return [_allowance_object(use_of[each.pk], each) for each in found if each.pk in use_of]


def _allowance_object(use: TargetUse, allowance: Allowance) -> AllowanceObject:
    requests = use.recent.requests
    limits: dict[str, AllowedUse] = {
        each.name: {"limit": each.limit, "used": each.used, "held": each.held, "available": each.available}
        for each in use.limits
    }
    return {
        "object": "allowance",
        "id": allowance.pk,
        "scope": use.scope.value,
        "target": use.target,
        "concurrent_gpus": limits["concurrent_gpus"],
        "gpu_seconds_per_month": limits["gpu_seconds_per_month"],
        "queued_jobs": limits["queued_jobs"],
        "storage_bytes": limits["storage_bytes"],
        "requests_per_minute": limits["requests_per_minute"],
        "tokens_per_minute": limits["tokens_per_minute"],
        "last_30_days": {
            "most_concurrent_gpus": use.recent.gpus,
            "gpu_seconds": use.recent.gpu_seconds,
            "most_queued_jobs": use.recent.jobs,
            "stored_bytes": use.recent.stored_bytes,
            "requests": requests.requests,
            "most_requests_of_hour": requests.most_requests_of_hour,
            "tokens": requests.tokens,
            "most_tokens_of_hour": requests.most_tokens_of_hour,
        },
        "updated_at": int(allowance.updated_at.timestamp()),
    }


class SetBudget(msgspec.Struct, forbid_unknown_fields=True):
    """`target` is a label as name=value, or the id of a key, project or member's user; empty for the organization.

    The budget of a key also covers the keys that replace it by rotation, and its `target` is the first of them.
    """

    limit_usd: Annotated[str, Meta(max_length=30, examples=["250.00"])] | float
    scope: Literal["organization", "label", "key", "member", "project"] = "organization"
    target: Annotated[str, Meta(max_length=577)] = ""
    mode: Literal["alert", "block", "pause"] = "alert"
    thresholds: Annotated[tuple[int, ...], Meta(max_length=MAX_THRESHOLDS)] = DEFAULT_THRESHOLDS


class BudgetObject(TypedDict):
    object: Literal["budget"]
    id: str
    scope: str
    target: str
    limit_usd: str
    spent_usd: str
    held_usd: str
    mode: str
    thresholds: list[int]
    created_at: int


class DeletedBudget(TypedDict):
    id: str
    object: Literal["budget"]
    deleted: Literal[True]


class BudgetList(ApiView):
    required_scope = {"GET": Permission.VIEW, "POST": Permission.ORGANIZATION_MANAGE}
    examples = {"POST": {"limit_usd": "250.00", "mode": "block", "thresholds": [80, 100]}}

    def get(self, request: Request, query: LongPageQuery) -> ListObject[BudgetObject]:
        """List the budgets in force, with what was spent this month and what is held. There are at most 100."""
        organization = self.organization
        return page_together(
            query,
            list_budgets(organization=organization),
            lambda found: _budget_objects(organization, found),
            order=("created_at", "id"),
            places=list_with_ended(organization=organization),
        )

    def post(self, request: Request, body: SetBudget) -> BudgetObject:
        """Set the monthly budget of the organization, a label, key, member or project. It replaces the one before."""
        budget = set_budget(
            organization=self.organization,
            scope=body.scope,
            target=body.target,
            limit_nano=read_nano("limit_usd", body.limit_usd, example="250.00"),
            mode=body.mode,
            thresholds=body.thresholds,
            by=self.actor,
            now=db_now(),
        )
        return _budget_objects(self.organization, [budget])[0]


class BudgetDetail(ApiView):
    required_scope = {"GET": Permission.VIEW, "DELETE": Permission.ORGANIZATION_MANAGE}
    moving = ("spent_usd", "held_usd")

    def get(self, request: Request, budget_id: str) -> BudgetObject:
        """Return a budget in force."""
        return _budget_objects(self.organization, [get_budget(organization=self.organization, id=budget_id)])[0]

    def delete(self, request: Request, budget_id: str) -> DeletedBudget:
        """End a budget. You can then send what it refused once more, and resume the jobs that it paused."""
        budget = get_budget(organization=self.organization, id=budget_id)
        end_budget(organization=self.organization, budget_id=budget.pk, by=self.actor, now=db_now())
        return {"id": budget_id, "object": "budget", "deleted": True}


def _budget_objects(organization: Organization, budgets: list[Budget]) -> list[BudgetObject]:
    states = get_states(organization=organization, budgets=budgets, now=db_now())
    return [
        {
            "object": "budget",
            "id": budget.pk,
            "scope": budget.scope,
            "target": budget.target,
            "limit_usd": usd_decimal(budget.limit_nano),
            "spent_usd": usd_decimal(states[budget.pk][0]),
            "held_usd": usd_decimal(states[budget.pk][1]),
            "mode": budget.mode,
            "thresholds": budget.thresholds,
            "created_at": int(budget.created_at.timestamp()),
        }
        for budget in budgets
    ]


class UsageQuery(PageQuery):
    limit: Annotated[int, Meta(ge=1, le=1000)] = 100
    start_time: Moment | None = None
    end_time: Moment | None = None
    key: Annotated[str, Meta(max_length=40, description="The id of a key.")] | None = None
    model: Annotated[str, Meta(max_length=200)] | None = None
    project: Annotated[str, Meta(max_length=40, description="The id of a project.")] | None = None


class UsageObject(TypedDict):
    """The requests of one hour with one key for one model. `cost_usd` includes usage that is not charged yet."""

    object: Literal["usage.hour"]
    id: str
    hour: int
    key: str | None
    model: str | None
    requests: int
    failed: int
    refused: int
    input_tokens: int
    cached_input_tokens: int
    output_tokens: int
    cost_usd: str


class UsageList(ApiView):
    required_scope = {"GET": Permission.VIEW}
    errors = {"GET": (404,)}  # of the project

    def get(self, request: Request, query: UsageQuery) -> ListObject[UsageObject]:
        """List usage by hour, key and model, newest first; by default of the last 7 days. It is kept for 90 days."""
        until = time_of(query.end_time) if query.end_time is not None else db_now()
        days = datetime.timedelta(days=7)
        since = time_of(query.start_time) if query.start_time is not None else until - min(days, until - time_of(0))
        if since > until:
            raise InvalidValue("'start_time' must be before 'end_time'. Send an earlier one.", param="start_time")
        rows = list_traffic_hours(
            organization=self.organization,
            since=since,
            until=until,
            key_id=query.key or "",
            model_name=query.model or "",
            project_id=get_project(organization=self.organization, id=query.project).pk if query.project else "",
        )
        return page(query, rows, _usage_object, order=("-hour_at", "-id"))


def _usage_object(row: TrafficHour) -> UsageObject:
    return {
        "object": "usage.hour",
        "id": str(row.pk),
        "hour": int(row.hour_at.timestamp()),
        "key": row.key_id or None,
        "model": row.model_name or None,
        "requests": row.requests,
        "failed": row.failed,
        "refused": row.rate_limited + row.over_quota + row.not_found + row.invalid,
        "input_tokens": row.input_tokens,
        "cached_input_tokens": row.cached_input_tokens,
        "output_tokens": row.output_tokens,
        "cost_usd": usd_decimal(row.cost_nano),
    }
