"""Budgets: the room left before a hold, the spending under each budget, and alerts sent exactly once.

Every function that decides or counts runs under the wallet's lock, so two holds cannot both take the last of a budget.
"""

import datetime
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from django.db.models import F, Q, QuerySet, Sum
from django.db.models.functions import Now
from django.utils.translation import gettext

from apps.accounts.models import ApiKey, Organization, Project, default_project_id, key_of
from apps.accounts.notices.events import announce
from apps.accounts.notices.notifications import MANAGERS
from apps.billing.models import (
    Budget,
    BudgetAlert,
    BudgetMode,
    BudgetPeriod,
    BudgetScope,
    Hold,
    HoldPurpose,
    HoldStatus,
    KeyLabel,
    UsageSeries,
)
from apps.billing.usage.labels import LABELLED_KEY
from apps.core.audit import require_transaction
from apps.core.database.clock import begin_of_day, db_now
from apps.core.errors import NotFound, QuotaExceeded
from apps.core.messages import outbox
from apps.core.money import dollars


class BudgetExceeded(QuotaExceeded):
    """The amount would exceed a budget that the organization set itself; raising the budget is the fix."""


@dataclass(frozen=True)
class Attribution:
    """Whose budgets a cost counts under: the key, the member behind it, metadata labels, and the project."""

    key_id: str = ""
    member_id: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    project_id: str = ""

    @classmethod
    def of_hold(cls, hold: Hold) -> "Attribution":
        """Return the attribution of what a hold pays for."""
        project_id = hold.project_id or default_project_id(hold.organization_id)
        return cls(hold.key_id, hold.member_id, hold.labels, project_id)

    def targets(self) -> Q:
        """Return the condition that selects the budgets this cost falls under."""
        labels = [f"{name}={value}" for name, value in self.labels.items()]
        return (
            Q(scope=BudgetScope.ORGANIZATION)
            | Q(scope=BudgetScope.KEY, target=self.key_id or None)
            | Q(scope=BudgetScope.KEY, target__in=ApiKey.objects.filter(pk=self.key_id).values("first_key"))
            | Q(scope=BudgetScope.MEMBER, target=self.member_id or None)
            | Q(scope=BudgetScope.LABEL, target__in=labels)
            | Q(scope=BudgetScope.PROJECT, target=self.project_id or None)
        )


def attribution_of_key(*, organization: Organization | str, key_id: str) -> Attribution:
    """Return the attribution of requests with this key, with the key's current labels.

    What is used without a key, storage and keeping adapters warm, counts in the organization's own budgets alone.
    """
    if not key_id:
        return Attribution()
    default = default_project_id(organization)
    keys = ApiKey.objects.for_organization(organization).filter(pk=key_id)
    found = keys.values_list("created_by_id", "project_id", LABELLED_KEY).first()
    member_id, project_id, labelled = found or ("", default, key_id)
    labels = KeyLabel.objects.for_organization(organization).filter(key_id=labelled)
    return Attribution(key_id, member_id, dict(labels.values_list("name", "value")), project_id)


def attribution_of_actor(
    *, organization: Organization | str, by: str, labels: Mapping[str, object], project_id: str = ""
) -> Attribution:
    """Return the attribution of a job that `by` started.

    A key's label overrides the job's label of the same name, so that no key leaves its budget. Work that a key starts
    is in the key's project. Work that a member starts is in `project_id`, or else in the default project.
    """
    own = {str(name): str(value) for name, value in labels.items()}
    if by.startswith("key_"):
        found = attribution_of_key(organization=organization, key_id=by)
        return Attribution(by, found.member_id, {**own, **found.labels}, found.project_id)
    project_id = project_id or default_project_id(organization)
    return Attribution("", by if by.startswith("user_") else "", own, project_id)


# --- Decisions --------------------------------------------------------------------------------------------------------


