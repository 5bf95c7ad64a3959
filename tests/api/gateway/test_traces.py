"""The trace of a request: from the gateway to the engine, without what was asked and answered."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
from django.db import transaction

from apps.serving.models import LoadedAdapter
from tests.factories.serving import make_adapter
from tests.services.collector import Collector, running_collector
from tests.support.gateway.processes import HI, GatewayProcess, running_gateway
from tests.twins.scripted_engine import TOKEN, Script

pytestmark = pytest.mark.django_db
PROMPT = "my secret plan for Tuesday"
ANSWER = ("purple", " elephant")
SENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with running_collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def traced(world, home, tmp_path_factory, collector) -> Iterator[GatewayProcess]:
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_EXPORTER_OTLP_HEADERS": "x-scope=traces"}
    with running_gateway(tmp_path_factory.mktemp("traced"), engines=home, variables=variables) as gateway:
        yield gateway


def ask(traced: GatewayProcess, tenant, path: str = "/v1/chat/completions", **fields: object):
    asked = {"prompt": PROMPT} if path == "/v1/completions" else {"messages": [{"role": "user", "content": PROMPT}]}
    body = {"model": tenant.model_name, "max_tokens": 50} | asked | fields
    return traced.http(tenant.key).post(path, json=body, headers={"traceparent": SENT, "tracestate": "x=1"})


def passed_on(engine) -> dict[str, str]:
    return {name.lower(): value for name, value in engine.headers[-1].items()}


@pytest.mark.slow
def test_a_request_has_one_trace_that_the_engine_continues(traced, collector, engine, tenant) -> None:
    engine.scripts[PROMPT] = Script(tokens=ANSWER, prompt_tokens=7, cached_tokens=3)

    ask(traced, tenant)  # the gateway learns that this model exists
    answer = ask(traced, tenant)

    assert answer.status_code == 200
    request = collector.wait_for_request(answer.headers["x-request-id"])
    [call] = [span for span in collector.of_trace(request.trace_id) if span.kind == "CLIENT"]
    assert (request.service, request.kind, request.parent_id) == ("anneal-gateway", "SERVER", "")
    assert request.attributes["http.response.status_code"] == 200
    assert request.attributes["anneal.organization.id"] == tenant.organization.pk
    assert request.attributes["anneal.request.id"] == answer.headers["x-request-id"]
    assert call.name == f"chat {tenant.model_name}" and call.parent_id == request.id
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": tenant.model_name,
        "gen_ai.request.max_tokens": 50,
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.cache_read.input_tokens": 3,
        "gen_ai.usage.output_tokens": 2,
    }
    assert call.attributes.items() >= expected.items()
    [(event, at_ns, _)] = call.events
    assert event == "gen_ai.first_token" and call.started_ns <= at_ns <= call.ended_ns <= request.ended_ns
    phases = sorted(collector.of_trace(request.trace_id), key=lambda span: span.started_ns)
    assert [span.name for span in phases if span.kind == "INTERNAL"] == ["admission", "wait for place"]
    assert {span.parent_id for span in phases if span is not request} == {"", request.id}
    headers = passed_on(engine)
    assert headers["traceparent"] == call.traceparent and "tracestate" not in headers


@pytest.mark.slow
def test_the_wait_for_a_replica_is_a_phase(traced, collector, world, tenant) -> None:
    with transaction.atomic():  # no moment in which it is loaded
        version = make_adapter(tenant.organization, world.base_model)
        loading = LoadedAdapter.objects.filter(adapter_version=version)
        loading.update(state="loading")
    earlier = {span.trace_id for span in collector.spans}

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, traced, tenant, model=version.model_name)
        collector.wait_for(lambda span: span.name == "admission" and span.trace_id not in earlier)  # it waits by now
        loading.update(state="loaded")
        answer = asked.result()

    request = collector.wait_for_request(answer.headers["x-request-id"])
    phases = sorted(collector.of_trace(request.trace_id), key=lambda span: span.started_ns)
    assert [span.name for span in phases if span.kind == "INTERNAL"] == [
        "admission", "wait for replica", "admission", "wait for place",
    ]  # fmt: skip
    assert all(earlier.ended_ns <= later.started_ns for earlier, later in pairwise(phases[1:]))


@pytest.mark.slow
def test_a_clients_own_trace_is_linked_and_never_joined(traced, collector, tenant) -> None:
    answer = ask(traced, tenant)

    request = collector.wait_for_request(answer.headers["x-request-id"])
    _, trace_id, span_id, _ = SENT.split("-")
    assert request.links == [(trace_id, span_id)]
    assert collector.of_trace(trace_id) == []


@pytest.mark.slow
@pytest.mark.parametrize("sent", ["", "00-" + "0" * 32 + "-" + "1" * 16 + "-01", "x" * 5_000, SENT + "-more"])
def test_a_malformed_context_is_ignored(sent, traced, collector, tenant) -> None:
    http = traced.http(tenant.key)

    answer = http.post("/v1/completions", json={"model": "unknown", "prompt": "x"}, headers={"traceparent": sent})

    assert answer.status_code == 404
    request = collector.wait_for_request(answer.headers["x-request-id"])
    assert (request.links, request.is_failed) == ([], False)
    assert request.attributes["error.type"] == "model_not_found"
    assert request.attributes["http.response.status_code"] == 404


@pytest.mark.slow
def test_a_stream_is_traced_to_its_end(traced, collector, engine, tenant) -> None:
    engine.scripts["slowly"] = Script(tokens=("a", "b", "c"), delay_seconds=0.2, is_paced=True)

    answer = ask(traced, tenant, "/v1/completions", prompt="slowly", stream=True)

    request = collector.wait_for_request(answer.headers["x-request-id"])
    [call] = [span for span in collector.of_trace(request.trace_id) if span.kind == "CLIENT"]
    assert call.name == f"text_completion {tenant.model_name}"
    [(_, first_ns, _)] = call.events
    assert call.ended_ns - first_ns > 50_000_000
    assert call.attributes["gen_ai.usage.output_tokens"] == 3


def test_an_engine_that_fails_is_seen_in_its_span(traced, collector, engine, tenant) -> None:
    engine.scripts["fails"] = Script(tokens=ANSWER, fails_after=1)

    answer = ask(traced, tenant, messages=[{"role": "user", "content": "fails"}])

    request = collector.wait_for_request(answer.headers["x-request-id"])
    [call] = [span for span in collector.of_trace(request.trace_id) if span.kind == "CLIENT"]
    assert answer.status_code == request.attributes["http.response.status_code"] >= 500
    assert request.is_failed and call.is_failed and call.attributes["error.type"] == request.attributes["error.type"]


@pytest.mark.slow
def test_nothing_that_is_sent_holds_a_prompt_an_answer_or_a_key(traced, collector, engine, tenant) -> None:
    engine.scripts[PROMPT] = Script(tokens=ANSWER)
    for stream in (True, False):
        answer = ask(traced, tenant, stream=stream, user="someone")
        collector.wait_for_request(answer.headers["x-request-id"])

    sent = b"".join(collector.bodies)
    for secret in (PROMPT, *ANSWER, tenant.key.secret, tenant.key.secret[-12:], TOKEN, os.environ["ANNEAL_KEY_PEPPER"]):
        assert secret.encode() not in sent
    assert {headers["x-scope"] for headers in collector.headers} == {"traces"}


@pytest.mark.slow
def test_a_gateway_without_a_collector_sends_no_context_on(gateway, engine, tenant) -> None:
    body = {"model": tenant.model_name, "messages": HI}
    gateway.http(tenant.key).post("/v1/chat/completions", json=body, headers={"traceparent": SENT})

    assert "traceparent" not in passed_on(engine)
