"""Bad requests to the gateway: each is refused by name, with what to send in its place, and the engine sees none."""

import json
from typing import Any

import pytest

from tests.support.bad_requests import MODEL, Case, filled, problems

pytestmark = pytest.mark.django_db

CHAT, COMPLETIONS, RESPONSES, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"
HI = [{"role": "user", "content": "Hi"}]


def _chat(param: str | None, status: int = 400, **fields: Any) -> Case:
    return Case(CHAT, {"model": MODEL, "messages": HI, "max_tokens": 4} | fields, param, status)


GATEWAY = [
    *(
        Case(path, body)
        for path in (CHAT, COMPLETIONS, RESPONSES)
        for body in (b"{", b"[]", b'{"model": NaN}', b"\xff")
    ),
    Case(CHAT, {"model": MODEL}, "messages"),
    Case(CHAT, {"messages": HI}, "model"),
    Case(COMPLETIONS, {"model": MODEL}, "prompt"),
    Case(RESPONSES, {"model": MODEL}, "input"),
    Case(CHAT, {"model": "no-such", "messages": HI}, "model", 404),
    _chat("messages", messages=[]),
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
    _chat("frobnicate", frobnicate=1),
    _chat("prompt", prompt="x"),
    _chat("chat_template", chat_template="{{ x }}"),
    _chat("lora_path", lora_path="/etc/passwd"),
    _chat("guided_regex", guided_regex="a*"),
    _chat("functions", functions=[{"name": "f"}]),
    _chat("stream_options.x", stream=True, stream_options={"x": True}),
    Case(COMPLETIONS, {"model": MODEL, "prompt": "Hi", "max_tokens": -3}, "max_tokens"),
    Case(COMPLETIONS, {"model": MODEL, "prompt": "Hi", "best_of": 5}, "best_of"),
    Case(COMPLETIONS, {"model": MODEL, "prompt": "Hi", "suffix": 3}, "suffix"),
    Case(COMPLETIONS, {"model": MODEL, "prompt": {"a": 1}}, "prompt"),
    Case(RESPONSES, {"model": MODEL, "input": "Hi", "max_output_tokens": 0}, "max_output_tokens"),
    Case(RESPONSES, {"model": MODEL, "input": "Hi", "previous_response_id": "resp_1"}, "previous_response_id"),
    Case(RESPONSES, {"model": MODEL, "input": "Hi", "background": True}, "background"),
    Case(RESPONSES, {"model": MODEL, "input": 3}, "input"),
    Case(EMBEDDINGS, {"model": MODEL}, "input"),
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
