"""The events of a streamed Response: each item has one place, in the order in which the items began."""

import json
from types import SimpleNamespace

import msgspec

from apps.interfaces.gateway.engines.chunks import EngineChunk
from apps.interfaces.gateway.surfaces.response_answers import ResponseRenderer

CALL = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
METER = SimpleNamespace(finish="stop", input_tokens=1, cached_input_tokens=0, output_tokens=2)


def events_of(*deltas: dict) -> list[dict]:
    renderer = ResponseRenderer("1", 0, "tiny", {})
    chunks = [msgspec.convert({"choices": [{"index": 0, "delta": delta}]}, EngineChunk) for delta in deltas]
    written = b"".join([renderer.opening(), *map(renderer.event, chunks), renderer.closing(METER)])
    return [json.loads(line.removeprefix("data: ")) for line in written.decode().split("\n") if line.startswith("data")]


def test_text_after_a_call_comes_after_it() -> None:
    events = events_of({"tool_calls": [CALL]}, {"content": "Hi"}, {"content": "!"})

    places = {kind: [each["output_index"] for each in events if each["type"] == kind] for kind in (
        "response.output_item.added", "response.output_text.delta", "response.output_item.done",
    )}  # fmt: skip
    assert places == {
        "response.output_item.added": [0, 1],
        "response.output_text.delta": [1, 1],
        "response.output_item.done": [0, 1],
    }
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["function_call", "message"]
    assert output[1]["content"][0]["text"] == "Hi!"


def test_text_before_a_call_comes_first_and_an_empty_answer_is_a_message() -> None:
    def kinds(*deltas: dict) -> list[str]:
        return [item["type"] for item in events_of(*deltas)[-1]["response"]["output"]]

    assert kinds({"content": "Hi"}, {"tool_calls": [CALL]}) == ["message", "function_call"]
    assert kinds({}) == ["message"]
