"""What a web process does before it serves requests."""

import sys

from django.db import connection

from apps.core.database.policies import refuse_unsafe_role

# Seconds. A page queries the database about 20 times and needs the interpreter after each. Beside a view that computes,
# it waits this long each time; Python's default of 5 ms made pages three times slower.
_SWITCH_SECONDS = 0.0005


def share_interpreter() -> None:
    """Let waiting threads run sooner beside one that computes."""
    sys.setswitchinterval(_SWITCH_SECONDS)


def guard_roles() -> None:
    """Refuse to serve under a role that bypasses row-level security. Raises UnsafeDatabaseRole."""
    refuse_unsafe_role()
    connection.close()
