"""Fixtures of the modules that test the gateway as a separate process.

It sees only committed rows. So all modules share one gateway and one committed world, which is emptied at the end. With
the mark `django_db` the test database is made; `_django_db_helper` here wraps and flushes nothing.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.factories.serving import Tenant, World, make_tenant, make_world
from tests.support.database import empty_database
from tests.support.gateway.processes import GatewayProcess, no_transaction, running_gateway  # noqa: F401 - a fixture
from tests.twins.scripted_engine import ScriptedEngine


@pytest.fixture(scope="package", autouse=True)
def _database(django_db_setup, django_db_blocker) -> Iterator[None]:
    with django_db_blocker.unblock():
        yield
        empty_database()


@pytest.fixture(scope="package")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("gw")


@pytest.fixture(scope="package")
def engine(_database, home) -> Iterator[ScriptedEngine]:
    with ScriptedEngine(home / "engine.sock").running() as engine:
        yield engine


@pytest.fixture(scope="package")
def world(engine) -> World:
    return make_world(engine.url)


@pytest.fixture(scope="package")
def gateway(world, home) -> Iterator[GatewayProcess]:
    with running_gateway(home) as gateway:
        yield gateway
        assert gateway.is_running(), f"the gateway ended during the tests:\n{gateway.log()}"


@pytest.fixture
def tenant(world, gateway) -> Tenant:
    """A customer with credit whom no other test charges."""
    return make_tenant("Northline", world.base_model)


@pytest.fixture(autouse=True)
def _clients_closed(gateway) -> Iterator[None]:
    yield
    gateway.close_clients()
