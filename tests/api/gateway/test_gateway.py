"""What customers of the gateway see and pay: a real gateway process under its own role, before a scripted engine."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic, sleep

import httpx
import openai
import pytest
from django.db import transaction

from apps.accounts.operations import issue_member_token, revoke_key
from apps.accounts.queries import KeyLimits
from apps.adapters.models import AdapterVersion
from apps.billing.models import Hold
from apps.billing.queries import get_balance, get_ledger_sum_nano, get_spending
from apps.billing.usage import rate_usage
from apps.contracts.evaluation import Grader, GraderKind
from apps.contracts.worker_api import JudgeAccess
from apps.core.clock import db_now
from apps.core.money import rated
from apps.finetuning.quotas import set_quota
from apps.gateway.keys import FRESH_SECONDS
from apps.gateway.routes import LONGEST_LOAD_SECONDS, REFRESH_SECONDS
from apps.serving.aliases import point_alias
from apps.serving.models import Alias, Deployment, LoadedAdapter
from apps.serving.operations import desired_state
from gpu_workers.train.judging import Judge, Question
from tests.api.gateway.process import (
    BASE_MODEL,
    INPUT_NANO,
    OUTPUT_NANO,
    PER,
    USD,
    Tenant,
    make_adapter,
    make_served_model,
    make_tenant,
    usage_of,
    wait_for_usage,
    wait_until,
)
from tests.api.gateway.scripted_engine import Script
from tests.factories.accounts import make_key

HI = [{"role": "user", "content": "Hi"}]


pytestmark = pytest.mark.django_db


@pytest.fixture
def tenant(world, gateway) -> Tenant:
    """A customer with credit whom no other test charges."""
    return make_tenant("Northline", world.base_model)


def error_of(response) -> dict:
    return response.json()["error"]


# --- Answers ----------------------------------------------------------------------------------------------------------


def test_a_chat_answer_is_whole_public_and_metered(gateway, tenant, engine):
    engine.scripts["cached"] = Script(prompt_tokens=12, cached_tokens=8)

    answer = gateway.openai(tenant.key).chat.completions.create(
        model=BASE_MODEL, messages=[{"role": "user", "content": "cached"}]
    )

    assert answer.choices[0].message.content == "Hello there."
    assert (answer.choices[0].finish_reason, answer.choices[0].message.role) == ("stop", "assistant")
    assert (answer.model, answer.object) == (BASE_MODEL, "chat.completion")
    assert answer.id.startswith("chatcmpl-") and "engine" not in answer.id
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (12, 3, 15)
    assert answer.usage.prompt_tokens_details.cached_tokens == 8
    event = wait_for_usage(tenant, 1)[0]
    assert (event.input_tokens, event.cached_input_tokens, event.output_tokens, event.finish) == (12, 8, 3, "stop")
    assert (event.model_name, event.key_id) == (BASE_MODEL, tenant.key.key.pk)


def test_what_the_engine_counted_is_kept_with_the_replica_beside_what_is_paid(gateway, world, tenant, engine):
    engine.scripts["counted"] = Script(prompt_tokens=12)
    engine.scripts["fails"] = Script(prompt_tokens=12, fails_after=2)

    gateway.openai(tenant.key).completions.create(model=BASE_MODEL, prompt="counted", n=2)
    gateway.http(tenant.key).post("/v1/completions", json={"model": BASE_MODEL, "prompt": "fails"})

    events = sorted(wait_for_usage(tenant, 2), key=lambda event: event.finish, reverse=True)  # "stop", "error"
    assert {event.replica_id for event in events} == {world.base_model.replicas.get().pk}
    paid = [(event.input_tokens, event.output_tokens) for event in events]
    assert (paid, [(e.engine_input_tokens, e.engine_output_tokens) for e in events]) == (
        [(12, 6), (0, 0)],
        [(24, 6), (12, 2)],
    )


def test_an_adapter_is_metered_under_its_own_name_at_the_price_of_its_base(gateway, world):
    gateway.openai(world.acme.key).chat.completions.create(model=world.acme.model_name, messages=HI)

    events = wait_until(lambda: [e for e in usage_of(world.acme) if e.model_name == world.acme.model_name], "none")
    assert events[0].adapter_version_id.startswith("adpv_")
    assert events[0].output_price.sku == f"inference:output:{BASE_MODEL}"


def test_a_stream_shows_tokens_and_no_usage_unless_asked(gateway, tenant):
    stream = gateway.openai(tenant.key).chat.completions.create(model=BASE_MODEL, messages=HI, stream=True)

    chunks = list(stream)

    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello there."
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert {(chunk.model, chunk.usage, len(chunk.choices)) for chunk in chunks} == {(BASE_MODEL, None, 1)}
    assert "engine" not in chunks[0].id


def test_usage_comes_last_in_a_stream_that_asks_for_it(gateway, tenant):
    stream = gateway.openai(tenant.key).chat.completions.create(
        model=BASE_MODEL, messages=HI, stream=True, stream_options={"include_usage": True}
    )

    *chunks, last = stream

    assert all(chunk.usage is None and "usage" in chunk.model_fields_set for chunk in chunks)
    assert last.choices == []
    assert last.usage.completion_tokens == 3


def test_completions_are_answered_plain_and_streamed(gateway, tenant):
    client = gateway.openai(tenant.key)

    whole = client.completions.create(model=BASE_MODEL, prompt=["Hi", "Hi"], logprobs=1)
    parts = list(client.completions.create(model=BASE_MODEL, prompt="Hi", stream=True))

    assert [choice.text for choice in whole.choices] == ["Hello there."] * 2
    assert whole.choices[0].logprobs.tokens == ["Hello", " there", "."]
    assert (whole.object, whole.usage.completion_tokens) == ("text_completion", 6)
    assert "".join(part.choices[0].text for part in parts) == "Hello there."


def test_several_choices_are_put_together_and_their_prompt_is_paid_once(gateway, tenant, engine):
    engine.scripts["twice"] = Script(prompt_tokens=9)

    answer = gateway.openai(tenant.key).chat.completions.create(
        model=BASE_MODEL, messages=[{"role": "user", "content": "twice"}], n=2, logprobs=True
    )

    assert [choice.message.content for choice in answer.choices] == ["Hello there."] * 2
    assert [entry.token for entry in answer.choices[1].logprobs.content] == ["Hello", " there", "."]
    event = wait_for_usage(tenant, 1)[0]
    assert (event.input_tokens, event.output_tokens) == (9, 6)


def test_the_engine_gets_its_own_name_a_salt_and_nothing_it_need_not_know(gateway, world, engine):
    fields = {
        "user": "u", "store": False, "metadata": {"a": "b"}, "service_tier": "auto", "safety_identifier": "s",
        "prompt_cache_key": "k", "reasoning_effort": "low", "verbosity": "low", "temperature": 0.5, "max_tokens": 9,
    }  # fmt: skip
    for tenant in (world.acme, world.rival):
        gateway.http(tenant.key).post(
            "/v1/chat/completions", json=fields | {"model": tenant.model_name, "messages": HI},
            headers={"X-Vllm-Priority": "-5", "X-Session-ID": "s"},
        ).raise_for_status()  # fmt: skip

    acme, rival = engine.bodies[-2:]
    assert set(acme) == {"model", "messages", "temperature", "max_tokens", "cache_salt", "stream", "stream_options"}
    assert (acme["model"], rival["model"]) == (world.acme.lora_name, world.rival.lora_name)
    assert acme["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert len(acme["cache_salt"]) == 64
    assert acme["cache_salt"] != rival["cache_salt"]
    assert not {name.lower() for name in engine.headers[-1]} & {"x-vllm-priority", "x-session-id"}


@pytest.mark.parametrize(
    "name",
    ["chat_template", "chat_template_kwargs", "cache_salt", "priority", "ignore_eos", "prompt_logprobs", "vllm_xargs",
     "kv_transfer_params", "request_id", "guided_json", "structured_outputs", "echo", "nonsense"],
)  # fmt: skip
def test_an_unknown_or_engine_private_field_is_refused_by_name(gateway, world, name, engine):
    asked = len(engine.bodies)

    answer = gateway.http(world.acme.key).post(
        "/v1/chat/completions", json={"model": BASE_MODEL, "messages": HI, name: {"a": 1}}
    )

    assert (answer.status_code, error_of(answer)["code"], error_of(answer)["param"]) == (400, "unknown_parameter", name)
    assert name in error_of(answer)["message"]
    assert len(engine.bodies) == asked


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize("is_streamed", [True, False])
def test_calls_of_tools_reach_the_customer_whole(gateway, tenant, engine, is_streamed):
    engine.scripts["sunny?"] = Script(calls=(("call_1", "weather", ('{"place":', '"Oslo"}')),), finish="tool_calls")
    client = gateway.openai(tenant.key)
    asked = {"model": BASE_MODEL, "messages": [{"role": "user", "content": "sunny?"}], "tools": [WEATHER]}

    if is_streamed:
        chunks = list(client.chat.completions.create(**asked, stream=True))
        parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or ()]
        seen = (parts[0].id, parts[0].function.name, "".join(part.function.arguments or "" for part in parts))
        finish = chunks[-1].choices[0].finish_reason
    else:
        choice = client.chat.completions.create(**asked).choices[0]
        (call,) = choice.message.tool_calls
        seen, finish = (call.id, call.function.name, call.function.arguments), choice.finish_reason

    assert seen == ("call_1", "weather", '{"place":"Oslo"}')
    assert finish == "tool_calls"
    assert engine.bodies[-1]["tools"] == [WEATHER]


def test_the_answers_of_tools_reach_the_engine(gateway, tenant, engine):
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages = [
        *HI,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]

    gateway.openai(tenant.key).chat.completions.create(model=BASE_MODEL, messages=messages, tools=[WEATHER])

    assert engine.bodies[-1]["messages"][1:] == [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "tool_call_id": "call_1"},
    ]


def test_text_parts_reach_the_engine_as_one_text(gateway, tenant, engine):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]

    gateway.openai(tenant.key).chat.completions.create(model=BASE_MODEL, messages=[{"role": "user", "content": parts}])

    assert engine.bodies[-1]["messages"] == [{"role": "user", "content": "one\ntwo"}]


def test_every_answer_carries_a_request_id_and_keeps_the_callers(gateway, tenant):
    http = gateway.http(tenant.key)
    body = {"model": BASE_MODEL, "messages": HI}

    own = http.post("/v1/chat/completions", json=body)
    kept = http.post("/v1/chat/completions", json=body, headers={"x-request-id": "caller-12345"})
    refused = http.post("/v1/chat/completions", json={})

    assert own.headers["x-request-id"].startswith("req_")
    assert kept.headers["x-request-id"] == "caller-12345"
    assert refused.headers["x-request-id"].startswith("req_")


# --- Responses --------------------------------------------------------------------------------------------------------


def test_a_response_is_a_chat_without_memory(gateway, tenant, engine):
    answer = gateway.openai(tenant.key).responses.create(
        model=BASE_MODEL, input="Hi", instructions="Be brief.", store=False, max_output_tokens=9, metadata={"a": "b"}
    )

    assert (answer.output_text, answer.status, answer.model) == ("Hello there.", "completed", BASE_MODEL)
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (11, 3, 14)
    assert (answer.id[:5], answer.metadata, answer.store) == ("resp_", {"a": "b"}, False)
    assert engine.bodies[-1]["messages"] == [{"role": "system", "content": "Be brief."}, *HI]
    assert engine.bodies[-1]["max_tokens"] == 9
    assert wait_for_usage(tenant, 1)[0].output_tokens == 3


def test_a_streamed_response_has_every_event(gateway, tenant):
    with gateway.openai(tenant.key).responses.stream(model=BASE_MODEL, input=HI) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()

    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[2:4] == ["response.output_item.added", "response.content_part.added"]
    assert kinds.count("response.output_text.delta") == 3
    assert kinds[-1] == "response.completed"
    assert (final.output_text, final.usage.output_tokens) == ("Hello there.", 3)


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_response_may_call_a_function_and_be_told_what_it_said(gateway, tenant, engine, is_streamed):
    engine.scripts["sunny?"] = Script(tokens=(), calls=(("call_1", "weather", ("{}",)),), finish="tool_calls")
    client = gateway.openai(tenant.key)
    tools = [{"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}]
    asked = {"model": BASE_MODEL, "input": "sunny?", "tools": tools}

    if is_streamed:
        first = list(client.responses.create(**asked, stream=True))[-1].response
    else:
        first = client.responses.create(**asked)
    (call,) = first.output
    said = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    client.responses.create(
        model=BASE_MODEL, tools=tools,
        input=[*HI, {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": "{}"}, said],
    )  # fmt: skip

    assert (call.type, call.name, call.arguments, call.call_id) == ("function_call", "weather", "{}", "call_1")
    assert [message["role"] for message in engine.bodies[-1]["messages"]] == ["user", "assistant", "tool"]


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"store": True}, "unsupported_parameter", "store"),
        ({"previous_response_id": "resp_1"}, "unsupported_parameter", "previous_response_id"),
        ({"background": True}, "unsupported_parameter", "background"),
        ({"cache_salt": "x"}, "unknown_parameter", "cache_salt"),
        ({"input": None}, "missing_required_parameter", "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "invalid_value", "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]},
            "invalid_value", "input[0].content[0].type",
        ),
        ({"max_output_tokens": 0}, "invalid_value", "max_output_tokens"),
        ({"tools": [{"type": "web_search"}]}, "invalid_value", "tools[0].type"),
    ],
)  # fmt: skip
def test_what_a_response_cannot_have_is_named(gateway, world, change, code, param):
    answer = gateway.http(world.acme.key).post("/v1/responses", json={"model": BASE_MODEL, "input": "Hi"} | change)

    assert (answer.status_code, error_of(answer)["code"], error_of(answer)["param"]) == (400, code, param)


# --- Who may ask ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_each_route_asks_for_a_key_with_the_scope_of_inference(gateway, world, path):
    field = {"/v1/chat/completions": "messages", "/v1/completions": "prompt", "/v1/responses": "input"}[path]
    body = {"model": world.acme.model_name, field: "Hi" if field == "prompt" else HI}
    narrow = make_key(world.acme.organization, world.acme.owner, scopes=frozenset({"view"}))
    answers = {
        name: gateway.http(key).post(path, json=body)
        for name, key in {
            "owner": world.acme.key,
            "no scope": narrow,
            "outsider": world.rival.key,
            "anonymous": None,
            "malformed": "ann_live_nonsense",
        }.items()
    }

    statuses = {name: answer.status_code for name, answer in answers.items()}
    assert statuses == {"owner": 200, "no scope": 403, "outsider": 404, "anonymous": 401, "malformed": 401}
    assert error_of(answers["no scope"])["code"] == "insufficient_permissions"
    assert error_of(answers["anonymous"])["code"] == "invalid_api_key"
    assert answers["anonymous"].headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    ("change", "status", "code", "param"),
    [
        ({}, 400, "model_not_supported", "model"),
        ({"input": None}, 400, "missing_required_parameter", "input"),
        ({"input_type": "query"}, 400, "unknown_parameter", "input_type"),
        ({"model": "ft:tiny:nobody:x:1"}, 404, "model_not_found", "model"),
    ],
)
def test_embeddings_are_refused_by_name_where_no_engine_makes_them(gateway, world, change, status, code, param):
    answer = gateway.http(world.acme.key).post(
        "/v1/embeddings", json={"model": world.acme.model_name, "input": "Hi"} | change
    )

    assert (answer.status_code, error_of(answer)["code"], error_of(answer)["param"]) == (status, code, param)
    assert gateway.http(None).post("/v1/embeddings", json={"model": BASE_MODEL, "input": "Hi"}).status_code == 401


def test_a_foreign_model_is_answered_like_one_that_does_not_exist(gateway, world):
    http = gateway.http(world.acme.key)

    foreign, unknown, internal = (
        http.post("/v1/chat/completions", json={"model": name, "messages": HI})
        for name in (world.rival.model_name, "ft:tiny:nobody:x:1", world.acme.lora_name)
    )

    assert foreign.status_code == unknown.status_code == internal.status_code == 404
    assert foreign.content == unknown.content == internal.content
    assert (error_of(foreign)["code"], error_of(foreign)["param"]) == ("model_not_found", "model")


def test_a_revoked_key_stops_at_once(gateway, world):
    """Sooner than any key is looked up by its age; a busy machine may hold some of the news up that long, not all."""

    def seconds_served() -> float:
        key = make_key(world.acme.organization, world.acme.owner)
        http = gateway.http(key)
        asked = "/v1/chat/completions", {"model": BASE_MODEL, "messages": HI}
        assert http.post(asked[0], json=asked[1]).status_code == 200
        revoke_key(organization=world.acme.organization, key_id=key.key.pk, by=world.acme.owner, now=db_now())
        revoked_at = monotonic()
        wait_until(lambda: http.post(asked[0], json=asked[1]).status_code == 401, "still served", seconds=5)
        return monotonic() - revoked_at

    assert any(seconds_served() < FRESH_SECONDS - 0.1 for _ in range(10))


def test_the_use_of_a_key_is_noted(gateway, world):
    key = make_key(world.acme.organization, world.acme.owner)

    gateway.openai(key).chat.completions.create(model=BASE_MODEL, messages=HI)

    key.key.refresh_from_db()
    assert key.key.last_used_at is not None


def test_other_urls_and_methods_get_errors_of_the_same_shape(gateway, world):
    http = gateway.http(world.acme.key)

    assert http.post("/v1/edits").status_code == 404
    assert error_of(http.get("/v1/responses/resp_1"))["code"] == "unknown_url"
    assert http.get("/v1/chat/completions").status_code == 405


# --- Bad requests -----------------------------------------------------------------------------------------------------


def schema(**fields: object) -> dict:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": fields}}}


def nested(depth: int) -> dict:
    return {"type": "object", "properties": {"a": nested(depth - 1)}} if depth else {}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"model": None}, "model"),
        ({"model": ""}, "model"),
        ({"model": 3}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
            "messages[0].content[0].type",
        ),
        ({"n": 5}, "n"),
        ({"temperature": 2.5}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_logprobs": 6}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}] * 65}, "tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"response_format": {"type": "grammar"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        (schema(maxLength=100_000), "response_format.json_schema.schema"),
        (schema(description="x" * 20_000), "response_format.json_schema.schema"),
        (schema(properties={str(n): {} for n in range(200)}), "response_format.json_schema.schema"),
        (schema(**nested(40)), "response_format.json_schema.schema"),
        (schema(enum=list(range(600))), "response_format.json_schema.schema"),
        (schema(pattern="a" * 600), "response_format.json_schema.schema"),
    ],
)
def test_a_bad_field_is_named(gateway, world, change, param):
    with pytest.raises(openai.BadRequestError) as refused:
        gateway.openai(world.acme.key).post(
            "/chat/completions", body={"model": BASE_MODEL, "messages": HI} | change, cast_to=object
        )

    assert refused.value.param == param
    assert refused.value.body["message"]


@pytest.mark.parametrize("prompt", [None, [], ["a"] * 9, ["a", 1], [[]]])
def test_a_bad_prompt_is_named(gateway, world, prompt):
    answer = gateway.http(world.acme.key).post("/v1/completions", json={"model": BASE_MODEL, "prompt": prompt})

    assert (answer.status_code, error_of(answer)["param"]) == (400, "prompt")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'"x"', b"[" * 10_000])
def test_a_body_that_is_no_json_object_is_refused(gateway, world, body):
    answer = gateway.http(world.acme.key).post("/v1/chat/completions", content=body)

    assert answer.status_code == 400
    assert error_of(answer)["type"] == "invalid_request_error"


def test_a_body_above_the_limit_is_refused(gateway, world):
    body = {"model": BASE_MODEL, "messages": [{"role": "user", "content": "x" * 5 * 2**20}]}

    answer = gateway.http(world.acme.key).post("/v1/chat/completions", json=body)

    assert (answer.status_code, error_of(answer)["code"]) == (413, "request_too_large")


def test_a_prompt_that_is_too_long_is_told_so_without_the_engines_words(gateway, tenant, engine):
    engine.scripts["long"] = Script(
        status=400,
        error={
            "message": "This model's maximum context length is 512 tokens. However, your prompt contains 700 input "
            "tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input "
            "prompt. (parameter=input_tokens, value=700)",
            "type": "BadRequestError",
            "param": "input_tokens",
            "code": 400,
        },
    )

    with pytest.raises(openai.BadRequestError) as refused:
        gateway.openai(tenant.key).chat.completions.create(
            model=BASE_MODEL, messages=[{"role": "user", "content": "long"}]
        )

    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "messages")
    assert "512" in refused.value.message and "700" in refused.value.message
    assert "parameter=" not in refused.value.message
    assert wait_for_usage(tenant, 1)[0].output_tokens == 0


def test_another_refusal_of_the_engine_shows_none_of_its_inside(gateway, tenant, engine):
    engine.scripts["odd"] = Script(
        status=400, error={"message": "Trace /opt/vllm/x.py a-01m7z34d0r6kwakqa9bydwv1d5", "param": None}
    )

    answer = gateway.http(tenant.key).post(
        "/v1/chat/completions", json={"model": BASE_MODEL, "messages": [{"role": "user", "content": "odd"}]}
    )

    assert answer.status_code == 400
    assert "a-01" not in answer.text and "vllm" not in answer.text


def test_a_refusal_that_comes_inside_the_stream_is_the_requests_fault_too(gateway, tenant, engine):
    engine.scripts["bias"] = Script(
        fails_after=0,
        error={
            "message": "token_id(s) [999999] in logit_bias contain out-of-vocab",
            "param": "logit_bias",
            "code": 400,
        },
    )

    with pytest.raises(openai.BadRequestError) as refused:
        gateway.openai(tenant.key).chat.completions.create(
            model=BASE_MODEL, messages=[{"role": "user", "content": "bias"}], logit_bias={"999999": 1}
        )

    assert (refused.value.param, refused.value.code) == ("logit_bias", "invalid_value")


# --- Engines that fail ------------------------------------------------------------------------------------------------


def test_a_model_without_replica_asks_the_client_to_come_back(gateway, world):
    make_served_model("waiting")
    http = gateway.http(world.acme.key)
    body = {"model": "waiting", "messages": HI}

    answer = wait_until(
        lambda: (found := http.post("/v1/chat/completions", json=body)).status_code == 503 and found, "no 503"
    )

    assert answer.headers["retry-after"]
    assert "x-should-retry" not in answer.headers


def test_a_request_waits_for_an_adapter_that_is_being_loaded(gateway, world):
    with transaction.atomic():  # no moment in which it is loaded
        version = make_adapter(world.acme.organization, world.base_model)
        loading = LoadedAdapter.objects.filter(adapter_version=version)
        loading.update(state="loading")
    http = gateway.http(world.acme.key)

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(http.post, "/v1/chat/completions", json={"model": version.model_name, "messages": HI})
        sleep(REFRESH_SECONDS + 0.5)  # the request came before the gateway had ever heard the name
        was_waiting = not answer.done()
        loading.update(state="loaded")

        assert answer.result().status_code == 200, answer.result().text
    assert was_waiting


def test_a_request_for_a_cold_adapter_asks_for_it_back_and_waits(gateway, world, engine):
    with transaction.atomic():  # no moment in which it is loaded
        base_model = make_served_model("crowded", engine.url)
        base_model.replicas.update(capacity=1)
        version, held = (make_adapter(world.acme.organization, base_model) for _ in range(2))
        LoadedAdapter.objects.filter(adapter_version=version).delete()
        Deployment.objects.filter(adapter_version=version).update(created_at="2000-01-01T00:00Z")
    replica = base_model.replicas.get()
    http = gateway.http(world.acme.key)

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(http.post, "/v1/chat/completions", json={"model": version.model_name, "messages": HI})
        wait_until(
            lambda: [a.version_id for a in desired_state(replica=replica).adapters] == [version.pk], "not asked back"
        )
        LoadedAdapter.objects.filter(adapter_version=held).delete()
        LoadedAdapter.objects.create(
            organization=world.acme.organization, replica=replica, adapter_version=version, state="loaded"
        )

        assert answer.result().status_code == 200, answer.result().text
    replica.refresh_from_db()
    assert replica.generation > 0


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


def test_an_adapter_that_no_replica_could_load_is_not_waited_for(gateway, world):
    with transaction.atomic():  # no moment in which it is loaded
        version = make_adapter(world.acme.organization, world.base_model)
        LoadedAdapter.objects.filter(adapter_version=version).update(state="failed")

    answer = gateway.http(world.acme.key).post(
        "/v1/chat/completions", json={"model": version.model_name, "messages": HI}, timeout=LONGEST_LOAD_SECONDS / 2
    )

    assert (answer.status_code, error_of(answer)["param"]) == (503, "model")


def test_a_model_without_a_price_gives_nothing_away(gateway, world, engine):
    make_served_model("unpriced", engine.url, is_priced=False)
    http = gateway.http(world.acme.key)
    body = {"model": "unpriced", "messages": HI}

    answer = wait_until(
        lambda: (found := http.post("/v1/chat/completions", json=body)).status_code == 503 and found, "no 503"
    )

    assert (error_of(answer)["code"], answer.headers["x-should-retry"]) == ("price_not_set", "false")
    assert "price" in error_of(answer)["message"]


def test_another_replica_answers_when_one_cannot_be_reached(gateway, world, home, engine):
    make_served_model("pair", f"unix://{home}/nobody.sock", engine.url)
    http = gateway.http(world.acme.key)
    wait_until(
        lambda: http.post("/v1/completions", json={"model": "pair", "prompt": "Hi"}).status_code == 200, "no answer"
    )

    answers = [http.post("/v1/completions", json={"model": "pair", "prompt": "Hi"}) for _ in range(4)]

    assert {answer.status_code for answer in answers} == {200}


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


# --- Money ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_customer_who_leaves_stops_the_engine_and_pays_for_what_it_wrote(gateway, tenant, engine, is_streamed):
    text = f"endless {is_streamed}"
    engine.scripts[text] = Script(tokens=("word ",) * 400, delay_seconds=0.02, prompt_tokens=5)
    body = {"model": BASE_MODEL, "messages": [{"role": "user", "content": text}], "stream": is_streamed}

    with gateway.left(tenant.key, "/v1/chat/completions", body):
        wait_until(lambda: engine.generated.get(text, 0) > 5, "the engine does not write")

    event = wait_for_usage(tenant, 1)[0]
    written = engine.generated[text]
    assert (event.finish, event.input_tokens) == ("aborted", 5)
    assert 0 < event.output_tokens <= written < 100
    assert written - event.output_tokens <= 2


def test_what_was_used_is_charged_exactly_and_the_slice_is_returned(gateway, tenant):
    client = gateway.openai(tenant.key)
    for _ in range(5):
        client.chat.completions.create(model=BASE_MODEL, messages=HI)
    events = wait_for_usage(tenant, 5)

    rate_usage()

    cost = rated(quantity=sum(e.input_tokens for e in events), price_nano=INPUT_NANO, per=PER)
    cost += rated(quantity=sum(e.output_tokens for e in events), price_nano=OUTPUT_NANO, per=PER)
    spending = get_spending(organization=tenant.organization)
    assert (spending.inference_nano, spending.unrated_requests) == (cost, 0)
    assert spending.tokens_billed == sum(e.input_tokens + e.output_tokens for e in events)
    held = Hold.objects.filter(organization=tenant.organization, purpose="inference")
    wait_until(lambda: not held.filter(status="open").exists(), "the slice was kept", seconds=15)
    balance = get_balance(organization=tenant.organization)
    assert (balance.available_nano, balance.held_nano) == (10 * USD - cost, 0)
    assert get_ledger_sum_nano() == 0


def test_an_exhausted_balance_is_refused_once_and_for_good(gateway, world):
    poor = make_tenant("Poor", world.base_model, credit_nano=0)
    body = {"model": BASE_MODEL, "messages": HI}

    answer = gateway.http(poor.key).post("/v1/chat/completions", json=body)
    with pytest.raises(openai.RateLimitError) as refused:
        gateway.openai(poor.key, max_retries=2).chat.completions.create(**body)

    assert (answer.status_code, answer.headers["x-should-retry"]) == (429, "false")
    assert refused.value.code == "insufficient_quota"
    assert error_of(answer)["required_nano"] > 0
    assert usage_of(poor) == []


def test_many_requests_at_once_spend_no_more_than_there_is(gateway, world, engine):
    engine.scripts["spend"] = Script(prompt_tokens=20, tokens=("x",) * 50, delay_seconds=0.001)
    one = rated(quantity=20, price_nano=INPUT_NANO, per=PER) + rated(quantity=50, price_nano=OUTPUT_NANO, per=PER)
    poor = make_tenant("Few", world.base_model, credit_nano=12 * one)
    body = {"model": BASE_MODEL, "prompt": "spend", "max_tokens": 50}

    with gateway.http(poor.key) as http, ThreadPoolExecutor(12) as lanes:
        statuses = list(lanes.map(lambda _: http.post("/v1/completions", json=body).status_code, range(30)))

    served = statuses.count(200)
    assert set(statuses) == {200, 429}
    assert 5 <= served <= 12
    wait_for_usage(poor, served)
    rate_usage()
    assert get_spending(organization=poor.organization).inference_nano == served * one
    assert get_ledger_sum_nano() == 0


def test_requests_above_the_limit_per_minute_are_told_when_to_come_back(gateway, world):
    limited = make_tenant("Limited", world.base_model)
    with transaction.atomic():
        set_quota(organization=limited.organization, by="system", now=db_now(), requests_per_minute=2)
    http = gateway.http(limited.key)

    answers = [http.post("/v1/chat/completions", json={"model": BASE_MODEL, "messages": HI}) for _ in range(3)]

    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert int(answers[2].headers["retry-after"]) >= 1
    assert error_of(answers[2])["code"] == "rate_limit_exceeded"
    assert [answer.headers["x-ratelimit-limit-requests"] for answer in answers] == ["2"] * 3
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["1", "0", "0"]
    assert answers[0].headers["x-ratelimit-limit-tokens"]


def test_a_key_has_limits_of_its_own(gateway, world):
    limited = make_tenant("Narrow", world.base_model)
    narrow = make_key(limited.organization, limited.owner, limits=KeyLimits(tokens_per_minute=50))
    body = {"model": BASE_MODEL, "messages": HI, "max_tokens": 40}

    first, second = (gateway.http(narrow).post("/v1/chat/completions", json=body) for _ in range(2))
    other = gateway.http(limited.key).post("/v1/chat/completions", json=body)

    assert (first.status_code, first.headers["x-ratelimit-limit-tokens"]) == (200, "50")
    assert (second.status_code, other.status_code) == (429, 200)
    assert "This key's limit is 50 tokens per minute" in error_of(second)["message"]


def test_a_members_token_is_metered_and_limited_like_any_key(gateway, world):
    limited = make_tenant("Playground", world.base_model)
    with transaction.atomic():
        set_quota(organization=limited.organization, by="system", now=db_now(), requests_per_minute=2)
        token = issue_member_token(organization=limited.organization, user=limited.owner, now=db_now())
    body = {"model": limited.model_name, "messages": HI}

    answers = [gateway.http(key).post("/v1/chat/completions", json=body) for key in (limited.key, token, token)]

    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert error_of(answers[2])["code"] == "rate_limit_exceeded"
    by_key, by_token = sorted(wait_for_usage(limited, 2), key=lambda event: event.key_id == token.key.pk)
    assert (by_key.key_id, by_token.key_id) == (limited.key.key.pk, token.key.pk)
    used = ("model_name", "input_tokens", "output_tokens", "input_price_id", "output_price_id")
    assert [getattr(by_token, name) for name in used] == [getattr(by_key, name) for name in used]
    rate_usage()
    cost = rated(quantity=2 * by_key.input_tokens, price_nano=INPUT_NANO, per=PER)
    cost += rated(quantity=2 * by_key.output_tokens, price_nano=OUTPUT_NANO, per=PER)
    assert get_spending(organization=limited.organization).inference_nano == cost > 0


# --- Both generations of the SDK --------------------------------------------------------------------------------------

OLD_SDK = Path(__file__).resolve().parents[3] / ".anneal/openai-1.109.1"


@pytest.mark.parametrize("sdk", ["installed", "1.109.1"])
def test_both_generations_of_the_sdk_see_the_same(gateway, world, sdk):
    assert sdk == "installed" or OLD_SDK.exists(), f"{OLD_SDK} is missing: make setup-dev"
    folder = "" if sdk == "installed" else str(OLD_SDK)
    session = Path(__file__).with_name("sdk_session.py")
    arguments = [str(gateway.socket), world.acme.key.secret, world.acme.model_name, world.rival.model_name, folder]

    ran = subprocess.run([sys.executable, str(session), *arguments], capture_output=True, text=True, timeout=240)

    assert ran.returncode == 0, ran.stderr
    seen = json.loads(ran.stdout)
    assert seen.pop("version") == (openai.__version__ if sdk == "installed" else sdk)
    assert seen == {
        "whole": "Hello there.",
        "tokens": 14,
        "streamed": "Hello there.",
        "usage": 3,
        "completion": "Hello there.",
        "foreign": [404, "model_not_found", "model", True],
        "bad": [400, "invalid_value", "n", True],
    }


def test_a_judges_calls_are_metered_and_billed_like_any_other(gateway, tenant, engine):
    """The worker's own judge before the gateway's process, with the key that a run's worker is given."""
    question = Question(question="The colour?", reference="red", answer="It is red.")
    material = {"question": "The colour?", "reference_answer": "red", "answer": "It is red."}
    engine.scripts[json.dumps(material)] = Script(tokens=('{"score', '": 4', "}"), prompt_tokens=40)
    with transaction.atomic():
        issued = issue_member_token(organization=tenant.organization, user=tenant.owner, now=db_now(), name="Judge")
    access = JudgeAccess(url="http://gateway/v1", key=issued.secret, model=tenant.model_name)
    grader = Grader(kind=GraderKind.JUDGE, model=tenant.model_name)
    transport = httpx.HTTPTransport(uds=str(gateway.socket))

    found = Judge(grader, access, seconds=30, transport=transport).judge([question] * 3)

    assert (found.scores, found.calls, found.trouble) == ([0.75] * 3, 3, "")
    events = wait_for_usage(tenant, 3)
    assert {event.key_id for event in events} == {issued.key.pk}
    billed = sum(event.input_tokens for event in events), sum(event.output_tokens for event in events)
    assert billed == (found.input_tokens, found.output_tokens) == (120, 9)
