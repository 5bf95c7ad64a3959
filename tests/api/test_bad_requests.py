"""Bad requests to the public API: each is refused by name, with what to send instead, in the client's own words."""

import json
from typing import Any

import pytest
from django.test import Client

from tests.factories.accounts import make_key
from tests.support.api.bad_requests import Case, filled, problems
from tests.support.api.bad_requests.cases import API
from tests.support.api.bad_requests.jobs import FOR_JOBS
from tests.support.api.bad_requests.kept import KEPT

ALL = (*API, *FOR_JOBS, *KEPT)


@pytest.fixture
def ids(floor, file_id) -> dict[str, str]:
    return {"FILE": file_id, "JOB": floor.job().pk}


def send(case: Case, ids: dict[str, str], secret: str) -> Any:
    body = filled(case.body, ids)
    content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body)
    client = Client(raise_request_exception=False, headers={"Authorization": f"Bearer {secret}"})
    return client.generic(
        case.method, filled(case.path, ids), content, content_type=case.content_type, headers=case.headers
    )


@pytest.mark.slow
def test_every_bad_request_is_refused_by_name_with_what_to_do(key, ids) -> None:
    """One test of all: the world is made once, and every case that fails is shown."""
    wrong = []
    for case in ALL:
        answer = send(case, ids, key.secret)
        is_json = answer.headers["content-type"].startswith("application/json")
        body = answer.json() if is_json else answer.content[:200]
        wrong += [f"{case}\n    {problem}" for problem in problems(case, answer.status_code, body)]

    assert not wrong, f"{len(wrong)} of {len(ALL)}:\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"hyperparameters": {"n_epochs": "3"}}, "Use 'auto' or a number."),
        ({"method": {"type": "reinforcement", "reinforcement": {}}}, "is not offered here"),
        ({"method": {"type": "sft", "supervised": {}}}, "is not offered here: use supervised"),
    ],
)
def test_a_message_names_what_is_taken(key, ids, body, told) -> None:
    job = {"model": "anneal-demo", "training_file": "FILE"} | body

    assert told in send(Case("/v1/fine_tuning/jobs", job), ids, key.secret).json()["error"]["message"]


def test_methods_that_the_gateway_answers_are_among_the_allowed(key) -> None:
    answer = send(Case("/v1/chat/completions", method="PUT"), {}, key.secret)

    assert answer.headers["Allow"] == "GET, HEAD, POST"


@pytest.mark.parametrize(("method", "path"), [("get", "/v1/models"), ("post", "/v1/uploads"), ("get", "/v1/files")])
def test_a_missing_scope_is_named_as_it_is_written(organization, alice, client, method: str, path: str) -> None:
    narrow = make_key(organization, alice, scopes=frozenset({"inference"}))
    answer = getattr(client, method)(path, headers={"Authorization": f"Bearer {narrow.secret}"})

    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (403, "insufficient_permissions")
    assert f"the scope '{error['required_scope']}'" in error["message"] and "<" not in error["message"]


def test_a_client_without_v1_is_told_the_base_url(client, settings) -> None:
    for path in (
        *("/chat/completions", "/files", "/models", "/v1", "/containers", "/conversations", "/engines", "/realtime"),
        *("/videos/x", "/skills", "/webhook_endpoints"),
    ):
        message = client.get(path).json()["error"]["message"]
        assert f"{settings.PUBLIC_URL}/v1" in message and path in message
    for path in ("/organization/costs", "/nowhere/at/all"):
        answer = client.post(path, headers={"Authorization": "Bearer sk-any"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url")
        assert f"{settings.PUBLIC_URL}/v1" in answer.json()["error"]["message"]
    assert "twice" in client.get("/v1/v1/models").json()["error"]["message"]
    assert client.get("/jobs").status_code == 302  # a page, not a program's address
