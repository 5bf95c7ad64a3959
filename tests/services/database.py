"""The database of a test process: a copy of a template that is built once for each state of the schema.

Templates are kept between runs. One advisory lock orders the processes, so that the first builds and the others copy.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from django.apps import apps
from django.conf import settings
from django.core.management import call_command
from django.db import connection

REPOSITORY = Path(__file__).resolve().parents[2]
TEMPLATE, OWN = "template_anneal_", "test_anneal_"
_LOCK = "SELECT pg_advisory_lock(hashtext('anneal test databases'))"
_FIND = "SELECT datname FROM pg_database WHERE starts_with(datname, %s)"


@contextmanager
def own_database() -> Iterator[None]:
    """Make a database named after this process, have Django use it, and drop it at the end.

    What killed processes left is dropped too.
    """
    name = f"{OWN}{os.getpid()}"
    with _server() as server:
        server.execute(_LOCK)
        for left in _databases(server, OWN):
            if not _is_alive(int(left.removeprefix(OWN))):
                _drop(server, left)
        server.execute(f"CREATE DATABASE {name} TEMPLATE {_template(server)}")
    _use(name)
    yield
    connection.close()
    with _server() as server:
        _drop(server, name)


def _template(server: psycopg.Connection) -> str:
    name = TEMPLATE + _schema_hash(server)
    found = _databases(server, TEMPLATE)
    if name not in found:
        for outdated in found:
            _drop(server, outdated)
        draft = f"{TEMPLATE}draft"
        server.execute(f"CREATE DATABASE {draft}")
        _use(draft)
        call_command("migrate", verbosity=0)
        connection.close()
        server.execute(f"ALTER DATABASE {draft} RENAME TO {name}")  # only a complete template has this name
    return name


def _schema_hash(server: psycopg.Connection) -> str:
    """The hash of all that tables, policies, grants and first rows follow from."""
    files = [REPOSITORY / "deploy/postgres/roles.sql", REPOSITORY / "requirements/web.lock"]
    for pattern in ("apps/*/models.py", "apps/*/models/*.py", "apps/core/**/*.py", "apps/config/settings/*.py"):
        files += sorted(REPOSITORY.glob(pattern))
    for app in apps.get_app_configs():
        files += sorted(Path(app.path).glob("migrations/*.py"))
    content = hashlib.sha256(str(server.info.server_version).encode())
    for file in files:
        content.update(f"\n{file}\n".encode() + file.read_bytes())
    return content.hexdigest()[:16]


def _server() -> psycopg.Connection:
    return psycopg.connect(os.environ["DATABASE_URL"], dbname="postgres", autocommit=True)


def _databases(server: psycopg.Connection, prefix: str) -> list[str]:
    return [name for (name,) in server.execute(_FIND, [prefix])]


def _drop(server: psycopg.Connection, name: str) -> None:
    # A thread of a server that a test ran may hold its connection for a moment longer. WITH (FORCE) would be refused
    # while autovacuum works there; a plain DROP DATABASE ends that itself.
    clients = "SELECT pid FROM pg_stat_activity WHERE datname = %s AND backend_type = 'client backend'"
    server.execute(f"SELECT pg_terminate_backend(pid, 5000) FROM ({clients}) AS found", [name])
    server.execute(f"DROP DATABASE {name}")


def _use(name: str) -> None:
    connection.close()
    settings.DATABASES["default"]["NAME"] = connection.settings_dict["NAME"] = name


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it belongs to another process
        pass
    return True
