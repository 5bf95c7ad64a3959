"""Budgets: the room left before a hold, the spending under each budget, and alerts sent exactly once.

Every function that decides or counts runs under the wallet's lock, so two holds cannot both take the last of a budget.
"""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from django.db import transaction
from django.db.models import F, Q, QuerySet, Sum
from django.utils.translation import gettext

from apps.accounts import operations
from apps.accounts.models import ApiKey, Organization, User, key_of
from apps.accounts.notices.events import announce
from apps.accounts.notices.notifications import MANAGERS
from apps.accounts.operations import IssuedKey
from apps.accounts.queries import KeyIdentity, KeyLimits
from apps.billing.ledger import lock_wallet
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
from apps.core import audit
from apps.core.audit import require_transaction
from apps.core.database.clock import db_now
from apps.core.errors import InvalidState, InvalidValue, NotFound, PermissionDenied, QuotaExceeded
from apps.core.messages import outbox
from apps.core.money import dollars

DEFAULT_THRESHOLDS = (50, 80, 100)
MAX_BUDGETS = 100  # of an organization: one statement sums up what is held under each
MAX_THRESHOLDS = 10  # each is a mail a month to every manager
MAX_LABELS = 16  # of a key


class BudgetExceeded(QuotaExceeded):
    """The amount would exceed a budget that the organization set itself; raising the budget is the fix."""


@dataclass(frozen=True)
class Attribution:
    """Whose budgets a cost counts under: the key, the member behind it, and metadata labels."""

    key_id: str = ""
    member_id: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)

    def targets(self) -> Q:
        """Return the condition that selects the budgets this cost falls under."""
        labels = [f"{name}={value}" for name, value in self.labels.items()]
        return (
            Q(scope=BudgetScope.ORGANIZATION)
            | Q(scope=BudgetScope.KEY, target=self.key_id or None)
            | Q(scope=BudgetScope.KEY, target__in=ApiKey.objects.filter(pk=self.key_id).values("first_key"))
            | Q(scope=BudgetScope.MEMBER, target=self.member_id or None)
            | Q(scope=BudgetScope.LABEL, target__in=labels)
        )


def attribution_of_key(*, organization: Organization | str, key_id: str) -> Attribution:
    """Return the attribution of requests with this key, with the key's current labels."""
    if not key_id:
        return Attribution()
    keys = ApiKey.objects.for_organization(organization)
    member_id = keys.filter(pk=key_id).values_list("created_by_id", flat=True).first()
    labels = KeyLabel.objects.for_organization(organization).filter(key_id=key_id)
    return Attribution(key_id, member_id or "", dict(labels.values_list("name", "value")))


def attribution_of_actor(*, organization: Organization | str, by: str, labels: Mapping[str, object]) -> Attribution:
    """Return the attribution of a job that `by` started.

    A label of the job overrides the key's label of the same name.
    """
    own = {str(name): str(value) for name, value in labels.items()}
    if by.startswith("key_"):
        found = attribution_of_key(organization=organization, key_id=by)
        return Attribution(by, found.member_id, {**found.labels, **own})
    return Attribution("", by if by.startswith("user_") else "", own)


# --- Decisions --------------------------------------------------------------------------------------------------------


def room_nano(*, organization: Organization | str, attribution: Attribution) -> tuple[int, Budget] | None:
    """Return how much more may be held and the budget that limits it; None without a limiting budget."""
    require_transaction()
    budgets = list(_active(organization).filter(attribution.targets()).exclude(mode=BudgetMode.ALERT))
    states = get_states(organization=organization, budgets=budgets, now=db_now())
    rooms = [(budget.limit_nano - sum(states[budget.pk]), budget) for budget in budgets]
    return min(rooms, key=lambda room: room[0], default=None)


