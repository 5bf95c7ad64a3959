"""Chunks are split, metered and joined again, wherever the network cuts them."""

import json
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apps.contracts.serving import MAX_CHOICES
from apps.interfaces.gateway.engines.chunks import EngineChunk, EngineUsage, SseParser, decode_chunk
from apps.interfaces.gateway.engines.meter import Meter, TokenBounds
from apps.interfaces.gateway.surfaces.answers import Assembler, Renderer
from apps.interfaces.gateway.surfaces.response_answers import ResponseRenderer


def chunk(
    index: int | None, text: str = "", *, usage: tuple[int, int] | None = None, finish: str | None = None
) -> bytes:
    choices = [] if index is None else [{"index": index, "delta": {"content": text}, "finish_reason": finish}]
    body: dict = {"choices": choices, "id": "engine", "model": "a-1"}
    if usage:
        body["usage"] = {"prompt_tokens": usage[0], "completion_tokens": usage[1]}
    return json.dumps(body).encode()


@given(texts=st.lists(st.text(max_size=5), max_size=6), cuts=st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_events_are_the_same_however_their_bytes_arrive(texts, cuts):
    payloads = [json.dumps(text).encode() for text in texts]
    stream = b"".join(b"data: " + payload + b"\n\n" for payload in payloads)
    parser, found, place = SseParser(), [], 0
    for turn in range(len(stream)):
        step = cuts[turn % len(cuts)]
        found += parser.feed(stream[place : place + step])
        place += step

    assert found == payloads


def test_an_event_without_end_is_cut_off():
    parser = SseParser()

    with pytest.raises(ValueError, match="too large"):
        list(parser.feed(b"data: " + b"x" * 5 * 2**20))


def meter(choice_count: int, *payloads: bytes) -> Meter:
    found = Meter(choice_count)
    for payload in payloads:
        found.observe(decode_chunk(payload))
    return found


def test_an_answer_cut_short_counts_each_choice_and_its_prompt_once():
    found = meter(2, chunk(0, "a", usage=(9, 1)), chunk(1, "b", usage=(9, 1)), chunk(0, "c", usage=(9, 2)))

    assert (found.input_tokens, found.output_tokens) == (9, 3)


def test_choices_of_several_prompts_count_each_prompt():
    found = meter(2, chunk(0, usage=(9, 1)), chunk(1, usage=(9, 1)), chunk(2, usage=(5, 4)))

    assert (found.input_tokens, found.output_tokens) == (14, 6)


def test_the_sums_at_the_end_decide():
    found = meter(1, chunk(0, "a", usage=(9, 1)), chunk(None, usage=(9, 3)))

    assert (found.input_tokens, found.output_tokens) == (9, 3)
    assert found.total == EngineUsage(9, 3)


def test_zero_tokens_are_zero_and_not_missing():
    assert meter(1, chunk(None, usage=(0, 0))).output_tokens == 0
    assert Meter(1).input_tokens == 0


BOUNDS = TokenBounds(input=300, output=16, possible_input=2048, possible_output=16)


@pytest.mark.parametrize(
    ("claimed", "billed", "is_faulty"),
    [
        ((300, 16), (300, 16), False),
        ((0, 0), (0, 0), False),
        ((301, 16), (300, 16), False),  # a tokenizer may split a byte: not billed, and not the replica's fault
        ((2048, 16), (300, 16), False),
        ((2049, 1), (300, 1), True),
        ((5, 17), (5, 16), True),
        ((10**12, 10**12), (300, 16), True),
        ((2**63, 10**400), (300, 16), True),
        ((-1, 3), (0, 3), True),
        ((5, -(10**12)), (5, 0), True),
    ],
)
@pytest.mark.parametrize("is_whole", [True, False])
def test_no_count_of_a_replica_goes_beyond_what_was_reserved(claimed, billed, is_faulty, is_whole):
    found = Meter(1, BOUNDS)
    found.observe(decode_chunk(chunk(None if is_whole else 0, "a", usage=claimed)))

    told = found.usage()
    assert (told.prompt_tokens, told.completion_tokens) == billed
    if is_whole or min(claimed) >= 0:  # of an answer cut short, a negative count is none
        assert (found.engine_input_tokens, found.output_tokens) == billed
        assert bool(found.fault) is is_faulty
    assert bool(found.excess) is (claimed[0] > 300 or claimed[1] > 16)


def test_counts_of_many_choices_are_bounded_together():
    found = Meter(2, TokenBounds(input=10, output=8, possible_input=40, possible_output=8))
    found.observe(*(decode_chunk(chunk(index, "a", usage=(9, 4))) for index in range(4)))

    assert (found.input_tokens, found.output_tokens, found.engine_input_tokens) == (10, 8, 20)
    assert found.fault


@pytest.mark.parametrize(
    "usage", ['{"prompt_tokens": "9"}', '{"prompt_tokens": 1.5}', '{"prompt_tokens": 1e400}', '{"prompt_tokens": []}']
)
def test_counts_that_are_no_numbers_end_the_answer(usage):
    with pytest.raises(msgspec.DecodeError):
        decode_chunk(b'{"choices": [], "usage": %b}' % usage.encode())


@pytest.mark.parametrize("index", [-1, MAX_CHOICES, 10**9])
def test_a_choice_that_was_not_asked_for_ends_the_answer(index):
    with pytest.raises(msgspec.DecodeError):
        decode_chunk(chunk(index, "a"))


def test_what_an_answer_says_is_counted_here_and_not_believed():
    call = {"index": 0, "function": {"name": "weather", "arguments": "{}"}}
    found = Meter(1)
    for delta in ({"content": "Grüße"}, {"reasoning": "hm"}, {"tool_calls": [call]}, {}):
        found.observe(decode_chunk(json.dumps({"choices": [{"index": 0, "delta": delta}]}).encode()))
    found.observe(decode_chunk(b'{"choices": [{"index": 0, "text": "abc"}], "usage": {"completion_tokens": 500}}'))

    assert found.content_bytes == 7 + 2 + 9 + 3


def test_an_answer_that_says_more_than_its_tokens_can_is_none_and_its_replica_faulty():
    found = Meter(1, BOUNDS)
    found.observe(decode_chunk(chunk(0, "x" * 16 * 1024)))
    assert found.is_sound and not found.fault

    found.observe(decode_chunk(chunk(0, "x")))
    assert not found.is_sound and "without an end" in found.fault


def test_an_answer_of_many_long_tokens_is_sound():
    most = 128 * 20_000
    found = Meter(128, TokenBounds(input=300, output=most, possible_input=2048, possible_output=most))
    found.content_bytes = most * 128
    found.observe(decode_chunk(chunk(0, "x", usage=(9, 20_000))))

    assert found.is_sound and not found.fault


def test_cached_tokens_are_some_of_those_read():
    details = {"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 10**12}}
    found = meter(1, json.dumps({"choices": [], "usage": details}).encode())

    assert found.cached_input_tokens == 9


def test_a_chat_answer_is_put_together_choice_by_choice():
    assembler = Assembler()
    for payload in (chunk(1, "B"), chunk(0, "A"), chunk(0, "a", finish="stop"), chunk(1, "b", finish="length")):
        assembler.add(decode_chunk(payload))
    renderer = Renderer("chatcmpl-1", 7, "ft:x", is_chat=True, wants_usage=False)

    answer = json.loads(renderer.whole(assembler, meter(1, chunk(None, usage=(2, 4)))))

    texts = [(c["index"], c["message"]["content"], c["finish_reason"]) for c in answer["choices"]]
    assert texts == [(0, "Aa", "stop"), (1, "Bb", "length")]
    assert answer["usage"]["total_tokens"] == 6


def test_an_event_carries_our_names_and_usage_only_when_asked():
    seen = [
        json.loads(Renderer("chatcmpl-1", 7, "ft:x", is_chat=True, wants_usage=wants).event(
            decode_chunk(chunk(0, "A", usage=(9, 1)))
        )[6:])
        for wants in (True, False)
    ]  # fmt: skip

    assert [("usage" in event, event.get("usage")) for event in seen] == [(True, None), (False, None)]
    assert {(event["id"], event["model"], event["created"]) for event in seen} == {("chatcmpl-1", "ft:x", 7)}


# --- Responses --------------------------------------------------------------------------------------------------------

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