def room_nano(*, organization: Organization | str, attribution: Attribution) -> tuple[int, Budget] | None:
    """Return how much more may be held and the budget that limits it; None without a limiting budget."""
    require_transaction()
    budgets = list(list_budgets(organization=organization).filter(attribution.targets()).exclude(mode=BudgetMode.ALERT))
    states = get_states(organization=organization, budgets=budgets, now=db_now())
    rooms = [(budget.limit_nano - sum(states[budget.pk]), budget) for budget in budgets]
    return min(rooms, key=lambda room: room[0], default=None)


def require_room(*, organization: Organization | str, attribution: Attribution, amount_nano: int) -> None:
    """Raise BudgetExceeded when holding the amount would exceed a limiting budget."""
    room = room_nano(organization=organization, attribution=attribution)
    if room is not None and room[0] < amount_nano:
        left, budget = max(room[0], 0), room[1]
        raise BudgetExceeded(
            gettext(
                "This needs %(amount)s, and %(left)s of %(limit)s is left this month in the budget of %(budget)s. "
                "Raise the budget, or wait until next month."
            )
            % {
                "budget": describe(budget),
                "left": dollars(left),
                "limit": dollars(budget.limit_nano),
                "amount": dollars(amount_nano),
            },
            budget=budget.pk,
        )


def get_states(
    *, organization: Organization | str, budgets: Sequence[Budget], now: datetime.datetime
) -> dict[str, tuple[int, int]]:
    """Return by id the spending under each budget this month, and the amount held under it now."""
    month = month_of(now)
    periods = BudgetPeriod.objects.filter(budget__in=budgets, month=month)
    spent = dict(periods.values_list("budget_id", "spent_nano"))
    open_nano = F("amount_nano") - F("captured_nano")
    aside = Hold.objects.filter(organization_id=key_of(organization), status=HoldStatus.OPEN).aggregate(
        **{budget.pk: Sum(open_nano, filter=_covers(budget), default=0) for budget in budgets}
    )
    return {
        budget.pk: (spent[budget.pk] if budget.pk in spent else _spent_so_far(budget, month), aside[budget.pk])
        for budget in budgets
    }


def list_budgets(*, organization: Organization | str) -> QuerySet[Budget]:
    """Return the budgets in force."""
    return list_with_ended(organization=organization).filter(ended_at=None).order_by("pk")


def list_with_ended(*, organization: Organization | str) -> QuerySet[Budget]:
    """Return the budgets in force and those that were ended."""
    return Budget.objects.for_organization(organization)


def get_budget(*, organization: Organization | str, id: str) -> Budget:
    """Return one budget in force. Raises NotFound."""
    budget = list_budgets(organization=organization).filter(pk=id).first()
    if budget is None:
        raise NotFound(gettext("No such budget."))
    return budget


def list_key_labels(*, organization: Organization | str) -> list[tuple[str, str]]:
    """Return each labelled key that is usable with its labels joined into one text."""
    keys = ApiKey.objects.for_organization(organization).filter(revoked_at=None).exclude(expires_at__lte=Now())
    rows = KeyLabel.objects.for_organization(organization).filter(key_id__in=keys.values("pk"))
    texts: dict[str, list[str]] = {}
    for row in rows.order_by("key_id", "name"):
        texts.setdefault(row.key_id, []).append(f"{row.name}={row.value}")
    return [(key_id, ", ".join(pairs)) for key_id, pairs in texts.items()]


def describe(budget: Budget, *, by_id: bool = False) -> str:
    """Return whose spending the budget limits, as part of a sentence. `by_id` hides the name of a private project."""
    match budget.scope:
        case BudgetScope.ORGANIZATION:
            return gettext("the organization")
        case BudgetScope.LABEL:
            return budget.target
        case BudgetScope.KEY:
            return gettext("key %(name)s") % {"name": budget.target}
        case BudgetScope.PROJECT:
            project = Project.objects.get(pk=budget.target)
            return gettext("the project %(name)s") % {
                "name": project.pk if by_id and project.is_private else project.name
            }
        case _:
            return gettext("member %(name)s") % {"name": budget.target}


