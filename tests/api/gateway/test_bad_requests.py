"""Bad requests to the gateway: each is refused by name, with what to send in its place, and the engine sees none."""

import json

import pytest

from tests.support.bad_requests import GATEWAY, filled, problems

pytestmark = pytest.mark.django_db


def test_every_bad_request_is_refused_by_name_with_what_to_do(gateway, world, engine) -> None:
    """One test of all: every case that fails is shown."""
    engine.bodies.clear()
    http, wrong = gateway.http(world.acme.key), []
    for case in GATEWAY:
        body = filled(case.body, {"MODEL": world.acme.model_name})
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = http.post(case.path, content=content, headers={"content-type": case.content_type})
        is_json = answer.headers["content-type"].startswith("application/json")
        shown = answer.json() if is_json else answer.text[:200]
        wrong += [f"{case}\n    {problem}" for problem in problems(case, answer.status_code, shown)]

    assert len(GATEWAY) >= 40
    assert not wrong, f"{len(wrong)} of {len(GATEWAY)}:\n" + "\n".join(wrong)
    assert not engine.bodies
