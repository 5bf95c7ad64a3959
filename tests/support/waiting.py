"""Waiting for what a server does after its answer, such as giving its database connection back."""

import time
from collections.abc import Callable

from django.db import connection

SECONDS = 20.0


def connections_in_use() -> list[str]:
    """Return the last statement of each connection to the database beside our own."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT query FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
            " AND backend_type = 'client backend'"
        )
        return [query for (query,) in cursor.fetchall()]


def wait_until(is_so: Callable[[], bool], shown: Callable[[], object]) -> None:
    """Return once it is so. Fails after 20 s, and then shows what is in its place."""
    until = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < until, shown()
        time.sleep(0.05)
