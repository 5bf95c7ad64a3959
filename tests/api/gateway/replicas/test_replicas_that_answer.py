"""Where a request goes: aliases, and replicas that fail."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import openai
import pytest
from django.db import transaction

from apps.adapters.models import AdapterVersion
from apps.core.database.clock import db_now
from apps.core.errors import DomainError
from apps.core.ids import new_ulid
from apps.interfaces.gateway.admission.limits import MAX_ENGINE_FAILURES
from apps.interfaces.gateway.engines.meter import Meter
from apps.interfaces.gateway.engines.upstreams import Call, CallProgress, Upstreams
from apps.interfaces.gateway.requests.schema import parse_completion
from apps.serving.aliases import point_alias
from apps.serving.models import Alias
from apps.serving.queries import Route, Upstream
from tests.factories.serving import (
    BASE_MODEL,
    CONTEXT_LENGTH,
    make_adapter,
    make_served_model,
)
from tests.support.gateway.processes import HI, error_of, wait_for_usage, wait_until, wait_until_known
from tests.twins.scripted_engine import TOKEN, Script, ScriptedEngine

pytestmark = pytest.mark.django_db


@pytest.mark.slow
def test_an_alias_answers_by_its_version_and_a_canary_by_its_share(gateway, world):
    tenant = world.acme
    version = AdapterVersion.objects.get(model_name=tenant.model_name)
    alias = point_alias(version=version, name="production", by="system", now=db_now())
    other = make_adapter(tenant.organization, world.base_model)
    http = gateway.http(tenant.key)
    body = {"model": alias.model_name, "messages": HI}

    def answered() -> str:
        return http.post("/v1/chat/completions", json=body).json()["model"]

    assert answered() == version.model_name
    assert gateway.http(world.rival.key).post("/v1/chat/completions", json=body).status_code == 404
    Alias.objects.filter(pk=alias.pk).update(canary_version=other, canary_percent=50)
    wait_until(lambda: answered() == other.model_name, "the canary never answered")
    assert version.model_name in {answered() for _ in range(30)}
    Alias.objects.filter(pk=alias.pk).update(version=other, canary_version=None, canary_percent=0)
    wait_until(lambda: {answered() for _ in range(20)} == {other.model_name}, "the old version answers still")


@pytest.mark.slow
def test_two_tenants_import_the_same_name_and_each_reaches_its_own_model(gateway, world):
    body = {"model": "ft:gpt-4o-mini-2024-07-18:acme:faq:9aBcD1xy", "messages": HI}
    for tenant in (world.acme, world.rival):
        version = AdapterVersion.objects.get(model_name=tenant.model_name)
        point_alias(version=version, name=body["model"], by="system", now=db_now())

    for tenant in (world.acme, world.rival):
        answer = gateway.http(tenant.key).post("/v1/chat/completions", json=body)
        assert answer.json()["model"] == tenant.model_name


def test_a_model_without_a_price_gives_nothing_away(gateway, world, engine):
    make_served_model("unpriced", engine.url, is_priced=False)
    http = gateway.http(world.acme.key)
    body = {"model": "unpriced", "messages": HI}

    answer = wait_until(
        lambda: (found := http.post("/v1/chat/completions", json=body)).status_code == 503 and found, "no 503"
    )

    assert (error_of(answer)["code"], answer.headers["x-should-retry"]) == ("price_not_set", "false")
    assert "price" in error_of(answer)["message"]


@pytest.mark.slow
def test_another_replica_answers_however_many_cannot_be_reached(gateway, world, home, engine):
    make_served_model("alone", *(f"unix://{home}/nobody-{n}.sock" for n in range(3)), engine.url)
    wait_until_known(gateway, world, "alone")

    assert ask_again_and_again(gateway, world, "alone") == {200}


def ask_again_and_again(gateway, world, model: str) -> set[int]:
    """Return the statuses of twelve answers."""
    http = gateway.http(world.acme.key)
    return {http.post("/v1/completions", json={"model": model, "prompt": "Hi"}).status_code for _ in range(12)}


@pytest.mark.parametrize("script", [Script(status=503), Script(finish="abort", tokens=()), Script(fails_after=0)])
def test_no_answer_at_all_is_a_503_that_costs_nothing(gateway, tenant, engine, script):
    engine.scripts["nothing"] = script

    answer = gateway.http(tenant.key).post(
        "/v1/chat/completions",
        json={"model": BASE_MODEL, "messages": [{"role": "user", "content": "nothing"}], "stream": True},
    )

    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    event = wait_for_usage(tenant, 1)[0]
    assert (event.finish, event.input_tokens, event.output_tokens) == ("error", 0, 0)


@pytest.mark.parametrize("ending", [{"fails_after": 2}, {"breaks_after": 2}, {"finish": "abort"}])
def test_a_stream_that_fails_midway_ends_in_an_error_without_done_and_costs_nothing(gateway, tenant, engine, ending):
    engine.scripts["fail"] = Script(delay_seconds=0.02, **ending)
    messages = [{"role": "user", "content": "fail"}]

    with pytest.raises(openai.APIError) as failed:
        list(gateway.openai(tenant.key).chat.completions.create(model=BASE_MODEL, messages=messages, stream=True))
    raw = gateway.http(tenant.key).post(
        "/v1/chat/completions", json={"model": BASE_MODEL, "messages": messages, "stream": True}
    )
    whole = gateway.http(tenant.key).post("/v1/chat/completions", json={"model": BASE_MODEL, "messages": messages})

    assert "vllm" not in failed.value.message
    assert "[DONE]" not in raw.text
    last = json.loads(raw.text.strip().split("\n\n")[-1].removeprefix("data: "))
    assert last["error"]["code"] == "engine_error"
    assert whole.status_code == 503
    assert {(event.finish, event.output_tokens) for event in wait_for_usage(tenant, 3)} == {("error", 0)}


def says(status: int, message: str, code: str = "") -> Script:
    return Script(status=status, error={"message": message, "code": code})


WELL = Script(delay_seconds=0.01)  # token by token: what a failed answer said must not be taken for its words
NOBODYS_FAULT = {
    "busy": says(503, "The replica is busy.", "replica_busy"),
    "down": says(503, "The replica is not ready.", "replica_not_ready"),
    "drifted": says(404, "The model is not served by this replica.", "model_not_found"),
    "dying": says(500, "cannot schedule new futures after shutdown"),
    "dead": says(500, "EngineCore encountered an issue."),
    "aborted": Script(finish="abort", tokens=()),
    "failed": Script(fails_after=0),
    "broken": Script(breaks_after=0),
    "empty": Script(tokens=(), finish=None, has_usage=False),
    "nan": says(400, "Out of range float values are not JSON compliant"),
}
THE_REQUESTS_FAULT = {
    "refused": (says(400, "no"), 400),
    "unprocessable": (says(422, "no"), 400),
    "fatal": (says(500, "KeyError"), 422),
    "halfway": (Script(fails_after=1), 503),
    "cut": (Script(breaks_after=1), 503),
    "given up": (Script(finish="abort"), 503),
    "unsummed": (Script(has_usage=False), 503),
}


@pytest.fixture(scope="module")
def trio(home) -> Iterator[list[ScriptedEngine]]:
    with ExitStack() as running:
        yield [running.enter_context(ScriptedEngine(home / f"trio-{n}.sock").running()) for n in range(3)]


@pytest.fixture(scope="module")
def models(gateway, world, trio) -> dict[str, str]:
    """A model for each fault, on the same three engines: replicas that failed rest."""
    names = {fault: f"trio-{n}" for n, fault in enumerate(NOBODYS_FAULT | THE_REQUESTS_FAULT)}
    with transaction.atomic():
        for name in names.values():
            make_served_model(name, *(engine.url for engine in trio))
    wait_until_known(gateway, world, *names.values())
    return names


def ask_one_of_three(gateway, tenant, model: str, trio, script: Script, *, failing: int) -> tuple[int, int]:
    """Ask a model of three replicas, the first of which fail; return the status and how many were asked."""
    for number, engine in enumerate(trio):
        engine.scripts = {"Hi": script if number < failing else WELL}
        engine.bodies.clear()
    answer = gateway.http(tenant.key).post("/v1/completions", json={"model": model, "prompt": "Hi"})
    return answer.status_code, sum(len(engine.bodies) for engine in trio)


@pytest.mark.parametrize("fault", NOBODYS_FAULT)
def test_what_another_replica_may_do_better_is_tried_on_one_other_and_no_more(gateway, tenant, models, trio, fault):
    """A request that kills its engine must not walk through all of them."""
    model, script = models[fault], NOBODYS_FAULT[fault]

    assert ask_one_of_three(gateway, tenant, model, trio, script, failing=3) == (503, 2)
    assert ask_one_of_three(gateway, tenant, model, trio, script, failing=1)[0] == 200


@pytest.mark.parametrize("fault", THE_REQUESTS_FAULT)
def test_neither_a_bad_request_nor_one_whose_answer_began_is_tried_elsewhere(gateway, tenant, models, trio, fault):
    script, status = THE_REQUESTS_FAULT[fault]

    assert ask_one_of_three(gateway, tenant, models[fault], trio, script, failing=3) == (status, 1)


@pytest.mark.parametrize(
    ("fault", "is_left_alone"), [("dead", True), ("down", True), ("busy", False), ("drifted", False)]
)
def test_a_replica_that_fails_again_and_again_is_left_alone_and_a_busy_one_is_not(
    gateway, world, tenant, trio, fault, is_left_alone
):
    troubled, well, _ = trio
    make_served_model(f"duo-{fault}", troubled.url, well.url)
    wait_until_known(gateway, world, f"duo-{fault}")
    troubled.scripts, well.scripts = {"Hi": NOBODYS_FAULT[fault]}, {}
    troubled.bodies.clear()

    http = gateway.http(tenant.key)
    assert http.post("/v1/completions", json={"model": f"duo-{fault}", "prompt": "Hi"}).status_code == 200
    assert ask_again_and_again(gateway, world, f"duo-{fault}") == {200}

    assert (len(troubled.bodies) < 13) is is_left_alone


def test_requests_that_engines_fail_on_harm_their_organization_alone(gateway, world, tenant, engine):
    engine.scripts["poison"] = says(500, "RecursionError")
    hostile, other = gateway.http(tenant.key), gateway.http(world.rival.key)

    def ask(http, prompt: str) -> httpx.Response:
        return http.post("/v1/completions", json={"model": BASE_MODEL, "prompt": prompt})

    answers = [ask(hostile, "poison") for _ in range(MAX_ENGINE_FAILURES + 5)]

    assert [error_of(answer)["code"] for answer in answers[:2]] == ["request_failed"] * 2
    assert "vllm" not in answers[0].text and "Recursion" not in answers[0].text
    assert {answer.status_code for answer in answers} == {422, 429}
    assert answers[-1].headers["retry-after"]
    assert {ask(other, "Hi").status_code for _ in range(5)} == {200}


@pytest.mark.parametrize("fault", NOBODYS_FAULT | THE_REQUESTS_FAULT)
def test_an_answer_that_failed_holds_neither_a_place_nor_a_connection(home, fault):
    script = NOBODYS_FAULT.get(fault) or THE_REQUESTS_FAULT[fault][0]
    request = parse_completion(b'{"model": "m", "prompt": "Hi"}')

    async def scenario(engine: ScriptedEngine) -> None:
        engine.scripts["Hi"] = script
        route = Route("m", None, "m", "m", "", CONTEXT_LENGTH, (Upstream("rep_1", engine.url, TOKEN),))
        upstreams = Upstreams(places_per_replica=1)
        for _ in range(3):
            call = Call("org_1", "/v1/completions", request, "salt", new_ulid(), Meter(1), CallProgress())
            with pytest.raises(DomainError):
                answer = await upstreams.begin(route, call)
                try:
                    async for _ in answer:
                        pass
                finally:
                    upstreams.end(call, answer)
        assert upstreams.turns.count_open("rep_1") == 0
        async with asyncio.timeout(60):
            while engine.count_connections() > 1:  # one may be kept for the next request
                await asyncio.sleep(0.01)
        upstreams.close()

    with ScriptedEngine(home / "own.sock").running() as own:
        asyncio.run(scenario(own))


@pytest.mark.parametrize("fault", ["a bad request", "full"])
def test_a_refused_request_does_not_end_a_row_of_failures(home, fault):
    refused = Script(status=400, error={"message": "no", "code": 400})
    busy = Script(status=503, error={"message": "full", "code": "replica_busy"})
    request = parse_completion(b'{"model": "m", "prompt": "Hi"}')
    broken = Script(breaks_after=0)

    async def ask(upstreams: Upstreams, tenant: str, script: Script) -> None:
        engine.scripts["Hi"] = script
        route = Route("m", None, "m", "m", "", CONTEXT_LENGTH, (Upstream("rep_1", engine.url, TOKEN),))
        call = Call(tenant, "/v1/completions", request, "salt", new_ulid(), Meter(1), CallProgress())
        with pytest.raises(DomainError):
            await upstreams.begin(route, call)

    async def scenario() -> None:
        upstreams = Upstreams(places_per_replica=1)
        for tenant in ("org_1", "org_2", "org_1", "org_2"):
            await ask(upstreams, tenant, broken)
        await ask(upstreams, "org_1", busy if fault == "full" else refused)
        await ask(upstreams, "org_1", broken)
        asked = len(engine.bodies)
        await ask(upstreams, "org_2", broken)
        assert len(engine.bodies) == asked == 6
        upstreams.close()

    with ScriptedEngine(home / "own.sock").running() as engine:
        asyncio.run(scenario())


def test_a_request_counts_as_sent_if_any_replica_may_have_worked_on_it(home):
    request = parse_completion(b'{"model": "m", "prompt": "Hi"}')
    breaks, busy = Script(breaks_after=0), Script(status=503, error={"message": "full", "code": "replica_busy"})

    async def sent(*scripts: Script) -> bool:
        for engine, script in zip(engines, scripts, strict=False):
            engine.scripts["Hi"] = script
        upstreams = Upstreams(places_per_replica=1)
        replicas = tuple(Upstream(f"rep_{n}", engine.url, TOKEN) for n, engine in enumerate(engines))
        route = Route("m", None, "m", "m", "", CONTEXT_LENGTH, replicas[: len(scripts)])
        call = Call("org_1", "/v1/completions", request, "salt", new_ulid(), Meter(1), CallProgress())
        with pytest.raises(DomainError):
            await upstreams.begin(route, call)
        upstreams.close()
        return call.progress.is_sent

    with ScriptedEngine(home / "one.sock").running() as one, ScriptedEngine(home / "two.sock").running() as two:
        engines = (one, two)
        assert asyncio.run(sent(breaks, busy))
        assert not asyncio.run(sent(busy))
