"""Empty the test database after a test that commits: in milliseconds, where Django's `flush` takes a second.

`flush` truncates every table, in use or not, and lets `post_migrate` write content types, permissions and the policies
of all tables again. Here the rows are deleted, and what `post_migrate` wrote stays.
"""

import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psycopg
from django.db import connection, transaction
from psycopg import sql

KEPT = {"django_migrations", "django_content_type", "auth_permission", "accounts_region"}
_OTHER_REGIONS = "DELETE FROM accounts_region WHERE NOT is_home"  # the home came with the migrations


def empty_database() -> None:
    """Delete the rows of all models.

    As a superuser and a replica: no trigger, no foreign key and no policy asks why an append-only row goes.
    """
    tables = sorted(set(connection.introspection.django_table_names(only_existing=True)) - KEPT)
    deletions = [sql.SQL("DELETE FROM {}").format(sql.Identifier(name)) for name in tables]
    _superuser().execute(sql.SQL(";").join([*deletions, sql.SQL(_OTHER_REGIONS)]))


@functools.cache
def _superuser() -> psycopg.Connection:
    """Return one connection for the whole run: a new one has to read the catalogue of all tables again."""
    settings = connection.settings_dict
    place = {"host": settings["HOST"], "port": settings["PORT"], "dbname": settings["NAME"]}
    return psycopg.connect(**place, user="postgres", autocommit=True, options="-c session_replication_role=replica")


def close_superuser() -> None:
    """Close the connection of `empty_database`, if it was made."""
    if _superuser.cache_info().currsize:
        _superuser().close()
        _superuser.cache_clear()


def database_url(role: str) -> str:
    """Return the address of this test run's database for a process with the login of `role`."""
    parts = urlsplit(os.environ["DATABASE_URL"])
    host = parts.netloc.replace("anneal_owner", f"anneal_{role}")
    return urlunsplit(parts._replace(netloc=host, path=f"/{connection.settings_dict['NAME']}"))


def at_once(work: Callable[[int], Any], count: int = 64) -> list[Any]:
    """Run `work` in so many threads that begin together; return what each returned or raised."""
    results: list[Any] = [None] * count
    begin = threading.Barrier(count)

    def one(number: int) -> None:
        try:
            begin.wait(timeout=60)
            results[number] = work(number)
        except Exception as error:  # noqa: BLE001 - it is the result
            results[number] = error
        finally:
            connection.close()

    threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def beside(first: Callable[[], Any], second: Callable[[], Any]) -> tuple[Any, Any]:
    """Run `second` in a thread after `first`, before the transaction of `first` ends; return what each returned.

    `second` may wait for that transaction. What it raises is its result.
    """
    pids: SimpleQueue[int] = SimpleQueue()

    def run() -> Any:
        try:
            with transaction.atomic():
                pids.put(_ask("SELECT pg_backend_pid()"))
                return second()
        except Exception as error:  # noqa: BLE001 - it is the result
            return error
        finally:
            connection.close()

    with ThreadPoolExecutor(1) as threads:
        with transaction.atomic():
            made = first()
            other = threads.submit(run)
            pid = pids.get(timeout=60)
            waits = "SELECT pg_backend_pid() = ANY(pg_blocking_pids(%s)) FROM pg_sleep(0.01)"
            assert any(other.done() or _ask(waits, pid) for _ in range(3_000))
        return made, other.result(timeout=60)


def _ask(statement: str, *arguments: object) -> Any:
    with connection.cursor() as cursor:
        cursor.execute(statement, arguments)
        return cursor.fetchone()[0]


def connections_in_use() -> list[str]:
    """Return the last statement of each connection to the database beside our own, and that of `empty_database`."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT query FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
            " AND backend_type = 'client backend' AND usename <> 'postgres'"
        )
        return [query for (query,) in cursor.fetchall()]
