"""Every operation of the OpenAPI document, with bodies of its types: no fault, and no answer it does not describe.

Half of the calls name what exists. `make fuzz` does the same for an hour, over the network and with inference.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from django.db import transaction
from django.test import Client
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable

from apps.datasets.models import DatasetVersion
from apps.datasets.operations import count_tokens
from tests.guards.makers.tenants import Tenant, World, undone
from tests.guards.urls.pages import PAGES
from tests.guards.urls.parity import LEFT_TO_PEOPLE
from tests.guards.urls.parity import OPERATIONS as CALLS
from tests.guards.world import build_world
from tests.support.api.document import api_document, check_answer
from tests.support.api.operations import ids_of, with_ids

pytestmark = pytest.mark.django_db  # inside the world's transaction
_ADDRESS = "http://testserver"
_CASES = 2  # of each operation, beside its example
_INFERENCE = {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"}  # the gateway's
OPERATIONS = [
    operation
    for operation in (result.ok() for result in schemathesis.openapi.from_dict(api_document()).get_all_operations())
    if operation.path not in _INFERENCE
]


@pytest.fixture(scope="module")
def world(django_db_setup: None, django_db_blocker: Any) -> Iterator[World]:
    with django_db_blocker.unblock(), transaction.atomic():
        built = build_world()
        for version in DatasetVersion.objects.filter(organization=built.acme.organization, status="ready"):
            count_tokens(version=version, base_model=built.installation.base_model)
        yield built
        transaction.set_rollback(True)


def send(client: Client, secret: str, arguments: dict[str, Any]) -> tuple[int, str]:
    """Send what schemathesis would; return the status, and what is wrong with the answer."""
    try:
        arguments = {name: value for name, value in arguments.items() if name != "timeout"}
        prepared = requests.Request(**arguments).prepare()
    except (requests.RequestException, ValueError):
        return 0, ""  # no client can send it, such as a header with a line break
    method, path = str(prepared.method), str(prepared.path_url)
    headers = {name: value for name, value in prepared.headers.items() if name.lower() != "content-type"}
    content_type = prepared.headers.get("Content-Type", "application/octet-stream")
    body = prepared.body.encode() if isinstance(prepared.body, str) else prepared.body or b""
    with undone():
        answer = client.generic(
            method, path, body, content_type=content_type, headers=headers | {"Authorization": f"Bearer {secret}"}
        )
        content = b"".join(answer) if answer.streaming else answer.content
    if answer.status_code >= 500 and answer.status_code != 503:
        return answer.status_code, f"{method} {path} answered {answer.status_code} to {body[:500]!r}"
    try:
        check_answer(method, path, answer.status_code, answer.headers.get("Content-Type", ""), content)
    except AssertionError as wrong:
        return answer.status_code, f"{wrong} for {body[:500]!r}"
    return answer.status_code, ""


def answers_of(operation: Any, tenant: Tenant) -> list[tuple[int, str]]:
    """Call an operation with its example and with drawn cases; each case also with the ids of what exists."""
    raw, client = operation.definition.raw, Client(raise_request_exception=False)
    ids, found = ids_of(raw["operationId"], tenant), list[tuple[int, str]]()

    def call(case: Any) -> None:
        for named in ({}, ids):
            asked = with_ids(case, named).as_transport_kwargs(base_url=_ADDRESS)
            found.append(send(client, tenant.secret, asked))

    draw = settings(
        max_examples=_CASES, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    try:
        draw(given(operation.as_strategy())(call))()
    except Unsatisfiable:
        found.append((0, "schemathesis finds no case for its types"))
    example = next(iter(raw.get("requestBody", {}).get("content", {}).values()), {}).get("example")
    if isinstance(example, dict):
        path = re.sub(r"{(\w+)}", lambda part: ids[part[1]], operation.path)
        sent = example | {name: value for name, value in ids.items() if name in example}
        asked = {"method": operation.method.upper(), "url": f"{_ADDRESS}{path}", "json": sent}
        found.append(send(client, tenant.secret, asked))
    return found


def test_every_action_of_the_dashboard_is_an_operation_or_says_why_not() -> None:
    """An action without a line is one that programs cannot do, by oversight and not by decision."""
    actions = {name.removeprefix("web:") for name, url in PAGES.items() if name[:4] == "web:" and "POST" in url.methods}
    known = {f"{operation.definition.raw['operationId']}" for operation in OPERATIONS}

    assert actions - {*CALLS, *LEFT_TO_PEOPLE} == set(), "add a line to tests/guards/urls/parity.py"
    assert {*CALLS, *LEFT_TO_PEOPLE} - actions == set(), "these lines have no action any more"
    assert set(CALLS) & set(LEFT_TO_PEOPLE) == set()
    assert {name for names in CALLS.values() for name in names.split()} - known == set()


@pytest.mark.slow
def test_no_operation_fails_or_answers_what_its_document_lacks(world: World) -> None:
    """One test of all: the world is made once, and every operation with a finding is shown."""
    answers = {operation.label: answers_of(operation, world.acme) for operation in OPERATIONS}

    wrong = {label: problem for label, found in answers.items() for _, problem in found if problem}
    assert not wrong, json.dumps(wrong, indent=1)
    accepted = [label for label, found in answers.items() if any(200 <= status < 400 for status, _ in found)]
    assert len(answers) > 90
    assert len(accepted) > 70, sorted(answers.keys() - set(accepted))
