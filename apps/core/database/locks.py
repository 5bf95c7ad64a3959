"""Locks on a name or a row, held until the transaction ends."""

from typing import TypeVar

from django.db import connection
from django.db.models import Model
from django.utils.translation import gettext

from apps.core.errors import NotFound

T = TypeVar("T", bound=Model)


def lock_row(row: T) -> T:
    """Return the row as it is now, locked. Raises NotFound if it was deleted since it was read."""
    found: T | None = type(row)._default_manager.select_for_update().filter(pk=row.pk).first()
    if found is None:
        raise NotFound(gettext("This was deleted in the meantime."))
    return found


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
