"""Locks on a name, held until the transaction ends."""

from django.db import connection


def lock(name: str) -> None:
    """Wait until no other transaction holds `name`, then take it. Call inside a transaction."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", [name])


def try_lock(name: str) -> bool:
    """Take `name` and return True, or return False at once if another transaction holds it.

    Call inside a transaction.
    """
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_xact_lock(hashtextextended(%s, 0))", [name])
        return bool(cursor.fetchone()[0])
