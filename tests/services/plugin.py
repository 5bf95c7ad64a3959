"""pytest plugin: real PostgreSQL and Redis for the whole run, and the environment the settings read."""

import atexit
import gc
import os
import re
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import quote

import pytest

from scripts.embedded import ensure_running
from scripts.environment import plain_environment
from tests.services.surroundings import go_around_proxies

gc.disable()  # until all tests are collected: imports and parameters are no garbage, however often it is looked for
ROOT = Path(__file__).resolve().parents[2]
_services = ExitStack()
# Which real services some tests ask, with which keys.
_FOR_TESTS = re.compile("ANNEAL_TEST_|STRIPE_TEST_KEY" + ("|AWS_" if "ANNEAL_TEST_S3" in os.environ else ""))
_OTHERS = re.compile("HF_ENDPOINT|HF_BLOB_HOSTS|OTEL_")


def _forget_installation() -> None:
    """Forget the shell's variables of an installation: the tests delete objects and use up accounts."""
    plain = plain_environment()
    for name in list(os.environ):
        if (name not in plain and not _FOR_TESTS.match(name)) or _OTHERS.match(name):
            del os.environ[name]


_forget_installation()  # here, because the hook of pytest-django may run before ours
go_around_proxies()


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Start the services before Django reads its settings."""
    start_services()


def start_services() -> None:
    """Start what all processes of a run share until it ends, and set the environment that the settings read."""
    home = ROOT / ".anneal" / "test"
    home.mkdir(parents=True, exist_ok=True)
    services = _services.enter_context(ensure_running(home, durable=False))
    atexit.register(_services.close)
    os.environ.update(
        ANNEAL_HOME=str(home),
        ANNEAL_OBJECT_STORE=f"file://{quote(str(home))}/objects",
        ANNEAL_SECRET_KEY="test-secret-key-that-is-long-enough-for-django",
        ANNEAL_KEY_PEPPER="test-pepper",
        ANNEAL_SIGNING_KEY="test-signing-key",
        ANNEAL_PUBLIC_URL="http://testserver",
        DATABASE_URL=services.database_url("owner"),
        REDIS_URL=services.redis_url,
        CELERY_BROKER_URL=services.broker_url,
    )
