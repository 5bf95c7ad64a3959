"""A replica is where it was when it enrolled, if the settings or an operator say that this may be."""

import json
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
from django.test import Client

from apps.contracts.addresses.replicas import AddressRules
from apps.contracts.worker_api import EnrollRequest
from apps.core.models import AuditEntry
from apps.finetuning.models import WorkerToken
from apps.finetuning.pools import operations
from apps.serving.models import Replica
from apps.serving.operations import desired_state
from apps.serving.placements import replan_around
from apps.serving.queries import list_routes
from tests.factories.finetuning import TrainingSetup
from tests.factories.serving import make_adapter


@pytest.fixture
def token(floor: TrainingSetup) -> str:
    return operations.issue_worker_token(pool=floor.pool, kind="replica", base_model=floor.base_model, by="user_olga")


def enroll(token: str, url: str) -> tuple[int, dict]:
    body = msgspec.json.encode(EnrollRequest(token=token, kind="replica", hostname="gpu-1", listen_url=url))
    answer = Client().post("/internal/v1/enroll", body, content_type="application/json")
    return answer.status_code, json.loads(answer.content)


@contextmanager
def worker_api(settings) -> Iterator[None]:
    before, settings.ROOT_URLCONF = settings.ROOT_URLCONF, "apps.config.urls_internal"
    yield
    settings.ROOT_URLCONF = before


def make_ready() -> Replica:
    Replica.objects.update(is_ready=True, observed_at="2100-01-01T00:00Z")
    return Replica.objects.get()


@pytest.mark.parametrize("url", ["http://127.0.0.1:6379", "unix:///run/redis/redis.sock", "http://169.254.169.254", ""])
def test_an_address_that_no_replica_has_is_refused_and_the_token_stays(settings, token, url) -> None:
    settings.ROOT_URLCONF = "apps.config.urls_internal"
    settings.REPLICA_ADDRESSES = AddressRules.read([])

    status, answer = enroll(token, url)

    assert (status, answer["error"]["param"]) == (400, "listen_url")
    assert not Replica.objects.exists() and WorkerToken.objects.get().used_at is None
    assert enroll(token, "http://gpu-1:8003")[0] == 200


def test_an_address_that_was_not_named_waits_for_an_operator(
    settings, organization, floor, token, client_for, olga
) -> None:
    settings.REPLICA_ADDRESSES = AddressRules.read([])
    with worker_api(settings):
        enroll(token, "http://gpu-1:8003")
    replica = make_ready()
    version = make_adapter(organization, floor.base_model)
    waiting = [list(route.upstreams) for route in list_routes()], desired_state(replica=replica).adapters
    console = client_for(olga)
    page = console.get(f"/staff/replicas/{replica.pk}").content.decode()

    console.post(f"/staff/replicas/{replica.pk}/accept")

    replica.refresh_from_db()
    replan_around(replica_id=replica.pk)
    assert waiting == ([[], []], ())
    assert "http://gpu-1:8003" in page and "Accept its address" in page
    assert "Accept its address" not in console.get(f"/staff/replicas/{replica.pk}").content.decode()
    assert {upstream.url for route in list_routes() for upstream in route.upstreams} == {"http://gpu-1:8003"}
    assert [one.version_id for one in desired_state(replica=replica).adapters] == [version.pk]
    assert AuditEntry.objects.get(action="replica.accepted").details["url"] == "http://gpu-1:8003"


def test_a_named_address_needs_no_word(settings, token) -> None:
    settings.REPLICA_ADDRESSES = AddressRules.read(["gpu-1"])
    with worker_api(settings):
        enroll(token, "http://gpu-1:8003")

    assert make_ready().is_address_accepted
