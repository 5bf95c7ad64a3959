"""What a stranger or a hostile tenant may cost the others: refused late, and read no further than needed."""

import json
import select
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from django.db import transaction

from apps.accounts.login.api_keys import LIVE_PREFIX, new_secret
from apps.core.database.clock import db_now
from apps.core.http.fair_shares import LateRefusals
from apps.finetuning.usage.quotas import set_quota
from apps.interfaces.gateway.http.bodies import MAX_OF_ONE
from tests.factories.serving import BASE_MODEL, make_tenant
from tests.support.gateway.processes import HI, error_of, running_gateway, wait_until
from tests.twins.scripted_engine import Script

pytestmark = pytest.mark.django_db

PATH = "/v1/chat/completions"


@pytest.mark.slow
def test_wrong_keys_of_one_address_are_refused_late_and_those_of_others_are_not(gateway, world):
    http = gateway.http()

    def seconds_to_refuse(address: str) -> float:
        headers = {"authorization": f"Bearer {new_secret(LIVE_PREFIX)}", "x-forwarded-for": address}
        began = time.monotonic()
        answer = http.post(PATH, json={"model": BASE_MODEL, "messages": HI}, headers=headers)
        assert answer.status_code in (401, 429)
        return time.monotonic() - began

    with ThreadPoolExecutor(8) as lanes:
        took = list(lanes.map(seconds_to_refuse, ["192.0.2.1"] * (LateRefusals.PROMPT_PER_MINUTE + 8)))

    assert max(took) >= LateRefusals.HOLD_SECONDS
    others = [seconds_to_refuse(f"192.0.2.{number}") for number in range(2, 7)]
    assert min(others) < LateRefusals.HOLD_SECONDS  # each of them waits for the machine now and then


@pytest.mark.slow
def test_a_body_that_is_too_large_counts_by_the_length_that_it_states(gateway, world):
    tenant = make_tenant("Large", world.base_model)
    with transaction.atomic():
        set_quota(organization=tenant.organization, by="system", now=db_now(), tokens_per_minute=120_000)

    answers = [gateway.http(tenant.key).post(PATH, content=b"x" * 2**20) for _ in range(2)]

    left = [int(answer.headers["x-ratelimit-remaining-tokens"]) for answer in answers]
    assert [answer.status_code for answer in answers] == [413, 413]
    assert {answer.headers["connection"] for answer in answers} == {"close"}
    assert left[0] - left[1] > 25_000


def test_a_tenant_that_leaves_before_the_first_token_again_and_again_is_refused(gateway, world, engine):
    """Engines read such prompts for nothing."""
    tenant = make_tenant("Leaver", world.base_model)
    text = "in vain " + "x" * 120_000
    engine.scripts[text] = Script(delay_seconds=30)
    http = gateway.http(tenant.key)
    ask = {"model": BASE_MODEL, "messages": HI}

    assert http.post(PATH, json=ask).status_code == 200
    for _ in range(4):
        asked = len(engine.bodies)
        with gateway.left(tenant.key, "/v1/completions", {"model": BASE_MODEL, "prompt": text}):
            wait_until(lambda asked=asked: len(engine.bodies) > asked, "the engine was not asked")

    answer = wait_until(lambda: (found := http.post(PATH, json=ask)).status_code == 429 and found, "not refused")
    assert "given up before their first token" in error_of(answer)["message"]


def test_a_tenant_with_many_choices_leaves_places_to_others_and_its_next_request_waits(gateway, world, engine):
    """A place of a replica is one of a choice: 224 of the 256 for one tenant."""
    greedy = make_tenant("Greedy", world.base_model)
    text = [{"role": "user", "content": "crowd"}]
    engine.scripts["crowd"] = Script(tokens=("x",) * 60, delay_seconds=1)
    ask = {"model": BASE_MODEL, "messages": text, "n": 128, "max_tokens": 60, "stream": True}

    def asked() -> int:
        return sum(body.get("messages") == text for body in engine.bodies)

    with gateway.left(greedy.key, PATH, ask):
        wait_until(lambda: asked() == 1, "the engine was not asked")
        with gateway.left(greedy.key, PATH, ask), gateway.http(world.rival.key) as other:
            for _ in range(3):
                answer = other.post(PATH, json={"model": BASE_MODEL, "messages": HI, "n": 20})
                assert answer.status_code == 200 and len(answer.json()["choices"]) == 20
            assert asked() == 1
    with gateway.left(greedy.key, PATH, ask):
        wait_until(lambda: asked() == 2, "places of customers who left are lost")


@pytest.mark.slow
def test_more_choices_than_a_replica_has_places_for_are_refused_before_they_cost_anything(world, home, tmp_path):
    tenant = make_tenant("Wide", world.base_model)
    with running_gateway(tmp_path, engines=home, variables={"ANNEAL_REPLICA_PLACES": "16"}) as small:
        http = small.http(tenant.key)
        fits, refused = (http.post(PATH, json={"model": BASE_MODEL, "messages": HI, "n": n}) for n in (14, 15))

    assert (fits.status_code, refused.status_code) == (200, 400)
    error = error_of(refused)
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", "n", "invalid_value")
    assert "at most 14" in error["message"]


def test_the_bodies_of_open_requests_are_bounded(gateway, world, engine):
    tenant = make_tenant("Holder", world.base_model)
    none = {"requests_per_minute": None, "tokens_per_minute": None, "concurrent_requests": None}
    with transaction.atomic():
        set_quota(organization=tenant.organization, by="system", now=db_now(), **none)
    text = "held " + "x" * 250_000
    engine.scripts[text] = Script(delay_seconds=60)
    body = json.dumps({"model": BASE_MODEL, "prompt": text}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {tenant.key.secret}\r\n"

    with ExitStack() as stack:
        asking = []
        for _ in range(MAX_OF_ONE // len(body) + 1):
            connection = stack.enter_context(socket.socket(socket.AF_UNIX))
            connection.connect(str(gateway.socket))
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            asking.append(connection)
        [refused] = select.select(asking, [], [], 60)[0]
        assert b"MiB of bodies" in refused.recv(10_000)
