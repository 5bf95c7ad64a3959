"""Virtual time of the database. Every statement of a transaction then reads this clock instead of PostgreSQL's own."""

import datetime

from django.db import connection

BEGIN = datetime.datetime(2040, 1, 1, tzinfo=datetime.UTC)
# PostgreSQL looks into pg_catalog first only where the path does not name it.
_SCHEMA = """
    CREATE SCHEMA virtual_time;
    CREATE FUNCTION virtual_time.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE
        AS $$ SELECT current_setting('anneal.virtual_now')::timestamptz $$;
    CREATE FUNCTION virtual_time.statement_timestamp() RETURNS timestamptz LANGUAGE sql STABLE
        AS $$ SELECT current_setting('anneal.virtual_now')::timestamptz $$;
    CREATE FUNCTION virtual_time.now() RETURNS timestamptz LANGUAGE sql STABLE
        AS $$ SELECT current_setting('anneal.virtual_now')::timestamptz $$;
    SET LOCAL search_path = virtual_time, public, pg_catalog;
"""
# The default of a column is bound to PostgreSQL's own clock when the table is made.
_DEFAULTS = {
    "finetuning_run": ("created_at",),
    "finetuning_finetuningjob": ("created_at",),
    "finetuning_worker": ("created_at",),
    "finetuning_capacitynode": ("requested_at",),
    "serving_replica": ("created_at", "readiness_changed_at"),
}


class VirtualClock:
    """The clock of the current transaction, which must be rolled back or end before the real one counts again."""

    def __init__(self) -> None:
        self.now = BEGIN
        self._tell()
        with connection.cursor() as cursor:
            cursor.execute(_SCHEMA)

    def advance(self, seconds: float) -> None:
        self.now += datetime.timedelta(seconds=seconds)
        self._tell()

    def correct_defaults(self) -> None:
        """Give the rows that the last operation made the virtual time."""
        with connection.cursor() as cursor:
            for table, columns in _DEFAULTS.items():
                changes = ", ".join(f"{column} = greatest({column}, now())" for column in columns)
                cursor.execute(f"UPDATE {table} SET {changes} WHERE {columns[0]} < %s", [BEGIN])

    def _tell(self) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT set_config('anneal.virtual_now', %s, true)", [self.now.isoformat()])
