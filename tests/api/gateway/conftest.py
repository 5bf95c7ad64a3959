"""Fixtures of the modules that test the gateway as a process of its own.

It sees only what is committed. So the tests of one module share one committed world, emptied when the module ends; the
mark `django_db` only has the test database made, as `_django_db_helper` here wraps and flushes nothing.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.factories.serving import Tenant, World, make_tenant, make_world
from tests.support.gateway import GatewayProcess, committed_database, no_transaction, running_gateway  # noqa: F401 - fixtures
from tests.twins.scripted_engine import ScriptedEngine


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("gw")


@pytest.fixture(scope="module")
def engine(_database, home) -> Iterator[ScriptedEngine]:
    with ScriptedEngine(home / "engine.sock").running() as engine:
        yield engine


@pytest.fixture(scope="module")
def world(engine) -> World:
    return make_world(engine.url)


@pytest.fixture(scope="module")
def gateway(world, home) -> Iterator[GatewayProcess]:
    with running_gateway(home) as gateway:
        yield gateway


@pytest.fixture
def tenant(world, gateway) -> Tenant:
    """A customer with credit whom no other test charges."""
    return make_tenant("Northline", world.base_model)


@pytest.fixture(autouse=True)
def _clients_closed(gateway) -> Iterator[None]:
    yield
    gateway.close_clients()
