"""pytest plugin: real PostgreSQL and Redis for the whole run, and the environment the settings read."""

import atexit
import gc
import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from scripts.embedded import ensure_running

gc.disable()  # until all tests are collected: imports and parameters are no garbage, however often it is looked for
ROOT = Path(__file__).resolve().parents[2]
_services = ExitStack()


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
        ANNEAL_SECRET_KEY="test-secret-key-that-is-long-enough-for-django",
        ANNEAL_KEY_PEPPER="test-pepper",
        ANNEAL_SIGNING_KEY="test-signing-key",
        ANNEAL_PUBLIC_URL="http://testserver",
        DATABASE_URL=services.database_url("owner"),
        REDIS_URL=services.redis_url,
        CELERY_BROKER_URL=services.broker_url,
    )
