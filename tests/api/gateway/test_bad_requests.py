"""What is wrong with a request: told by the name of the field."""

import gzip
import json

import openai
import pytest
from django.db import transaction

from apps.core.database.clock import db_now
from apps.finetuning.usage.quotas import set_quota
from tests.factories.serving import BASE_MODEL, make_tenant
from tests.support.gateway.processes import HI, WEATHER, error_of
from tests.twins.scripted_engine import Script

pytestmark = pytest.mark.django_db


def schema(**fields: object) -> dict:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": fields}}}


def nested(depth: int) -> dict:
    return {"type": "object", "properties": {"a": nested(depth - 1)}} if depth else {}


def called(arguments: str) -> dict:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"messages": [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}, *HI]}


ARGUMENTS = "messages[1].tool_calls[0].function.arguments"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        (called("[" * 1500 + "]" * 1500), ARGUMENTS),
        (called('{"a":' * 33 + "1" + "}" * 33), ARGUMENTS),
        (called('{"a": "' + "x" * 65_536 + '"}'), ARGUMENTS),
        (called("[1]"), ARGUMENTS),
        (called('{"a": '), ARGUMENTS),
        (called('{"a": ' + "1" * 5000 + "}"), ARGUMENTS),
        (called('{"a": "\\ud800"}'), ARGUMENTS),
        ({"messages": HI * 2049}, "messages"),
        ({"max_tokens": 2**80}, "max_tokens"),
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
        ({"n": 129}, "n"),
        ({"n": 9, "response_format": {"type": "json_object"}}, "n"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        (schema(pattern="(a|b|c){1,2000}"), "response_format.json_schema.schema"),
        (schema(type="banana"), "response_format.json_schema.schema"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
                "tool_choice": "required",
            },
            "tools[0].function.parameters",
        ),
        ({"temperature": 2.5}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"moderation": {"model": "m"}}, "moderation"),
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": "x"}, "Invalid value for 'temperature': \"x\". Use a number from 0 to 2."),
        ({"top_p": 5}, "Invalid value for 'top_p': 5. Use a number above 0 and up to 1."),
        (
            {"tool_choice": "required"},
            "`tool_choice` is 'required', but `tools` is empty. Send `tools`, or leave `tool_choice` out.",
        ),
        ({"n": 129}, "Invalid value for 'n': 129. Use a whole number from 1 to 128."),
        (
            {"stop": ""},
            "Invalid value for 'stop': \"\". Use a string of 1 to 256 characters or a list of at most 16 items.",
        ),
        ({"logit_bias": {"1": 200}}, "Invalid value for 'logit_bias.1': 200. Use a number from -100 to 100."),
        (
            {"tools": [{"type": "x", "function": {"name": "f"}}]},
            "Invalid value for 'tools[0].type': \"x\". Use 'function'.",
        ),
        ({"logprobs": "yes"}, "Invalid value for 'logprobs': \"yes\". Use true or false."),
        (
            {"stream_options": {"x": 1}},
            "Unknown parameter: 'stream_options.x'. 'stream_options' takes include_usage, include_obfuscation.",
        ),
    ],
)
def test_what_is_wrong_is_told_in_plain_words_with_what_is_taken(gateway, world, change, message):
    answer = gateway.http(world.acme.key).post(
        "/v1/chat/completions", json={"model": BASE_MODEL, "messages": HI} | change
    )

    assert error_of(answer)["message"] == message


@pytest.mark.parametrize(
    ("words", "change", "code", "param", "told"),
    [
        (
            '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set',
            {"tools": [WEATHER]}, "unsupported_parameter", "tools", "runs without a tool parser",
        ),
        (
            "Grammar error: Unimplemented keys: /opt/vllm",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}},
            "invalid_value", "response_format.json_schema.schema", "cannot compile the schema",
        ),
        (
            "Image dimensions 9000x9000 (81000000 pixels) exceed the maximum of 16777216 pixels. Set VLLM_MAX_IMAGE…",
            {}, "invalid_value", "messages", "more than 16,777,216 pixels",
        ),
        (
            "token_id(s) [99999] in logit_bias contain out-of-vocab token ids. Vocabulary size: 6144",
            {"logit_bias": {"99999": 1}}, "invalid_value", "logit_bias", "its ids end at 6143",
        ),
    ],
)  # fmt: skip
def test_the_reason_of_a_refusal_by_the_engine_is_told_in_our_words(
    gateway, tenant, engine, words, change, code, param, told
):
    engine.scripts[words] = Script(
        status=400, error={"message": words, "param": "logit_bias" if param == "logit_bias" else None}
    )

    answer = gateway.http(tenant.key).post(
        "/v1/chat/completions",
        json={"model": BASE_MODEL, "messages": [{"role": "user", "content": words}]} | change,
    )

    error = error_of(answer)
    assert (error["code"], error["param"], told in error["message"]) == (code, param, True), error


