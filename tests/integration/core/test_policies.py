"""The policies are written beside live traffic and autovacuum; what they say is tried in tests/guards."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.core.management import call_command
from django.db import connection, transaction

from apps.accounts.models import Region
from apps.core.database.policies import write_policies
from tests.support.waiting import wait_until

TABLE = "core_outboxmessage"


def in_a_connection_of_its_own(work: Callable[[], None]) -> None:
    try:
        work()
    finally:
        connection.close()


def wait_until_somebody_waits_for(table: str) -> None:
    def find() -> object:
        cursor.execute("SELECT 1 FROM pg_locks WHERE relation = %s::regclass AND NOT granted", [table])
        return cursor.fetchone()

    with connection.cursor() as cursor:
        wait_until(find, f"nobody waits for {table}", seconds=30)


def test_policies_and_a_vacuum_of_the_same_table_do_not_block_each_other(transactional_db: None) -> None:
    """A vacuum holds its table, then changes the row of pg_class that a GRANT changes, too."""
    with ThreadPoolExecutor(1) as pool:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(f"LOCK TABLE {TABLE} IN SHARE UPDATE EXCLUSIVE MODE")
            writing = pool.submit(in_a_connection_of_its_own, write_policies)
            wait_until_somebody_waits_for(TABLE)
            cursor.execute(f"ANALYZE {TABLE}")
        writing.result(timeout=60)


@pytest.mark.slow
def test_emptying_the_database_leaves_the_policies_alone(transactional_db: None) -> None:
    home = Region.objects.get(is_home=True)  # came with the migrations, and other tests need it
    with connection.cursor() as cursor:
        cursor.execute("SELECT oid FROM pg_policy ORDER BY oid")
        before = cursor.fetchall()
        call_command("flush", interactive=False, verbosity=0)
        home.save(force_insert=True)
        cursor.execute("SELECT oid FROM pg_policy ORDER BY oid")
        assert before == cursor.fetchall() != []
