"""The database clock. It is the only clock, so that no worker's skew decides a lease, a price or an expiry."""

import datetime

from django.db import connection


def db_now() -> datetime.datetime:
    """Return `clock_timestamp()`: the wall time now, not the start of the transaction."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT clock_timestamp()")
        return cursor.fetchone()[0]


def begin_of_day(day: datetime.date) -> datetime.datetime:
    """Return the first moment of a UTC day."""
    return datetime.datetime.combine(day, datetime.time(), datetime.UTC)


def end_of_day(day: datetime.date) -> datetime.datetime:
    """Return the last moment of a UTC day, to the microsecond, as the database counts. The last year has one too."""
    return datetime.datetime.combine(day, datetime.time.max, datetime.UTC)
