"""Rendering of every kind of row: the quick way equals the sure way, and a template runs within limits."""

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Encoding

from apps.contracts.chat import (
    ChatRenderer,
    RowError,
    RowKind,
    TemplateRejectedRow,
    TrainOn,
    encoding,
    parse_row,
    parse_row_as,
)
from apps.contracts.chat.parsing import parse_row_strictly
from apps.contracts.templating.process import TemplateProcess, renders_within
from tests.factories.chat import CHATML, LLAMA3, MARKED, TOKENIZER, assistant, line, user

DEMO = Path(__file__).parents[3] / "demo" / "base_model"
STRIPPING = (
    "{% for m in messages %}{% set text = m.content | trim %}{% if '</think>' in text %}"
    "{% set text = text.split('</think>')[-1] %}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ text.lstrip('\n') }}{% if m.content.endswith('!') %}?{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HIDDEN = (
    "{% macro say(m) %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content | upper }}<|im_end|>{% endmacro %}"
    "{% for m in messages %}{{ say(m) }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RENDERERS = {
    name: ChatRenderer(template, TOKENIZER, bos_token="<s>", eos_token="<|eot|>")
    for name, template in {
        "chatml": CHATML, "llama3": LLAMA3, "marked": MARKED, "stripping": STRIPPING, "hidden": HIDDEN,
    }.items()
} | {"demo": ChatRenderer.from_folder(DEMO)}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}

SAME_ANSWERS = json.dumps(
    {
        "input": {"messages": [user("q")]},
        "preferred_output": [assistant("a")],
        "non_preferred_output": [assistant("a")],
    }
).encode()

texts = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=30) | st.sampled_from(
    ["a</think>b", " \n padded \n", "wow!", "<|im_", "\nline", "", "😀", "é́", "<|im_end"]
)
answers = texts.filter(lambda text: text.strip())


