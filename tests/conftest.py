"""Fixtures of every suite: Acme with its people, a rival with hers, and clients that speak for them.

alice owns Acme, ann is an admin, bob a member, vera a viewer; charlie owns Rival; olga operates the installation.
"""

import asyncio
import gc
import inspect
import os
from collections.abc import Callable, Iterator

import pytest
from django.conf import settings
from django.core.cache import cache
from django.test import Client, TransactionTestCase
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from pytest_django import DjangoDbBlocker
from rest_framework.test import APIClient

from apps.accounts.login.key_operations import IssuedKey
from apps.accounts.models import Organization, User
from apps.contracts.struct import prepare_types
from apps.core.http.garbage import spare_lasting_objects
from tests.factories.accounts import make_key, make_member, make_organization, make_user
from tests.factories.finetuning import TrainingSetup
from tests.services.database import own_database
from tests.support.database import close_superuser, empty_database
from tests.support.pages import PageClient

# No example is too slow: a busy moment of the machine is no bug of ours. `make nightly` searches four times as long.
hypothesis_settings.register_profile("thorough", deadline=None, suppress_health_check=[HealthCheck.too_slow])
hypothesis_settings.register_profile("quick", hypothesis_settings.get_profile("thorough"), max_examples=25)
hypothesis_settings.load_profile("quick")


def pytest_configure() -> None:
    settings.STATIC_ROOT.mkdir(parents=True, exist_ok=True)  # WhiteNoise warns without it; warnings are errors
    os.fsync = lambda descriptor: None  # the files of a test need not survive a power cut, and wait for the disk
    # After each test that commits: `transaction=True`, `transactional_db` and all that uses it.
    TransactionTestCase._fixture_teardown = lambda self: empty_database()  # type: ignore[method-assign]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an asynchronous test in an event loop of its own, which ends within a minute."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**arguments), 60))
    return True


def pytest_collection_finish() -> None:
    """Looking for garbage among what lives as long as the run took a sixth of the time of all tests."""
    prepare_types()
    spare_lasting_objects()
    gc.enable()  # disabled since tests/services/plugin.py


@pytest.fixture(scope="session")
def django_db_setup(django_test_environment: None, django_db_blocker: DjangoDbBlocker) -> Iterator[None]:
    """Give this process a database of its own: two runs on one machine share the server and nothing else."""
    with django_db_blocker.unblock(), own_database():
        yield
        close_superuser()


@pytest.fixture(autouse=True)
def _empty_cache(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "db" in request.fixturenames or "transactional_db" in request.fixturenames:
        cache.clear()


@pytest.fixture
def alice(db: None) -> User:
    return make_user("alice")


@pytest.fixture
def organization(alice: User) -> Organization:
    return make_organization("Acme", owner=alice)


@pytest.fixture
def floor(organization: Organization) -> TrainingSetup:
    """What Acme trains with: a pool with a worker, a base model, credit."""
    return TrainingSetup(organization)


@pytest.fixture
def ann(organization: Organization) -> User:
    return make_member(organization, "admin", "ann")


@pytest.fixture
def bob(organization: Organization) -> User:
    return make_member(organization, "member", "bob")


@pytest.fixture
def vera(organization: Organization) -> User:
    return make_member(organization, "viewer", "vera")


@pytest.fixture
def viewer(vera: User) -> User:
    return vera


@pytest.fixture
def charlie(db: None) -> User:
    return make_user("charlie")


@pytest.fixture
def rival(charlie: User) -> Organization:
    """Another tenant, which must never see or touch Acme."""
    return make_organization("Rival", owner=charlie)


@pytest.fixture
def olga(db: None) -> User:
    return make_user("olga", is_operator=True)


@pytest.fixture
def operator(olga: User) -> User:
    return olga


@pytest.fixture
def key(organization: Organization, alice: User) -> IssuedKey:
    """Alice's key with every scope."""
    return make_key(organization, alice)


@pytest.fixture
def api_client(db: None) -> Callable[[IssuedKey | str | None], APIClient]:
    """Return a maker of API clients: `api_client(key).get("/v1/files")`."""

    def make(key: IssuedKey | str | None = None) -> APIClient:
        client = APIClient()
        secret = key.secret if isinstance(key, IssuedKey) else key
        if secret:
            client.credentials(HTTP_AUTHORIZATION=f"Bearer {secret}")
        return client

    return make


@pytest.fixture
def client_for(db: None) -> Callable[[User | None], Client]:
    """Return a maker of browsers: `client_for(alice).get("/members")`."""

    def make(user: User | None) -> Client:
        client = PageClient()
        if user is not None:
            client.force_login(user, backend=settings.AUTHENTICATION_BACKENDS[0])
        return client

    return make
