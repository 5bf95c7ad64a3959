from collections.abc import Callable

import httpx
import msgspec
import pytest

from apps.contracts.runs import LogLine
from apps.contracts.worker_api import ClaimRequest, ConversionReport, HeartbeatRequest, HeartbeatResponse
from gpu_workers.common import api_client
from gpu_workers.common.api_client import ApiClient, ApiError, Lease, StaleLease, Unauthorized, Unavailable

LEASE = Lease(id="lease_1", token="secret")


def make_client(answer: Callable[[httpx.Request], httpx.Response], slept: list[float] | None = None) -> ApiClient:
    sleep = (slept if slept is not None else []).append
    return ApiClient("http://internal", credential="annw", sleep=sleep, transport=httpx.MockTransport(answer))


def refusal(status: int, code: str) -> httpx.Response:
    return httpx.Response(status, json={"error": {"code": code, "message": "No."}})


def test_the_worker_credential_opens_claims_and_the_lease_token_its_lease():
    seen = {}

    def answer(request: httpx.Request) -> httpx.Response:
        seen[request.url.path] = request.headers["Authorization"]
        if request.url.path.endswith("claim"):
            return httpx.Response(204)
        return httpx.Response(200, content=msgspec.json.encode(HeartbeatResponse(lease_seconds=60)))

    client = make_client(answer)

    assert client.claim(ClaimRequest()) is None
    assert client.heartbeat(LEASE, HeartbeatRequest()).lease_seconds == 60
    assert seen == {
        "/internal/v1/claim": "Bearer annw",
        "/internal/v1/leases/lease_1/heartbeat": "Bearer secret",
    }


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (refusal(409, "stale_lease"), StaleLease),
        (refusal(401, "invalid_credential"), Unauthorized),
        (refusal(403, "forbidden"), Unauthorized),
        (refusal(400, "upload_incomplete"), ApiError),
        (httpx.Response(200, content=b"<html>"), ApiError),
    ],
)
def test_a_refusal_is_told_at_once_with_its_code(answer, error):
    slept: list[float] = []
    client = make_client(lambda request: answer, slept)

    with pytest.raises(error):
        client.report_events(LEASE, (LogLine(sequence=1, level="info", message="hi"),), patience_seconds=60)

    assert slept == []


@pytest.mark.parametrize("trouble", [httpx.Response(503), httpx.Response(429), httpx.ConnectError("refused")])
def test_trouble_on_the_way_is_tried_again_with_longer_pauses(trouble):
    slept: list[float] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if len(slept) == 3:
            return httpx.Response(204)
        if isinstance(trouble, Exception):
            raise trouble
        return trouble

    assert make_client(answer, slept).claim(ClaimRequest()) is None
    assert slept == sorted(slept)


def test_patience_begins_anew_while_the_control_plane_reads_what_was_delivered(monkeypatch):
    slept: list[float] = []

    def answer(request: httpx.Request) -> httpx.Response:
        return refusal(503, "files_unread") if len(slept) < 30 else httpx.Response(204)

    make_client(answer, slept).finish_conversion("conv_1", ConversionReport(manifest_sha256="a" * 64))
    assert len(slept) == 30

    monkeypatch.setattr(api_client, "_READING_SECONDS", 0)
    with pytest.raises(Unavailable):
        make_client(lambda request: refusal(503, "files_unread")).finish_conversion("conv_1", ConversionReport())


def test_a_heartbeat_is_tried_once():
    calls = []

    def answer(request: httpx.Request) -> httpx.Response:
        calls.append(request)
        return httpx.Response(503)

    with pytest.raises(Unavailable):
        make_client(answer).heartbeat(LEASE, HeartbeatRequest())

    assert len(calls) == 1


def test_no_secret_is_in_the_message_of_a_failure():
    with pytest.raises(Unavailable) as failure:
        make_client(lambda request: httpx.Response(503)).heartbeat(LEASE, HeartbeatRequest())

    assert "secret" not in str(failure.value)
