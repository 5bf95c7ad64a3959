"""Who may ask, and what is wrong with a request: told by name, in one shape, without the engine's inside."""

import json
from time import monotonic

import openai
import pytest
from django.db import transaction

from apps.accounts.login.key_operations import revoke_key
from apps.core.database.clock import db_now
from apps.finetuning.usage.quotas import set_quota
from apps.interfaces.gateway.admission.keys import FRESH_SECONDS
from tests.factories.accounts import make_key
from tests.factories.serving import BASE_MODEL, make_tenant
from tests.support.gateway.processes import HI, WEATHER, error_of, wait_for_usage, wait_until
from tests.twins.scripted_engine import Script

pytestmark = pytest.mark.django_db


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
        ({"n": 9}, "n"),
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
        ({"n": 9}, "Invalid value for 'n': 9. Use a whole number from 1 to 8."),
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


def test_a_body_above_the_limit_is_refused(gateway, world):
    body = {"model": BASE_MODEL, "messages": [{"role": "user", "content": "x" * 5 * 2**20}]}

    answer = gateway.http(world.acme.key).post("/v1/chat/completions", json=body)

    assert (answer.status_code, error_of(answer)["code"]) == (413, "request_too_large")


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


def test_the_gateway_tells_how_long_its_loop_stood_still(gateway):
    told = gateway.http().get("/healthz").json()

    assert told["longest_stall_ms"] >= told["longest_stall_of_last_minute_ms"] >= 0


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
