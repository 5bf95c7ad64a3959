"""Checks that a process makes before it serves requests."""

from django.db import connection

from apps.core.database.policies import refuse_unsafe_role


def guard_roles() -> None:
    """Refuse to serve under a role that bypasses row-level security. Raises UnsafeDatabaseRole."""
    refuse_unsafe_role()
    connection.close()
