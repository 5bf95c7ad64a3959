"""Allowances: what an organization lets a member, label or project use, within its quota."""

import datetime
from collections.abc import Mapping
from typing import Any

from django.db import transaction
from django.db.models import QuerySet
from django.utils.translation import gettext

from apps.accounts.members.projects import get_project
from apps.accounts.models import Organization, key_of
from apps.accounts.queries import names_of_creators
from apps.accounts.shares import get_share_holder
from apps.core import audit
from apps.core.database import locks
from apps.core.errors import InvalidState, InvalidValue, NotFound
from apps.finetuning.models import Allowance, AllowanceScope
from apps.finetuning.usage.quotas import get_quota, lock_name
from apps.finetuning.usage.rates import RATES

ALLOWED = ("concurrent_gpus", "gpu_seconds_per_month", "queued_jobs", "storage_bytes", *RATES)
MAX_ALLOWANCES = 100  # of an organization
MAX_NAME, MAX_VALUE = 64, 512  # characters of a label, as of a job's metadata


@transaction.atomic
def set_allowance(
    *,
    organization: Organization | str,
    scope: str,
    target: str,
    limits: Mapping[str, int | None],
    by: str,
    now: datetime.datetime,
) -> Allowance:
    """Set what a member or project (its id) or a label (name=value) may use, in place of what was set.

    `limits` has those of `ALLOWED`; one that is missing or None is no limit. Raises InvalidValue naming the field, such
    as a limit above the organization's quota, and InvalidState above MAX_ALLOWANCES.
    """
    organization_id = key_of(organization)
    whose = _whose(organization_id, scope, target)
    values = {name: limits.get(name) for name in ALLOWED}
    if values["storage_bytes"] is not None and scope != AllowanceScope.MEMBER:
        text = gettext("Only a member can have a limit of storage.")
        raise InvalidValue(text, param="storage_bytes")
    locks.lock(lock_name(get_share_holder(organization=organization_id)))
    _require_within_quota(organization_id, values)
    existing = Allowance.objects.filter(organization_id=organization_id)
    if not existing.filter(**whose).exists() and existing.count() >= MAX_ALLOWANCES:
        raise InvalidState(
            gettext("An organization has at most %(most)s allowances. End one first.") % {"most": MAX_ALLOWANCES}
        )
    allowance, _ = Allowance.objects.update_or_create(
        organization_id=organization_id, **whose, defaults=values | {"updated_by": by, "updated_at": now}
    )
    audit.record(
        organization=organization_id, by=by, action="allowance.set", target=allowance.pk, scope=scope,
        of=allowance.target, **values,
    )  # fmt: skip
    return allowance


@transaction.atomic
def end_allowance(*, organization: Organization | str, allowance_id: str, by: str) -> bool:
    """End an allowance, so that the organization's quota alone counts; return whether it was in force."""
    ended, _ = list_allowances(organization=organization).filter(pk=allowance_id).delete()
    if ended:
        audit.record(organization=organization, by=by, action="allowance.ended", target=allowance_id)
    return bool(ended)


def list_allowances(*, organization: Organization | str) -> QuerySet[Allowance]:
    """Return the allowances in force: those of labels, then those of members and projects."""
    return Allowance.objects.for_organization(organization).order_by("label", "pk")


def get_allowance(*, organization: Organization | str, id: str) -> Allowance:
    """Return one allowance in force. Raises NotFound."""
    allowance = list_allowances(organization=organization).filter(pk=id).first()
    if allowance is None:
        raise NotFound(gettext("No such allowance."))
    return allowance


def _whose(organization_id: str, scope: str, target: str) -> dict[str, Any]:
    """Return the columns that say whom an allowance covers. Raises InvalidValue."""
    if scope == AllowanceScope.MEMBER:
        if target not in names_of_creators(organization=organization_id):
            text = gettext("Give the id of a member or service account of the organization.")
            raise InvalidValue(text, param="target")
        return {"member_id": target}
    if scope == AllowanceScope.PROJECT:
        return {"project_id": get_project(organization=organization_id, id=target).pk}
    if scope != AllowanceScope.LABEL:
        values = ", ".join(AllowanceScope.values)
        raise InvalidValue(gettext("scope is one of %(values)s.") % {"values": values}, param="scope")
    name, value = (part.strip() for part in target.partition("=")[::2])
    if not (0 < len(name) <= MAX_NAME and 0 < len(value) <= MAX_VALUE):
        text = gettext("Write a label as name=value, such as team=search. The name has at most %(most)s characters.")
        raise InvalidValue(text % {"most": MAX_NAME}, param="target")
    return {"label": {name: value}}


def _require_within_quota(organization_id: str, values: Mapping[str, int | None]) -> None:
    if all(value is None for value in values.values()):
        raise InvalidValue(gettext("Set at least one limit, or end the allowance."))
    quota = get_quota(organization=organization_id)
    for name, value in values.items():
        most = getattr(quota, name)
        if value is not None and value < 0:
            raise InvalidValue(gettext("A limit must be zero or more."), param=name)
        if value is not None and most is not None and value > most:
            raise InvalidValue(
                gettext(
                    "The quota of your organization is %(most)s. Set at most as much, or ask the operator for more."
                )
                % {"most": most},
                param=name,
            )
