"""What a process checks of itself before it serves anybody."""

from django.db import connection

from apps.core.database.policies import refuse_unsafe_role


def guard_roles() -> None:
    """Refuse to serve under a role for which row-level security is off. Raises UnsafeDatabaseRole."""
    refuse_unsafe_role()
    connection.close()
