"""The worker API answers no caller without a credential, and no worker about another's lease or replica."""

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from django.test import Client
from django.urls import URLPattern, URLResolver, get_resolver

from apps.accounts.models import Organization
from apps.contracts.runs import Failed, LogLine, Manifest
from apps.contracts.serving import ObservedState
from apps.contracts.worker_api import EventsRequest, FinishRequest, HeartbeatRequest, LeaveRequest, UploadRequest
from apps.finetuning.models import Run, RunUpload
from apps.finetuning.runs import claims
from apps.serving.models import Replica
from apps.serving.operations import register_replica
from tests.factories.finetuning import TrainingSetup, make_worker

URLCONF = "apps.config.urls_internal"
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")


def addresses(resolver: URLResolver | None = None, prefix: str = "/") -> Iterator[str]:
    """Yield each address with made-up ids in the places of its parameters."""
    for entry in (resolver or get_resolver(URLCONF)).url_patterns:
        route = prefix + str(entry.pattern)
        if isinstance(entry, URLResolver):
            yield from addresses(entry, route)
        elif isinstance(entry, URLPattern):
            for name in entry.pattern.converters:
                route = route.replace(f"<str:{name}>", "made-up").replace(f"<path:{name}>", "org/a/b")
            assert "<" not in route, f"teach this test the parameter of {route}"
            yield route


@pytest.mark.django_db
@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer annw_made-up"}], ids=["nobody", "wrong credential"])
@pytest.mark.parametrize("path", sorted(addresses()))
def test_an_address_is_closed(path: str, headers: dict[str, str], settings: Any) -> None:
    settings.ROOT_URLCONF = URLCONF
    client = Client()

    for method in METHODS:
        response = client.generic(method, path, b"{}", content_type="application/json", headers=headers)
        assert 400 <= response.status_code < 500, method


# --- one worker's credentials on another's things ---------------------------------------------------------------------

MADE_UP = {"lease": "lease_01m7z0000000000000000000zz", "replica": "rep_01m7z0000000000000000000zz"}
MINE, THEIRS = "annw_mine", "annw_theirs"
UNDER_A_LEASE = {
    "heartbeat": HeartbeatRequest(step=7, phase="training"),
    "events": EventsRequest(events=(LogLine(sequence=1, level="info", message="forged"),)),
    "uploads": UploadRequest(
        manifest=Manifest(kind="adapter", run_id="run_x", attempt=1, step=1, files=()), manifest_sha256="0" * 64
    ),
    "judge": None,
    "member/heartbeat": HeartbeatRequest(),
    "member/leave": LeaveRequest(outcome=Failed(code="out_of_memory", message="forged")),
    "finish": FinishRequest(outcome=Failed(code="out_of_memory", message="forged")),
}


def send(method: str, path: str, secret: str, body: object = None) -> tuple[int, dict[str, Any]]:
    response = Client().generic(
        method, f"/internal/v1/{path}", msgspec.json.encode(body), content_type="application/json",
        headers={"authorization": f"Bearer {secret}"},
    )  # fmt: skip
    return response.status_code, json.loads(response.content or b"{}")


@pytest.mark.slow
@pytest.mark.parametrize("call", sorted(UNDER_A_LEASE))
def test_a_foreign_lease_is_answered_like_one_that_does_not_exist(
    call: str, organization: Organization, settings: Any
) -> None:
    settings.ROOT_URLCONF = URLCONF
    floor = TrainingSetup(organization)
    other = make_worker(floor.pool, credential=THEIRS)
    floor.job(), floor.job()
    mine = claims.claim(worker=floor.worker, base_models=None)
    theirs = claims.claim(worker=other, base_models=None)
    assert mine is not None and theirs is not None
    before = Run.objects.filter(pk=theirs.spec.run_id).values().get()

    for secret in (mine.lease_token, THEIRS, ""):  # a worker's own credential is no lease either
        foreign, unknown = (
            send("POST", f"leases/{lease}/{call}", secret, UNDER_A_LEASE[call])
            for lease in (theirs.lease_id, MADE_UP["lease"])
        )
        assert foreign == unknown
        assert (foreign[0], foreign[1]["error"]["code"]) == (409, "stale_lease")

    assert Run.objects.filter(pk=theirs.spec.run_id).values().get() == before
    assert not RunUpload.objects.exists()
    assert send("POST", f"leases/{theirs.lease_id}/heartbeat", theirs.lease_token, HeartbeatRequest())[0] == 200


@pytest.mark.parametrize(("method", "call"), [("GET", "desired"), ("POST", "observed")])
def test_a_foreign_replica_is_answered_like_one_that_does_not_exist(
    method: str, call: str, organization: Organization, settings: Any
) -> None:
    settings.ROOT_URLCONF = URLCONF
    floor = TrainingSetup(organization)
    make_worker(floor.pool, credential=MINE)
    other = make_worker(floor.pool, credential=THEIRS)
    replica, _ = register_replica(worker_id=other.pk, base_model=floor.base_model, url="unix:///theirs")
    before = Replica.objects.filter(pk=replica.pk).values().get()
    report = ObservedState(
        replica_id=replica.pk, generation=1, engine_generation="forged", is_ready=True, adapters=(), url="unix:///mine"
    )

    foreign, unknown = (
        send(method, f"replicas/{replica_id}/{call}", MINE, report) for replica_id in (replica.pk, MADE_UP["replica"])
    )

    assert foreign == unknown
    assert foreign[0] == 404
    assert Replica.objects.filter(pk=replica.pk).values().get() == before
    assert send(method, f"replicas/{replica.pk}/{call}", THEIRS, report)[0] in (200, 204)
