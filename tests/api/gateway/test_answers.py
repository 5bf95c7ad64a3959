"""What customers of the gateway see: a real gateway process under its own role, before a scripted engine."""

from collections.abc import Iterator

import httpx
import pytest
from django.db import transaction

from apps.adapters.models import AdapterVersion
from apps.catalog.models import BaseModel
from tests.factories.serving import BASE_MODEL, make_adapter, make_served_model
from tests.support.gateway.processes import HI, MEDIA_HOST, WEATHER, error_of, usage_of, wait_for_usage, wait_until
from tests.twins.scripted_engine import Script

pytestmark = pytest.mark.django_db


# --- Chats and completions --------------------------------------------------------------------------------------------


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
    assert {event.replica_id for event in events} == {world.base_model.replicas.get(whole_model=None).pk}
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


def test_as_many_choices_as_openai_allows_are_answered_and_each_is_paid(gateway, tenant, engine):
    engine.scripts["many"] = Script(prompt_tokens=9)

    answer = gateway.openai(tenant.key).chat.completions.create(
        model=BASE_MODEL, messages=[{"role": "user", "content": "many"}], n=128
    )

    assert [choice.index for choice in answer.choices] == list(range(128))
    assert {choice.message.content for choice in answer.choices} == {"Hello there."}
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (9, 128 * 3)
    event = wait_for_usage(tenant, 1)[0]
    assert (event.input_tokens, event.output_tokens, event.engine_input_tokens) == (9, 128 * 3, 128 * 9)


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


@pytest.fixture
def seeing_adapter(tenant, engine) -> Iterator[AdapterVersion]:
    """Return an adapter of the model "seeing", whose images raise the largest body that the gateway takes."""
    with transaction.atomic():
        base_model = make_served_model("seeing", engine.url, vision_config={"hidden_size": 8})
        adapter = make_adapter(tenant.organization, base_model)
    yield adapter
    BaseModel.objects.filter(pk=base_model.pk).update(config={})  # its adapter has a route until the end


def test_an_image_reaches_the_engine_of_a_model_that_sees_from_a_listed_host_alone(
    gateway, tenant, engine, seeing_adapter
):
    http = gateway.http(tenant.key)

    def ask(model: str, url: str) -> httpx.Response:
        parts = [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {"url": url}, "uuid": "u"}]
        body = {"model": model, "messages": [{"role": "user", "content": parts}]}
        return http.post("/v1/chat/completions", json=body)

    listed = f"https://{MEDIA_HOST}/a.png"
    wait_until(lambda: ask("seeing", listed).status_code == 200, "no answer")
    parts = engine.bodies[-1]["messages"][0]["content"]
    asked = len(engine.bodies)

    assert parts == [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {"url": listed}}]
    refused = [(ask(BASE_MODEL, listed), "type"), (ask("seeing", "https://169.254.169.254/"), "image_url.url")]
    for answer, field in refused:
        assert (answer.status_code, error_of(answer)["param"]) == (400, f"messages[0].content[1].{field}")
    assert len(engine.bodies) == asked
    assert ask(seeing_adapter.model_name, listed).status_code == 200


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_streamed_response_has_every_event(gateway, tenant):
    with gateway.openai(tenant.key).responses.stream(model=BASE_MODEL, input=HI) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()

    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[2:4] == ["response.output_item.added", "response.content_part.added"]
    assert kinds.count("response.output_text.delta") == 3
    assert kinds[-1] == "response.completed"
    assert (final.output_text, final.usage.output_tokens) == ("Hello there.", 3)


@pytest.mark.parametrize("asked", [{"top_logprobs": 0}, {"include": ["message.output_text.logprobs"]}])
def test_a_response_has_the_log_probabilities_it_is_asked_for(gateway, tenant, asked):
    client = gateway.openai(tenant.key)

    whole = client.responses.create(model=BASE_MODEL, input="Hi", **asked)
    *_, last = events = list(client.responses.create(model=BASE_MODEL, input="Hi", stream=True, **asked))

    deltas = [event for event in events if event.type == "response.output_text.delta"]
    tokens = ["Hello", " there", "."]
    assert [entry.token for entry in whole.output[0].content[0].logprobs] == tokens
    assert [entry.token for event in deltas for entry in event.logprobs] == tokens
    assert [entry.token for entry in last.response.output[0].content[0].logprobs] == tokens


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


def test_text_and_calls_of_one_turn_are_one_message_of_the_assistant(gateway, tenant, engine):
    def called(id: str) -> dict[str, str]:
        return {"type": "function_call", "call_id": id, "name": "weather", "arguments": "{}"}

    def said(id: str) -> dict[str, str]:
        return {"type": "function_call_output", "call_id": id, "output": "sunny"}

    text = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]}
    tools = [{"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}]
    gateway.openai(tenant.key).responses.create(
        model=BASE_MODEL, tools=tools,
        input=[
            *HI, text, called("a"), called("b"), said("a"), said("b"), called("c"), called("d"), said("c"), said("d"),
        ],
    )  # fmt: skip

    turns = [
        (message["role"], message["content"], [call["id"] for call in message.get("tool_calls", ())])
        for message in engine.bodies[-1]["messages"]
    ]
    tool = ("tool", "sunny", [])
    assert turns[1:] == [
        ("assistant", "Let me see.", ["a", "b"]), tool, tool, ("assistant", None, ["c", "d"]), tool, tool,
    ]  # fmt: skip


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
        ({"top_logprobs": 21}, "invalid_value", "top_logprobs"),
        ({"moderation": {"model": "m"}}, "unsupported_parameter", "moderation"),
        ({"tools": [{"type": "web_search"}]}, "invalid_value", "tools[0].type"),
    ],
)  # fmt: skip
def test_what_a_response_cannot_have_is_named(gateway, world, change, code, param):
    answer = gateway.http(world.acme.key).post("/v1/responses", json={"model": BASE_MODEL, "input": "Hi"} | change)

    assert (answer.status_code, error_of(answer)["code"], error_of(answer)["param"]) == (400, code, param)
