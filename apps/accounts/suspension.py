"""Suspending an organization: an operator closes it, with a reason, and later opens it again.

From then on, its pages, keys and invitations are refused. Its queued runs and the work on its files wait, and its
running jobs pause with a checkpoint. No data is deleted.
"""

import datetime
from typing import Any

from django.db import transaction
from django.db.models import QuerySet
from django.utils.translation import gettext

from apps.accounts.models import Organization
from apps.core import audit
from apps.core.errors import InvalidState, InvalidValue
from apps.core.messages import outbox

REASON_LENGTH = 500


@transaction.atomic
def suspend_organization(*, organization: Organization, by: str, reason: str, now: datetime.datetime) -> None:
    """Close an organization. Raises InvalidState if it is already closed, InvalidValue without a reason."""
    reason = _cleaned(reason)
    rows = Organization.objects.filter(pk=organization.pk, suspended_at=None)
    if not rows.update(suspended_at=now):
        raise InvalidState(gettext("%(name)s is suspended already.") % {"name": organization.name})
    outbox.publish(
        topic="organization.suspended",
        key=f"organization.suspended:{organization.pk}:{now.isoformat()}",
        payload={"organization_id": organization.pk},
    )
    _record(organization, by, "organization.suspend", reason)


@transaction.atomic
def reinstate_organization(*, organization: Organization, by: str, reason: str) -> None:
    """Open an organization again. Paused jobs stay paused until a member resumes them.

    Raises InvalidState if it is not closed, InvalidValue without a reason.
    """
    reason = _cleaned(reason)
    if not Organization.objects.filter(pk=organization.pk, suspended_at__isnull=False).update(suspended_at=None):
        raise InvalidState(gettext("%(name)s is not suspended.") % {"name": organization.name})
    _record(organization, by, "organization.reinstate", reason)


def list_suspended(*, organizations: QuerySet[Any, Any]) -> QuerySet[Organization, str]:
    """Return those of these ids that belong to suspended organizations. Both are queries of one column."""
    return Organization.objects.filter(pk__in=organizations, suspended_at__isnull=False).values_list("pk", flat=True)


def _cleaned(reason: str) -> str:
    cleaned = " ".join(reason.split())[:REASON_LENGTH]
    if not cleaned:
        raise InvalidValue(gettext("A reason is required."), param="reason")
    return cleaned


def _record(organization: Organization, by: str, action: str, reason: str) -> None:
    audit.record_in_each(
        organizations=[None, organization], by=by, action=action, target=organization.pk, reason=reason
    )