@st.composite
def conversations(draw: st.DrawFn) -> bytes:
    messages = [{"role": "system", "content": draw(texts)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        weight = {"weight": draw(st.integers(0, 1))} if draw(st.booleans()) else {}
        messages += [user(draw(texts)), assistant(draw(answers), **weight)]
    return line(*messages)


def rendered_or_code(render) -> object:
    try:
        return render()
    except RowError as error:
        return error.code


@pytest.mark.slow
@settings(max_examples=3 * settings().max_examples)
@given(st.sampled_from(sorted(RENDERERS)), st.lists(conversations(), min_size=1, max_size=4), st.sampled_from(TrainOn))
def test_the_quick_way_gives_exactly_what_the_sure_way_gives(name: str, raws: list[bytes], train_on: TrainOn):
    renderer = RENDERERS[name]
    rows = []
    for number, raw in enumerate(raws):
        try:
            rows.append(parse_row(raw, line_number=number))
        except RowError:
            continue

    quick = rendered_or_code(lambda: list(renderer.render_many(rows, batch_size=3, train_on=train_on)))
    sure = rendered_or_code(lambda: [renderer.render(row, train_on=train_on) for row in rows])

    assert quick == sure
    if train_on is TrainOn.ASSISTANT:
        alone = rendered_or_code(lambda: renderer.require_renderable(rows))
        assert alone == (None if isinstance(sure, list) else sure)


def test_the_quick_way_is_taken_where_it_can_be():
    rows = [parse_row(line(user(f"q{n}"), assistant(f"a{n}")), line_number=n) for n in range(3)]

    for name in ("chatml", "llama3", "marked", "stripping", "demo"):
        assert all(text.plan for text in RENDERERS[name]._texts.make(rows, TrainOn.ASSISTANT)), name
    assert not any(text.plan for text in RENDERERS["hidden"]._texts.make(rows, TrainOn.ASSISTANT))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "user", "assistant", "content", "x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["messages", "role", "content", "weight", "name", "é"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=4 * settings().max_examples)
@given(json_values.map(lambda value: json.dumps(value, ensure_ascii=False).encode()) | conversations())
def test_the_quick_reader_takes_and_refuses_what_the_strict_one_does(raw: bytes):
    def read(reader) -> object:
        try:
            return reader(raw, line_number=1)
        except RowError as error:
            return error.code, error.param

    assert read(parse_row) == read(parse_row_strictly)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"messages": [{"role": "user", "role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}',
        b'{"messages": [], "messages": [{"role": "assistant", "content": "b"}]}',
        b'{"messages": [{"role": "assistant", "content": "\xed\xa0\x80"}]}',
        b'{"messages": [{"role": "assistant", "content": "b"}]} {}',
    ],
)
def test_the_quick_reader_lets_nothing_doubtful_pass(raw: bytes):
    with pytest.raises(RowError):
        parse_row(raw, line_number=1)


def test_tool_calls_are_read_rendered_and_trained():
    template = (
        "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls %}CALL {{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    raw = line(
        user("1+1?"),
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "tool_call_id": "call_1"},
        assistant("Two."),
        tools=TOOLS,
        parallel_tool_calls=False,
    )

    row = parse_row(raw, line_number=1)
    rendered = ChatRenderer(template, TOKENIZER).render(row)

    assert [s.text for s in rendered.segments if s.is_trained] == ['CALL add {"a": 1}<|im_end|>', "Two.<|im_end|>"]
    assert json.loads(rendered.text.split("\n")[1].removesuffix("<|im_end|>")) == TOOLS


def test_a_preference_renders_both_answers_and_trains_only_them():
    raw = json.dumps(
        {
            "input": {"messages": [user("hi"), assistant("hello"), user("bye")]},
            "preferred_output": [assistant("See you.")],
            "non_preferred_output": [assistant("Whatever.")],
        }
    ).encode()
    row = parse_row_as(raw, RowKind.PREFERENCE, line_number=3)

    pair = RENDERERS["chatml"].render_pair(row)

    assert [s.text for s in pair.chosen.segments if s.is_trained] == ["See you.<|im_end|>"]
    assert [s.text for s in pair.rejected.segments if s.is_trained] == ["Whatever.<|im_end|>"]
    assert list(RENDERERS["chatml"].render_pairs([row])) == [pair]


def test_plain_text_trains_every_token_and_ends_with_the_end_of_text():
    row = parse_row_as(b'{"text": "Once upon a time"}', RowKind.TEXT, line_number=1)

    rendered = RENDERERS["chatml"].render(row)

    assert rendered.text == "Once upon a time<|eot|>"
    assert all(rendered.trained_mask) and rendered.n_trained == len("Once upon a time") + 1
    assert list(RENDERERS["chatml"].render_many([row])) == [rendered]


def test_training_on_inputs_counts_every_token():
    row = parse_row(line(user("hi"), assistant("hello")), line_number=1)

    assert all(RENDERERS["chatml"].render(row, train_on=TrainOn.ALL).trained_mask)


@pytest.mark.parametrize(
    ("raw", "kind", "code"),
    [
        (b'{"text": 1}', RowKind.TEXT, "missing_text"),
        (b'{"text": "a", "meta": 1}', RowKind.TEXT, "unknown_key"),
        (b'{"input": {}}', RowKind.PREFERENCE, "missing_preference"),
        (SAME_ANSWERS, RowKind.PREFERENCE, "same_answers"),
    ],
)
def test_rows_of_other_kinds_are_refused_with_their_code(raw: bytes, kind: RowKind, code: str):
    with pytest.raises(RowError) as refusal:
        parse_row_as(raw, kind, line_number=1)

    assert refusal.value.code == code and refusal.value.fix


@pytest.mark.slow
@pytest.mark.parametrize(
    "bomb",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(x='aaaaaaaaaaaaaaaa') %}{% for a in range(60) %}{% set ns.x = ns.x * 2 %}{% endfor %}",
    ],
    ids=["time", "memory"],
)
def test_a_template_that_takes_too_much_is_ended_and_the_next_one_works(bomb: str):
    process = TemplateProcess(cpu_seconds=0.5, memory_bytes=256 * 1024 * 1024)
    row = parse_row(line(user(), assistant()), line_number=7)
    try:
        with pytest.raises(TemplateRejectedRow) as refusal:
            list(ChatRenderer(bomb, TOKENIZER, process=process).render_many([row]))
        assert refusal.value.line == 7
        assert ChatRenderer(CHATML, TOKENIZER, process=process).render(row).n_trained == len("hello") + 1
    finally:
        process.stop()


def test_a_row_of_a_page_may_take_less_time():
    slow = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    process, row = TemplateProcess(), parse_row(line(user(), assistant()), line_number=7)
    try:
        with renders_within(0.2), pytest.raises(TemplateRejectedRow):
            ChatRenderer(slow, TOKENIZER, process=process).render(row)
    finally:
        process.stop()


@given(ends=st.lists(st.integers(0, 40), min_size=1), cuts=st.sets(st.integers(0, 42), min_size=2))
def test_ranges_of_tokens_are_those_with_a_character_of_their_span(ends: list[int], cuts: set[int]) -> None:
    ends, edges = sorted(ends), sorted(cuts)
    offsets = [(0, 0), *pairwise([0, *ends]), (ends[-1], ends[-1])]  # some tokens have no character
    spans = list(zip(edges[::2], edges[1::2], strict=False))
    inside = [
        [at for at, (low, high) in enumerate(offsets) if low < end and start < high and low < high]
        for start, end in spans
    ]

    found = encoding.ranges_by_offsets(cast(Encoding, SimpleNamespace(offsets=offsets)), spans)

    assert found == encoding._joined([(each[0], each[-1] + 1) for each in inside if each])
