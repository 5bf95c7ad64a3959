"""The audit log: actor, action and target of each change, written in the same transaction as the change."""

from collections.abc import Iterable

from django.db import connection

from apps.core.database.tenancy import Keyed, id_of
from apps.core.http.origin import current
from apps.core.models import AuditEntry


class NoTransaction(Exception):
    """The caller has no open transaction. Audit entries, postings and outbox messages must commit with their change."""


def require_transaction() -> None:
    if not connection.in_atomic_block:
        raise NoTransaction("open a transaction first")


def record(*, organization: Keyed | str | None, by: str, action: str, target: str, **details: object) -> None:
    """Append one entry. `by` is an actor such as `user_…`, `key_…`, `worker_…` or `system`; `target` is an id."""
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