def month_of(now: datetime.datetime) -> datetime.date:
    return now.astimezone(datetime.UTC).date().replace(day=1)


def holds_of_budget(*, budget_id: str) -> QuerySet[Hold]:
    """Return every hold, open or closed, of jobs and slices that fall under the budget."""
    return Hold.objects.filter(_covers(Budget.objects.get(pk=budget_id)))


# SQL: whether `budget` pauses jobs, is used up in the month that begins at %(month)s, and covers the job of `hold`.
STOPS_JOB = f"""
    budget.ended_at IS NULL AND budget.mode = '{BudgetMode.PAUSE}' AND EXISTS (
        SELECT FROM billing_budgetperiod period WHERE period.budget_id = budget.id
            AND period.month = (%(month)s::timestamptz AT TIME ZONE 'UTC')::date
            AND period.spent_nano >= budget.limit_nano
    ) AND CASE budget.scope
        WHEN '{BudgetScope.ORGANIZATION}' THEN true
        WHEN '{BudgetScope.KEY}' THEN budget.target = hold.key_id OR EXISTS (
            SELECT FROM accounts_apikey key WHERE key.id = hold.key_id AND key.first_key = budget.target
        )
        WHEN '{BudgetScope.MEMBER}' THEN budget.target = hold.member_id
        WHEN '{BudgetScope.PROJECT}' THEN budget.target = hold.project_id
        ELSE hold.labels @> jsonb_build_object(
            split_part(budget.target, '=', 1), substr(budget.target, strpos(budget.target, '=') + 1)
        )
    END
"""  # noqa: S608 - constants


def _covers(budget: Budget) -> Q:
    """Return the condition that selects the holds of jobs and slices under the budget."""
    holds = Q(organization_id=budget.organization_id, purpose__in=(HoldPurpose.JOB, HoldPurpose.INFERENCE))
    match budget.scope:
        case BudgetScope.ORGANIZATION:
            return holds
        case BudgetScope.KEY:
            return holds & Q(key_id__in=_keys_of(budget).values("pk"))
        case BudgetScope.MEMBER:
            return holds & Q(member_id=budget.target)
        case BudgetScope.PROJECT:
            is_default = budget.target == default_project_id(budget.organization_id)
            return holds & Q(project_id__in=[budget.target, *([""] if is_default else [])])
        case _:
            name, _, value = budget.target.partition("=")
            return holds & Q(labels__contains={name: value})


def spent_by_project(
    *, organization: Organization | str, projects: Sequence[str], now: datetime.datetime
) -> dict[str, int]:
    """Return by id what each of these projects cost this month, in nano-USD."""
    owner, month = key_of(organization), month_of(now)
    return {
        project: _spent_so_far(Budget(organization_id=owner, scope=BudgetScope.PROJECT, target=project), month)
        for project in projects
    }


def _keys_of(budget: Budget) -> QuerySet[ApiKey]:
    """Return the key that the budget names and those that replaced it."""
    keys = ApiKey.objects.filter(organization_id=budget.organization_id)
    return keys.filter(Q(pk=budget.target) | Q(first_key=budget.target))