@pytest.mark.parametrize(
    ("words", "roles", "at", "told"),
    [
        ("System role not supported", ["developer", "user"], 0, "into the first user message"),
        ("Only user and assistant roles are supported!", ["user", "assistant", "tool", "user"], 2, "the role 'tool'"),
        ("Unexpected message role.", ["system", "user", "assistant", "tool", "user"], 3, "the role 'tool'"),
        ("Conversation roles must alternate user/assistant/…", ["system", "user", "user"], 2, "is out of turn"),
        ("System message must be at the beginning.", ["user", "system", "user"], 1, "only at the beginning"),
    ],
)
def test_a_message_whose_role_the_chat_template_refuses_is_named(gateway, tenant, engine, words, roles, at, told):
    engine.scripts[words] = Script(status=400, error={"message": words, "param": None})
    message = {"user": {"content": words}, "assistant": called("{}")["messages"][1], "tool": {"tool_call_id": "c1"}}
    messages = [{"content": "x", "role": role} | message.get(role, {}) for role in roles]

    answer = gateway.http(tenant.key).post("/v1/chat/completions", json={"model": BASE_MODEL, "messages": messages})

    error = error_of(answer)
    assert (error["param"], told in error["message"]) == (f"messages[{at}].role", True), error
    assert "vllm" not in answer.text and "--" not in answer.text


@pytest.mark.parametrize("arguments", ["", "{}", '{"a": [1, {"b": null}]}'])
def test_arguments_of_a_called_function_reach_the_engine_as_an_object(gateway, world, engine, arguments):
    answer = gateway.http(world.acme.key).post(
        "/v1/chat/completions", json={"model": BASE_MODEL} | called(arguments) | {"tools": [WEATHER]}
    )

    assert answer.status_code == 200
    call = engine.bodies[-1]["messages"][1]["tool_calls"][0]
    assert isinstance(json.loads(call["function"]["arguments"]), dict)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": [{"type": "function_call", "name": "f", "arguments": "[" * 1500}]}, "input[0].arguments"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": "Hi"}] * 2049}, "input"),
        ({"metadata": {"a": {"b": 1}}}, "metadata.a"),
        ({"metadata": {str(n): "x" for n in range(17)}}, "metadata"),
    ],
)
def test_a_bad_field_of_a_response_is_named(gateway, world, change, param):
    answer = gateway.http(world.acme.key).post("/v1/responses", json={"model": BASE_MODEL, "input": "Hi"} | change)

    assert (answer.status_code, error_of(answer)["param"]) == (400, param)


@pytest.mark.parametrize("prompt", [None, [], ["a"] * 9, ["a", 1], [[]]])
def test_a_bad_prompt_is_named(gateway, world, prompt):
    answer = gateway.http(world.acme.key).post("/v1/completions", json={"model": BASE_MODEL, "prompt": prompt})

    assert (answer.status_code, error_of(answer)["param"]) == (400, "prompt")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'"x"', b"[" * 10_000])
def test_a_body_that_is_no_json_object_is_refused(gateway, world, body):
    answer = gateway.http(world.acme.key).post("/v1/chat/completions", content=body)

    assert answer.status_code == 400
    assert error_of(answer)["type"] == "invalid_request_error"
    assert error_of(answer)["code"] == ("invalid_value" if body in (b"[]", b'"x"') else "invalid_json")


def test_a_compressed_body_is_refused_by_its_header(gateway, world):
    http, body = gateway.http(world.acme.key), gzip.compress(b"{}")
    answer = http.post("/v1/chat/completions", content=body, headers={"Content-Encoding": "gzip"})

    assert (answer.status_code, error_of(answer)["code"]) == (415, "unsupported_media_type")
    assert "Content-Encoding" in error_of(answer)["message"]


def test_a_number_that_is_no_token_is_refused_with_the_bounds_in_digits(gateway, world):
    answer = gateway.http(world.acme.key).post("/v1/completions", json={"model": BASE_MODEL, "prompt": [-1]})

    assert "from 0 to 2,147,483,647" in error_of(answer)["message"]


@pytest.mark.slow
def test_a_body_above_the_limit_is_refused(gateway, world):
    body = {"model": BASE_MODEL, "messages": [{"role": "user", "content": "x" * 5 * 2**20}]}

    answer = gateway.http(world.acme.key).post("/v1/chat/completions", json=body)

    assert (answer.status_code, error_of(answer)["code"]) == (413, "request_too_large")


@pytest.mark.slow
def test_a_body_longer_than_any_context_is_refused_before_it_is_read(gateway, world):
    http = gateway.http(world.acme.key)
    bodies = [
        {"model": BASE_MODEL, "messages": [{"role": "user", "content": "x" * size}]} for size in (200_000, 600_000)
    ]

    answers = [http.post("/v1/chat/completions", json=body) for body in bodies]

    assert [answer.status_code for answer in answers] == [200, 413]


def test_a_parsed_body_counts_though_it_is_refused(gateway, world):
    tenant = make_tenant("Refused", world.base_model)
    with transaction.atomic():
        set_quota(organization=tenant.organization, by="system", now=db_now(), tokens_per_minute=120_000)
    http = gateway.http(tenant.key)
    body = {"model": BASE_MODEL, "messages": HI, "unknown": "x" * 160_000}

    answers = [http.post("/v1/chat/completions", json=body) for _ in range(3)]

    left = [int(answer.headers["x-ratelimit-remaining-tokens"]) for answer in answers]
    assert {answer.status_code for answer in answers} == {400}
    assert left[0] - left[2] > 15_000
