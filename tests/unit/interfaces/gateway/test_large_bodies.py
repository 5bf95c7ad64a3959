"""Large bodies are refused before they are decoded if that would make too many objects; usual ones pass."""

import json
import time

import pytest

from apps.core.errors import DomainError, InvalidJson
from apps.interfaces.gateway.requests.large_bodies import MAX_PROMPT_IDS, require_decodable

SIZE = 4 * 2**20
HEAD = b'{"model":"m","messages":[{"role":"user","content":"hi"}],'
CALL = {"id": "call_0123456789", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}


def filled(head: bytes, item: bytes, tail: bytes) -> bytes:
    return head + b",".join([item] * (SIZE // (len(item) + 1))) + tail


HOSTILE = {
    "messages": filled(b'{"messages":[', b'{"role":"user","content":"Hi"}', b"]}"),
    "escaped names": filled(b'{"messages":[', b'{"\\u0072ole":"user"}', b"]}"),
    "parts": filled(b'{"messages":[{"role":"user","content":[', b'{"type":"text","text":"\\\\"}', b"]}]}"),
    "ignored field": filled(HEAD + b'"metadata":[', b"[]", b"]}"),
    "schema": filled(HEAD + b'"tools":[{"function":{"parameters":{"a":[', b"[]", b"]}}}]}"),
    "bias": HEAD + b'"logit_bias":{' + b",".join(b'"%d":1' % n for n in range(400_000)) + b"}}",
    "repeated field": filled(b"{", b'"messages":[{}]', b',"messages":[]}'),
    "token ids": filled(b'{"prompt":[', b"1", b"]}"),
    "prompts": filled(b'{"prompt":[', b"[1]", b"]}"),
    "mixed prompts": filled(b'{"prompt":["a",', b"[1]", b"]}"),
    "texts": filled(b'{"prompt":[', b'"a"', b"]}"),
    "no object": filled(b"[", b"[]", b"]"),
    "items": filled(b'{"input":[', b'{"role":"user","content":"Hi"}', b"]}"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_body_of_very_many_values_is_refused_in_little_time(name):
    began = time.process_time()

    with pytest.raises(DomainError) as refused:
        require_decodable(HOSTILE[name])
    assert refused.value.code == "invalid_value"
    assert time.process_time() - began < 0.2


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": 'say "hi" \\ ' * 100_000}]},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [CALL]}] * 2048},
        {"prompt": ["a, [b] " * 50_000] * 8},
        {"prompt": list(range(200_000))},
        {"prompt": [list(range(20_000))] * 8},
        {"prompt": [1] * MAX_PROMPT_IDS},
        {"input": "x" * 1_000_000, "instructions": "y" * 1_000_000, "tools": ["z" * 32_000]},
    ],
)
def test_a_body_that_a_model_can_use_passes(body):
    require_decodable(json.dumps(body).encode())


def test_a_large_body_that_is_no_json_is_refused_as_such():
    with pytest.raises(InvalidJson):
        require_decodable(HEAD + b"x" * 100_000)
