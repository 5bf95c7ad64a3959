"""The audit log: who did what to which object, written in the transaction that did it."""

from typing import Any

from django.db import connection

from apps.core.models import AuditEntry


class NoTransaction(Exception):
    """Audit, postings and outbox messages must stand or fall with the change they describe."""


def require_transaction() -> None:
    if not connection.in_atomic_block:
        raise NoTransaction("open a transaction first")


def record(*, organization: Any, by: str, action: str, target: str, **details: Any) -> None:
    """Append one entry. `by` is an actor such as `user_…`, `key_…`, `worker_…` or `system`; `target` is an id."""
    require_transaction()
    AuditEntry.objects.create(
        organization_id=getattr(organization, "pk", organization),
        actor=by,
        action=action,
        target=target,
        details=details,
    )
