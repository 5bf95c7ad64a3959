"""Chunks are split, metered and put together again whatever way the network cuts them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apps.gateway.chunks import Assembler, EngineUsage, Meter, Renderer, SseParser, decode_chunk


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