def _spent_so_far(budget: Budget, month: datetime.date) -> int:
    """Return the month's cost before the budget's own count began: finished jobs and metered requests."""
    begin = begin_of_day(month)
    closed = Hold.objects.filter(_covers(budget), status=HoldStatus.CLOSED, closed_at__gte=begin)
    jobs = closed.filter(purpose=HoldPurpose.JOB)
    trained = jobs.aggregate(nano=Sum(F("captured_nano") - F("refunded_nano")))["nano"] or 0
    series = UsageSeries.objects.filter(organization_id=budget.organization_id, day__gte=month)
    keys = ApiKey.objects.filter(organization_id=budget.organization_id)
    match budget.scope:
        case BudgetScope.KEY:
            series = series.filter(key_id__in=_keys_of(budget).values("pk"))
        case BudgetScope.MEMBER:
            series = series.filter(key_id__in=keys.filter(created_by_id=budget.target).values("pk"))
        case BudgetScope.PROJECT:
            series = series.filter(key_id__in=keys.filter(project_id=budget.target).values("pk"))
        case BudgetScope.LABEL:
            name, _, value = budget.target.partition("=")
            labelled = KeyLabel.objects.filter(organization_id=budget.organization_id, name=name, value=value)
            charged = keys.alias(labelled=LABELLED_KEY).filter(labelled__in=labelled.values("key_id"))
            series = series.filter(key_id__in=charged.values("pk"))
    return trained + (series.aggregate(nano=Sum("posted_nano"))["nano"] or 0)


# --- Spending and alerts ----------------------------------------------------------------------------------------------


def record_spending(*, organization: Organization | str, charges: Iterable[tuple[Attribution, int]]) -> None:
    """Add charges in nano-USD (negative: refunds) to every budget that they fall under, and alert.

    Call it with the postings, under the wallet's lock, before the charges show in the month's holds or series.
    """
    require_transaction()
    budgets = list_budgets(organization=organization)
    amounts = Counter[str]()
    for attribution, amount_nano in charges:
        if amount_nano:
            found = budgets.filter(attribution.targets()).values_list("pk", flat=True)
            amounts.update(dict.fromkeys(found, amount_nano))
    for budget in budgets.filter(pk__in=amounts):
        period = period_of(budget, db_now())
        period.spent_nano = max(period.spent_nano + amounts[budget.pk], 0)
        period.save(update_fields=["spent_nano"])
        send_alerts(budget, period)


def period_of(budget: Budget, now: datetime.datetime) -> BudgetPeriod:
    """Return the spending of this month, counted from its begin."""
    month = month_of(now)
    found = BudgetPeriod.objects.filter(budget=budget, month=month).first()
    return found or BudgetPeriod.objects.create(
        organization_id=budget.organization_id, budget=budget, month=month, spent_nano=_spent_so_far(budget, month)
    )


def _alert_title(budget: Budget, threshold: int) -> str:
    limit = dollars(budget.limit_nano)
    return gettext("Budget of %(of)s: %(threshold)s%% of %(limit)s spent") % {
        "of": describe(budget, by_id=True),  # not all who are told may be in the project
        "threshold": threshold,
        "limit": limit,
    }


def send_alerts(budget: Budget, period: BudgetPeriod) -> None:
    """Announce each threshold that the month's spending reached, once; stop jobs if the budget says so."""
    sent = BudgetAlert.objects.filter(budget=budget, month=period.month).values_list("threshold", flat=True)
    for threshold in sorted(set(budget.thresholds) - set(sent)):
        if period.spent_nano * 100 < budget.limit_nano * threshold:
            continue
        alert, is_new = BudgetAlert.objects.get_or_create(
            organization_id=budget.organization_id,
            budget=budget,
            month=period.month,
            threshold=threshold,
            defaults={"spent_nano": period.spent_nano},
        )
        if is_new:
            announce(
                organization=budget.organization_id,
                type="budget.reached",
                subject=budget.pk,
                title=partial(_alert_title, budget, threshold),
                path="/budgets",
                key=f"budget:{budget.pk}:{period.month}:{threshold}",
                roles=MANAGERS,
                mail=("billing.alert", {"alert_id": alert.pk}),
                data={"threshold_percent": threshold, "spent_nano": period.spent_nano},
            )
    if budget.mode == BudgetMode.PAUSE and period.spent_nano >= budget.limit_nano:
        key = f"budget-pause:{budget.pk}:{period.month}:{budget.limit_nano}"  # again after a raise
        outbox.publish(topic="budget.exhausted", key=key, payload={"budget_id": budget.pk})
