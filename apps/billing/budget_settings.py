"""The settings of budgets: their limits, and the keys and labels that decide which budgets a cost falls under."""

import datetime
from collections.abc import Mapping

from django.db import transaction
from django.utils.translation import gettext

from apps.accounts.login import key_operations, key_rotation
from apps.accounts.login.key_operations import IssuedKey
from apps.accounts.models import ApiKey, Organization, Project, User, key_of
from apps.accounts.queries import KeyIdentity, KeyLimits, names_of_creators
from apps.billing.budgets import Attribution, attribution_of_key, list_budgets, period_of, send_alerts
from apps.billing.ledger import lock_wallet
from apps.billing.models import Budget, BudgetMode, BudgetScope, KeyLabel
from apps.core import audit
from apps.core.errors import InvalidState, InvalidValue, PermissionDenied

DEFAULT_THRESHOLDS = (50, 80, 100)
MAX_BUDGETS = 100  # of an organization: one statement sums up what is held under each
MAX_THRESHOLDS = 10  # each is a mail a month to every manager
MAX_LABELS = 16  # of a key
MAX_LABEL_NAME, MAX_LABEL_VALUE = 64, 512


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
    if scope == BudgetScope.LABEL:  # as labels of keys are stored
        name, _, value = target.partition("=")
        target = f"{name.strip()}={value.strip()}"
    lock_wallet(organization=organization_id)
    budget = list_budgets(organization=organization_id).filter(scope=scope, target=target).first()
    values = {"limit_nano": limit_nano, "mode": mode, "thresholds": sorted(set(thresholds))}
    if budget is None:
        if list_budgets(organization=organization_id).count() >= MAX_BUDGETS:
            raise InvalidState(
                gettext("An organization has at most %(max_budgets)s budgets. End one first.")
                % {"max_budgets": MAX_BUDGETS}
            )
        budget = Budget.objects.create(
            organization_id=organization_id, scope=scope, target=target, created_by=by, **values
        )
    else:
        Budget.objects.filter(pk=budget.pk).update(**values)
        budget.refresh_from_db()
    send_alerts(budget, period_of(budget, now))
    audit.record(
        organization=organization_id, by=by, action="budget.set", target=budget.pk, scope=scope, of=target,
        limit_nano=limit_nano, mode=mode,
    )  # fmt: skip
    return budget


def _check(
    organization_id: str, scope: str, target: str, limit_nano: int, mode: str, thresholds: tuple[int, ...]
) -> None:
    if limit_nano <= 0:
        raise InvalidValue(gettext("The budget must be a positive amount."), param="limit_usd")
    if mode not in BudgetMode.values:
        raise InvalidValue(
            gettext("mode is one of %(values)s.") % {"values": ", ".join(BudgetMode.values)}, param="mode"
        )
    if len(thresholds) > MAX_THRESHOLDS or not all(1 <= threshold <= 1000 for threshold in thresholds):
        text = gettext("A threshold is a percentage from 1 to 1000, and a budget has at most %(max_thresholds)s.") % {
            "max_thresholds": MAX_THRESHOLDS
        }
        raise InvalidValue(text, param="thresholds")
    keys = ApiKey.objects.filter(organization_id=organization_id)
    is_known = {
        BudgetScope.ORGANIZATION: target == "",
        BudgetScope.LABEL: all(part.strip() for part in target.partition("=")),
        BudgetScope.KEY: keys.filter(pk=target).exists(),
        BudgetScope.MEMBER: target in names_of_creators(organization=organization_id),
        BudgetScope.PROJECT: Project.objects.filter(organization_id=organization_id, pk=target).exists(),
    }
    if scope not in is_known:
        raise InvalidValue(
            gettext("scope is one of %(values)s.") % {"values": ", ".join(BudgetScope.values)}, param="scope"
        )
    if not is_known[BudgetScope(scope)]:
        raise InvalidValue(
            gettext(
                "Name a label as name=value, or a key, member or project by its id. Leave it empty for the "
                "organization."
            ),
            param="target",
        )


@transaction.atomic
def end_budget(*, organization: Organization | str, budget_id: str, by: str, now: datetime.datetime) -> bool:
    """End a budget; return whether it was in force."""
    lock_wallet(organization=organization)
    ended = bool(list_budgets(organization=organization).filter(pk=budget_id).update(ended_at=now))
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
    project_id: str = "",
) -> IssuedKey:
    """Create a key as `key_operations.issue_key` does; it has the labels of the key that asks, `identity`.

    Raises PermissionDenied as well if a budget of that key, or of the member `by`, would not cover the new key.
    """
    issued = key_operations.issue_key(
        organization=organization, name=name, scopes=scopes, by=by, expires_at=expires_at, limits=limits, now=now,
        identity=identity, service_account_id=service_account_id, project_id=project_id,
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
    """Rotate a key as `key_rotation.rotate_key` does; the new key keeps its labels and its budget.

    Raises PermissionDenied as well if the key that asks has a budget that does not cover the other key.
    """
    issued = key_rotation.rotate_key(
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
    budgets = list_budgets(organization=organization)
    uncovered = set(budgets.filter(asker.targets())) - set(budgets.filter(new.targets()))
    if not uncovered:
        return
    if any(budget.scope == BudgetScope.MEMBER for budget in uncovered):
        text = gettext(
            "You have a budget that would not cover the new key. Ask a member without a budget of their own."
        )
        raise PermissionDenied(text)
    raise PermissionDenied(
        gettext(
            "This API key or its project has a budget that would not cover the new key. Create the key in the same "
            "project, or use an API key without a budget of its own."
        )
    )


@transaction.atomic
def set_key_labels(*, organization: Organization | str, key_id: str, labels: Mapping[str, str], by: str) -> None:
    """Replace the labels to which a key's future requests are charged back. Raises InvalidValue for an unknown key."""
    organization_id = key_of(organization)
    sent, labels = len(labels), {name.strip(): value.strip() for name, value in labels.items()}
    if len(labels) < sent:
        raise InvalidValue(gettext("Two labels have the same name. Give each label another name."), param="labels")
    if not all(name and value and "=" not in name for name, value in labels.items()):
        raise InvalidValue(gettext("A label is name=value."), param="labels")
    if len(labels) > MAX_LABELS:
        raise InvalidValue(
            gettext("A key has at most %(max_labels)s labels.") % {"max_labels": MAX_LABELS}, param="labels"
        )
    if any(len(name) > MAX_LABEL_NAME or len(value) > MAX_LABEL_VALUE for name, value in labels.items()):
        raise InvalidValue(
            gettext("The name of a label has at most %(name)s characters, and its value %(value)s.")
            % {"name": MAX_LABEL_NAME, "value": MAX_LABEL_VALUE},
            param="labels",
        )
    if not ApiKey.objects.filter(organization_id=organization_id, pk=key_id).exists():
        raise InvalidValue(gettext("There is no such key."), param="key")
    lock_wallet(organization=organization_id)
    KeyLabel.objects.filter(organization_id=organization_id, key_id=key_id).delete()
    rows = [
        KeyLabel(organization_id=organization_id, key_id=key_id, name=name, value=value)
        for name, value in labels.items()
    ]
    KeyLabel.objects.bulk_create(rows)
    audit.record(organization=organization_id, by=by, action="key.labelled", target=key_id, labels=dict(labels))
