"""The audit log: actor, action and target of each change, written in the same transaction as the change.

An organization can add a limited number of entries an hour. Beyond that, its change is refused together with the entry.
A log that left entries out could hide an attack behind many harmless ones.
"""

import math
from collections.abc import Iterable

from django.db import connection
from django.utils.translation import gettext

from apps.core.database.policies import APP_ROLE
from apps.core.database.tenancy import Keyed, id_of
from apps.core.errors import RateLimited
from apps.core.http.origin import current
from apps.core.models import AuditEntry

MAX_PER_HOUR = 5_000  # of one organization
_FEW = 100  # most organizations make fewer: then no more of the log is read
# What these take away was made by an entry that counted. So they need no limit, and a full log keeps no key alive.
_TAKES_AWAY = frozenset({
    "archive", "cancel_requested", "canceled", "cancelled", "deleted", "let_cool", "member_remove", "pause_requested",
    "remove", "removed", "revoke", "revoke_all", "undeployed", "uninvite",
})  # fmt: skip
# Operators, tasks and workers have other roles. Sign-ins, which strangers can fail at, and what operators view do not
# count.
_WAIT = """
    SELECT extract(epoch FROM created_at + interval '1 hour' - clock_timestamp())::float8
      FROM core_auditentry
     WHERE organization_id = %s AND current_user = %s
       AND NOT starts_with(action, 'person.') AND NOT starts_with(action, 'organization.view')
     ORDER BY id DESC OFFSET %s LIMIT 1
"""


class NoTransaction(Exception):
    """The caller has no open transaction. Audit entries, postings and outbox messages must commit with their change."""


def require_transaction() -> None:
    if not connection.in_atomic_block:
        raise NoTransaction("open a transaction first")


def record(*, organization: Keyed | str | None, by: str, action: str, target: str, **details: object) -> None:
    """Append one entry. `by` is an actor such as `user_…`, `key_…`, `worker_…` or `system`; `target` is an id.

    Raises RateLimited if the organization's log has MAX_PER_HOUR entries of this hour and a member or a key makes the
    change. A change that takes something away is never refused.
    """
    if organization is not None and by != "system" and action.rpartition(".")[2] not in _TAKES_AWAY:
        _require_room(id_of(organization))
    record_in_each(organizations=[organization], by=by, action=action, target=target, **details)


def record_in_each(
    *, organizations: Iterable[Keyed | str | None], by: str, action: str, target: str, **details: object
) -> None:
    """Append the same entry to the logs of several organizations in one statement. None is the platform's log."""
    require_transaction()
    origin = current()
    if origin.key_id and origin.key_id != by:
        details = details | {"api_key": origin.key_id}
    AuditEntry.objects.bulk_create(
        AuditEntry(
            organization_id=id_of(organization) or None,
            actor=by,
            action=action,
            target=target,
            details=details,
            ip=origin.ip,
            user_agent=origin.user_agent,
        )
        for organization in organizations
    )


def _require_room(organization_id: str) -> None:
    """Raise RateLimited if the organization's log has MAX_PER_HOUR entries of this hour."""
    if _wait_seconds(organization_id, _FEW) <= 0:
        return
    wait_seconds = _wait_seconds(organization_id, MAX_PER_HOUR)
    if wait_seconds > 0:
        message = gettext(
            "Your organization made %(most)s changes and downloads within an hour, the most allowed. Try again in "
            "%(minutes)s min. You can still delete, cancel, revoke and remove."
        ) % {"most": f"{MAX_PER_HOUR:,}", "minutes": math.ceil(wait_seconds / 60)}
        raise RateLimited(message, retry_after_seconds=math.ceil(wait_seconds))


def _wait_seconds(organization_id: str, place: int) -> float:
    """Return the seconds until the entry at a place, counted from the newest, is an hour old; 0 if there is none."""
    with connection.cursor() as cursor:
        cursor.execute(_WAIT, [organization_id, APP_ROLE, place - 1])
        found = cursor.fetchone()
    return found[0] if found else 0.0
