"""Bad requests to the gateway: each is refused by name, with what to send in its place, and the engine sees none."""

import json
from typing import Any

import pytest

from tests.support.api.bad_requests import INVALID_JSON, MISSING, MODEL, NO_MODEL, UNKNOWN, Case, filled, problems

pytestmark = pytest.mark.django_db

CHAT, COMPLETIONS, RESPONSES, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"
UNSUPPORTED = "unsupported_parameter"
HI = [{"role": "user", "content": "Hi"}]


def _chat(param: str, code: str = "invalid_value", **fields: Any) -> Case:
    return Case(CHAT, {"model": MODEL, "messages": HI, "max_tokens": 4} | fields, param, code=code)


def _response(param: str, code: str = "invalid_value", **fields: Any) -> Case:
    return Case(RESPONSES, {"model": MODEL, "input": "Hi"} | fields, param, code=code)


DEEP: dict[str, Any] = {}
for _ in range(40):
    DEEP = {"properties": {"a": DEEP}}

GATEWAY = [
    *(
        Case(path, body, code=code)
        for path in (CHAT, COMPLETIONS, RESPONSES)
        for body, code in (
            (b"{", INVALID_JSON),
            (b"[]", "invalid_value"),
            (b'{"model": NaN}', INVALID_JSON),
            (b"\xff", INVALID_JSON),
        )
    ),
    Case(CHAT, {"model": MODEL}, "messages", code=MISSING),
    Case(CHAT, {"messages": HI}, "model", code=MISSING),
    Case(COMPLETIONS, {"model": MODEL}, "prompt", code=MISSING),
    Case(RESPONSES, {"model": MODEL}, "input", code=MISSING),
    Case(CHAT, {"model": "no-such", "messages": HI}, "model", 404, NO_MODEL),
    _chat("messages", MISSING, messages=[]),
    _chat("messages", messages="Hi"),
    _chat("messages[0].role", messages=[{"role": "king", "content": "x"}]),
    _chat("max_tokens", max_tokens=-1),
    _chat("max_tokens", max_tokens="many"),
    _chat("temperature", temperature=9),
    _chat("temperature", temperature="hot"),
    _chat("top_p", top_p=5),
    _chat("n", n=0),
    _chat("n", n=10**6),
    _chat("stream", stream="yes"),
    _chat("stop", stop=3),
    _chat("presence_penalty", presence_penalty=99),
    _chat("frequency_penalty", frequency_penalty="x"),
    _chat("top_logprobs", top_logprobs=500, logprobs=True),
    _chat("logprobs", logprobs="yes"),
    _chat("seed", seed="x"),
    _chat("seed", seed=2**70),
    _chat("tools", tools={"a": "b"}),
    _chat("response_format.type", response_format={"type": "xml"}),
    _chat("frobnicate", UNKNOWN, frobnicate=1),
    _chat("prompt", UNKNOWN, prompt="x"),
    _chat("chat_template", UNKNOWN, chat_template="{{ x }}"),
    _chat("lora_path", UNKNOWN, lora_path="/etc/passwd"),
    _chat("guided_regex", UNKNOWN, guided_regex="a*"),
    *(_chat(name, UNKNOWN, **{name: 1}) for name in ("x-foo", "", "a b", "x` - at `$.model")),
    _chat("stream_options.a-b", UNKNOWN, stream=True, stream_options={"a-b": 1}),
    *(
        Case(CHAT, b'{"model": "m", "messages": [{"role": "user", "content": "x"}], %b}' % field, param, code=code)
        for field, param, code in (
            (b'"temperature": 1e400', "temperature", "invalid_value"),
            (b'"max_tokens": 1e400', "max_tokens", "invalid_value"),
            (b'"metadata": 1e400', "metadata", "invalid_value"),
            (b'"seed": ' + b"9" * 600, "seed", "invalid_value"),
            (b'"seed": ' + b"9" * 6000, None, INVALID_JSON),
            (b'"user": "\\ud800"', None, INVALID_JSON),
            (b'"temperature": "\xff"', None, INVALID_JSON),
        )
    ),
    _chat("functions", UNSUPPORTED, functions=[{"name": "f"}]),
    _chat("stream_options.x", UNKNOWN, stream=True, stream_options={"x": True}),
    Case(COMPLETIONS, {"model": MODEL, "prompt": "Hi", "max_tokens": -3}, "max_tokens"),
    Case(COMPLETIONS, {"model": MODEL, "prompt": "Hi", "best_of": 5}, "best_of", code=UNSUPPORTED),
    Case(COMPLETIONS, {"model": MODEL, "prompt": "Hi", "suffix": 3}, "suffix"),
    Case(COMPLETIONS, {"model": MODEL, "prompt": {"a": 1}}, "prompt"),
    Case(RESPONSES, {"model": MODEL, "input": "Hi", "max_output_tokens": 0}, "max_output_tokens"),
    _response("previous_response_id", UNSUPPORTED, previous_response_id="resp_1"),
    _response("background", UNSUPPORTED, background=True),
    _response("input", input=3),
    _response("text.format.schema", MISSING, text={"format": {"type": "json_schema", "name": "a"}}),
    _response("text.format.schema", text={"format": {"type": "json_schema", "name": "a", "schema": DEEP}}),
    _response("text.format.schema", text={"format": {"type": "json_schema", "name": "a", "schema": {"type": "x"}}}),
    _response("text.format.name", text={"format": {"type": "json_schema", "name": "a" * 65, "schema": {}}}),
    _response("tools[0].parameters", tools=[{"type": "function", "name": "f", "parameters": DEEP}]),
    _response("tools[0].name", tools=[{"type": "function", "name": "f f"}]),
    _response("input[0].content", MISSING, input=[{"role": "user"}], instructions="Be brief."),
    _response("input[1].name", input=[{"role": "user", "content": "x"}, {"type": "function_call", "name": "a" * 65}]),
    _response("input[0].name", MISSING, input=[{"type": "function_call", "arguments": "{}"}]),
    _response("input[0].call_id", MISSING, input=[{"type": "function_call_output", "output": "x"}], instructions="x"),
    _response("max_output_tokens", max_output_tokens=2**30),
    _response("temperature", temperature=9),
    Case(EMBEDDINGS, {"model": MODEL}, "input", code=MISSING),
]  # fmt: skip


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