def require_room(*, organization: Organization | str, attribution: Attribution, amount_nano: int) -> None:
    """Raise BudgetExceeded when holding the amount would exceed a limiting budget."""
    room = room_nano(organization=organization, attribution=attribution)
    if room is not None and room[0] < amount_nano:
        left, budget = max(room[0], 0), room[1]
        raise BudgetExceeded(
            f"The budget of {describe(budget)} has {dollars(left)} of {dollars(budget.limit_nano)} "
            f"left this month and this needs {dollars(amount_nano)}. Raise it, or wait for next month.",
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
    return _active(organization)


def get_budget(*, organization: Organization | str, id: str) -> Budget:
    """Return one budget in force. Raises NotFound."""
    budget = _active(organization).filter(pk=id).first()
    if budget is None:
        raise NotFound("No such budget.")
    return budget


def list_key_labels(*, organization: Organization | str) -> list[tuple[str, str]]:
    """Return each labelled key that is not revoked with its labels joined into one text."""
    keys = ApiKey.objects.for_organization(organization).filter(revoked_at=None)
    rows = KeyLabel.objects.for_organization(organization).filter(key_id__in=keys.values("pk"))
    texts: dict[str, list[str]] = {}
    for row in rows.order_by("key_id", "name"):
        texts.setdefault(row.key_id, []).append(f"{row.name}={row.value}")
    return [(key_id, ", ".join(pairs)) for key_id, pairs in texts.items()]


def describe(budget: Budget) -> str:
    """Return whose spending the budget limits, as part of a sentence."""
    match budget.scope:
        case BudgetScope.ORGANIZATION:
            return gettext("the organization")
        case BudgetScope.LABEL:
            return budget.target
        case BudgetScope.KEY:
            return gettext("key %(name)s") % {"name": budget.target}
        case _:
            return gettext("member %(name)s") % {"name": budget.target}


def month_of(now: datetime.datetime) -> datetime.date:
    return now.astimezone(datetime.UTC).date().replace(day=1)


def holds_of_budget(*, budget_id: str) -> QuerySet[Hold]:
    """Return every hold, open or closed, of jobs and slices that fall under the budget."""
    return Hold.objects.filter(_covers(Budget.objects.get(pk=budget_id)))


def _active(organization: Organization | str) -> QuerySet[Budget]:
    return Budget.objects.for_organization(organization).filter(ended_at=None).order_by("pk")


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
        case _:
            name, _, value = budget.target.partition("=")
            return holds & Q(labels__contains={name: value})


def _keys_of(budget: Budget) -> QuerySet[ApiKey]:
    """Return the key that the budget names and those that replaced it."""
    keys = ApiKey.objects.filter(organization_id=budget.organization_id)
    return keys.filter(Q(pk=budget.target) | Q(first_key=budget.target))


def _spent_so_far(budget: Budget, month: datetime.date) -> int:
    """Return the month's cost before the budget's own count began: finished jobs and metered requests."""
    begin = datetime.datetime.combine(month, datetime.time(), datetime.UTC)
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
        case BudgetScope.LABEL:
            name, _, value = budget.target.partition("=")
            labelled = KeyLabel.objects.filter(organization_id=budget.organization_id, name=name, value=value)
            series = series.filter(key_id__in=labelled.values("key_id"))
    return trained + (series.aggregate(nano=Sum("posted_nano"))["nano"] or 0)


# --- Spending and alerts ----------------------------------------------------------------------------------------------


def record_spending(*, organization: Organization | str, attribution: Attribution, amount_nano: int) -> None:
    """Add a charge (negative: a refund) to every budget it falls under, and alert.

    Call it with the posting, under the wallet's lock, before the charge shows in the month's holds or series.
    """
    require_transaction()
    if not amount_nano:
        return
    for budget in _active(organization).filter(attribution.targets()):
        period = _period(budget, db_now())
        period.spent_nano = max(period.spent_nano + amount_nano, 0)
        period.save(update_fields=["spent_nano"])
        _alert(budget, period)


def _period(budget: Budget, now: datetime.datetime) -> BudgetPeriod:
    month = month_of(now)
    found = BudgetPeriod.objects.filter(budget=budget, month=month).first()
    return found or BudgetPeriod.objects.create(
        organization_id=budget.organization_id, budget=budget, month=month, spent_nano=_spent_so_far(budget, month)
    )


def _alert_title(budget: Budget, threshold: int) -> str:
    limit = dollars(budget.limit_nano)
    return gettext("Budget of %(of)s: %(threshold)s%% of %(limit)s spent") % {
        "of": describe(budget),
        "threshold": threshold,
        "limit": limit,
    }


def _alert(budget: Budget, period: BudgetPeriod) -> None:
    for threshold in budget.thresholds:
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


# --- Settings ---------------------------------------------------------------------------------------------------------


@transaction.atomic
def set_budget(
    *,
    organization: Organization | str,
    scope: str,
    target: str,
    limit_nano: int,
    mode: str,
    by: str,
    now: datetime.datetime,
    thresholds: tuple[int, ...] = DEFAULT_THRESHOLDS,
) -> Budget:
    """Set the monthly limit of a scope, replacing its previous limit. Spending earlier in the month counts.

    The budget of a rotated key names the first key, and covers all that replaced it.
    Raises InvalidValue naming the field, and InvalidState above MAX_BUDGETS.
    """
    organization_id = key_of(organization)
    _check(organization_id, scope, target, limit_nano, mode, thresholds)
    if scope == BudgetScope.KEY:
        target = ApiKey.objects.values_list("first_key", flat=True).get(pk=target) or target
    lock_wallet(organization=organization_id)
    budget = _active(organization_id).filter(scope=scope, target=target).first()
    values = {"limit_nano": limit_nano, "mode": mode, "thresholds": sorted(set(thresholds))}
    if budget is None:
        if _active(organization_id).count() >= MAX_BUDGETS:
            raise InvalidState(f"An organization has at most {MAX_BUDGETS} budgets. End one first.")
        budget = Budget.objects.create(
            organization_id=organization_id, scope=scope, target=target, created_by=by, **values
        )
    else:
        Budget.objects.filter(pk=budget.pk).update(**values)
        budget.refresh_from_db()
    _alert(budget, _period(budget, now))
    audit.record(
        organization=organization_id, by=by, action="budget.set", target=budget.pk, scope=scope, of=target,
        limit_nano=limit_nano, mode=mode,
    )  # fmt: skip
    return budget


def _check(
    organization_id: str, scope: str, target: str, limit_nano: int, mode: str, thresholds: tuple[int, ...]
) -> None:
    if limit_nano <= 0:
        raise InvalidValue("The budget must be a positive amount.", param="limit_usd")
    if mode not in BudgetMode.values:
        raise InvalidValue(f"mode is one of {', '.join(BudgetMode.values)}.", param="mode")
    if len(thresholds) > MAX_THRESHOLDS or not all(1 <= threshold <= 1000 for threshold in thresholds):
        text = f"A threshold is a percentage from 1 to 1000, and a budget has at most {MAX_THRESHOLDS}."
        raise InvalidValue(text, param="thresholds")
    keys = ApiKey.objects.filter(organization_id=organization_id)
    is_known = {
        BudgetScope.ORGANIZATION: target == "",
        BudgetScope.LABEL: 0 < target.find("=") < len(target) - 1,
        BudgetScope.KEY: keys.filter(pk=target).exists(),
        BudgetScope.MEMBER: target.startswith("user_"),
    }
    if scope not in is_known:
        raise InvalidValue(f"scope is one of {', '.join(BudgetScope.values)}.", param="scope")
    if not is_known[BudgetScope(scope)]:
        raise InvalidValue(
            "Name a label as name=value, or a key or member by its id. Leave it empty for the organization.",
            param="target",
        )


@transaction.atomic
def end_budget(*, organization: Organization | str, budget_id: str, by: str, now: datetime.datetime) -> bool:
    """End a budget; return whether it was in force."""
    lock_wallet(organization=organization)
    ended = bool(_active(organization).filter(pk=budget_id).update(ended_at=now))
    if ended:
        audit.record(organization=organization, by=by, action="budget.ended", target=budget_id)
    return ended


@transaction.atomic
def issue_key(
    *,
    organization: Organization,
    name: str,
    scopes: frozenset[str],
    by: User,
    expires_at: datetime.datetime | None,
    limits: KeyLimits,
    now: datetime.datetime,
    identity: KeyIdentity | None = None,
    service_account_id: str = "",
) -> IssuedKey:
    """Create a key as `apps.accounts.operations.issue_key` does; it has the labels of the key that asks, `identity`.

    Raises PermissionDenied as well if a budget of that key, or of the member `by`, would not cover the new key.
    """
    issued = operations.issue_key(
        organization=organization, name=name, scopes=scopes, by=by, expires_at=expires_at, limits=limits, now=now,
        identity=identity, service_account_id=service_account_id,
    )  # fmt: skip
    if identity:
        return _with_labels(organization, issued, identity.key_id, identity)
    _require_cover(organization, Attribution(member_id=by.pk), issued)
    return issued


@transaction.atomic
def rotate_key(
    *,
    organization: Organization,
    key_id: str,
    overlap: datetime.timedelta,
    by: User,
    now: datetime.datetime,
    identity: KeyIdentity,
) -> IssuedKey:
    """Rotate a key as `apps.accounts.operations.rotate_key` does; the new key keeps its labels and its budget.

    Raises PermissionDenied as well if the key that asks has a budget that does not cover the other key.
    """
    issued = operations.rotate_key(
        organization=organization, key_id=key_id, overlap=overlap, by=by, now=now, identity=identity
    )
    return _with_labels(organization, issued, key_id, identity)


def _with_labels(organization: Organization, issued: IssuedKey, key_id: str, identity: KeyIdentity) -> IssuedKey:
    """Copy the labels of a key to a new one, which no budget of the key that asks may leave uncovered."""
    labels = KeyLabel.objects.for_organization(organization).filter(key_id=key_id)
    KeyLabel.objects.bulk_create(
        KeyLabel(organization=organization, key_id=issued.key.pk, name=each.name, value=each.value) for each in labels
    )
    _require_cover(organization, attribution_of_key(organization=organization, key_id=identity.key_id), issued)
    return issued


def _require_cover(organization: Organization, asker: Attribution, issued: IssuedKey) -> None:
    """Raise PermissionDenied if a budget of the asker would not cover the new key."""
    new = attribution_of_key(organization=organization, key_id=issued.key.pk)
    budgets = _active(organization)
    uncovered = set(budgets.filter(asker.targets())) - set(budgets.filter(new.targets()))
    if not uncovered:
        return
    if any(budget.scope == BudgetScope.MEMBER for budget in uncovered):
        text = "You have a budget that would not cover the new key. Ask a member without a budget of their own."
        raise PermissionDenied(text)
    raise PermissionDenied(
        "This API key has a budget that would not cover the new key. Use an API key without a budget of its own."
    )


@transaction.atomic
def set_key_labels(*, organization: Organization | str, key_id: str, labels: Mapping[str, str], by: str) -> None:
    """Replace the labels to which a key's future requests are charged back. Raises InvalidValue for an unknown key."""
    organization_id = key_of(organization)
    if len(labels) > MAX_LABELS:
        raise InvalidValue(f"A key has at most {MAX_LABELS} labels.", param="labels")
    if not ApiKey.objects.filter(organization_id=organization_id, pk=key_id).exists():
        raise InvalidValue("There is no such key.", param="key")
    lock_wallet(organization=organization_id)
    KeyLabel.objects.filter(organization_id=organization_id, key_id=key_id).delete()
    rows = [
        KeyLabel(organization_id=organization_id, key_id=key_id, name=name[:64], value=value[:512])
        for name, value in labels.items()
    ]
    KeyLabel.objects.bulk_create(rows)
    audit.record(organization=organization_id, by=by, action="key.labelled", target=key_id, labels=dict(labels))
