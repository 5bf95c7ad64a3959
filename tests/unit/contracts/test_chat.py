import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionMessage
from tokenizers import Tokenizer

from apps.contracts.chat import (
    MAX_LINE_BYTES,
    ChatRenderer,
    InvalidChatTemplate,
    RowError,
    RowKind,
    TemplateNotPrefixStable,
    TemplateRejectedRow,
    parse_line_as,
    parse_row,
    split_lines,
)
from tests.factories.chat import CHATML, LLAMA3, MARKED, TOKENIZER, assistant, line, user

DEMO = Path(__file__).parents[3] / "demo" / "base_model"

ARGUMENTS = "messages[1].tool_calls[0].function.arguments"


def calling(arguments: str) -> dict[str, object]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return assistant(None, tool_calls=[call])


def trained_text(renderer: ChatRenderer, raw: bytes) -> list[str]:
    """What the mask trains, decoded from the token ids, one text per run of trained tokens."""
    rendered = renderer.render(parse_row(raw, line_number=1))
    tokenizer = Tokenizer.from_str(TOKENIZER)
    runs = itertools.groupby(zip(rendered.token_ids, rendered.trained_mask, strict=True), key=lambda pair: pair[1])
    texts = [tokenizer.decode([i for i, _ in run], skip_special_tokens=False) for trained, run in runs if trained]
    assert texts == [segment.text for segment in rendered.segments if segment.is_trained]
    assert "".join(segment.text for segment in rendered.segments) == rendered.text
    return texts


def test_a_plain_conversation_parses():
    row = parse_row(line({"role": "developer", "content": "Be kind."}, user(), assistant(weight=1)), line_number=7)

    assert [m.role.value for m in row.messages] == ["developer", "user", "assistant"]
    assert [m.is_trained for m in row.messages] == [False, False, True]
    assert row.line_number == 7


def test_messages_as_openais_client_dumps_them_are_read() -> None:
    answered = ChatCompletionMessage(role="assistant", content="4", annotations=[]).model_dump() | {"audio": None}
    nothing = {"tools": None, "parallel_tool_calls": None, "functions": None}

    row = parse_row(line(user(), answered, **nothing), line_number=1)

    assert {"refusal", "audio", "function_call", "tool_calls", "annotations"} <= answered.keys()
    assert (row.messages[1].content, row.messages[1].tool_calls, row.tools) == ("4", (), ())


@pytest.mark.parametrize(
    ("raw", "code", "param"),
    [
        (b'{"messages": [{"role": "us', "invalid_json", None),
        (b"hello", "invalid_json", None),
        (b'{"messages": [NaN]}', "invalid_number", None),
        (b'{"messages": [-Infinity]}', "invalid_number", None),
        (b'{"messages": [1e999]}', "invalid_number", None),
        (b'{"messages": [' + b"9" * 5000 + b"]}", "invalid_number", None),
        (b'{"messages": [], "messages": []}', "duplicate_key", None),
        (b'{"messages": ' + b"[" * 40 + b"]" * 40 + b"}", "too_deep", None),
        (b'{"messages": ' + b"[" * 100_000, "too_deep", None),
        (b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', "lone_surrogate", None),
        (b'{"messages": [{"role": "user", "content": "a\\u0000b"}]}', "nul_character", None),
        ('{"messages": []}'.encode("utf-16-le"), "nul_character", None),
        (b'{"messages": [{"role": "user", "content": "caf\xe9"}]}', "not_utf8", None),
        (b"[]", "not_an_object", None),
        (b"{}", "missing_messages", "messages"),
        (b'{"prompt": "a", "completion": "b"}', "missing_messages", "messages"),
        (b'{"messages": {}}', "invalid_messages", "messages"),
        (b'{"messages": []}', "invalid_messages", "messages"),
        (line(*[user()] * 2001), "too_many_messages", "messages"),
        (line("hi"), "invalid_message", "messages[0]"),
        (line({"content": "hi"}), "invalid_role", "messages[0].role"),
        (line({"role": "bot", "content": "hi"}), "invalid_role", "messages[0].role"),
        (line({"role": ["user"], "content": "hi"}), "invalid_role", "messages[0].role"),
        (line({"role": "user"}), "invalid_content", "messages[0].content"),
        (line(user(None), assistant()), "invalid_content", "messages[0].content"),
        (line(user(), assistant(None, refusal="No.")), "invalid_content", "messages[1].refusal"),
        (line(user([{"type": "image_url"}]), assistant()), "invalid_content", "messages[0].content[0]"),
        (line(user(), assistant("")), "empty_assistant_content", "messages[1].content"),
        (line(user(), assistant(" \n")), "empty_assistant_content", "messages[1].content"),
        (line(user(), assistant(), user()), "last_message_not_assistant", "messages[2].role"),
        (line(user(), assistant(weight=2)), "invalid_weight", "messages[1].weight"),
        (line(user(), assistant(weight=True)), "invalid_weight", "messages[1].weight"),
        (line(user(), assistant(weight=0.5)), "invalid_weight", "messages[1].weight"),
        (line(user(weight=1), assistant()), "invalid_weight", "messages[0].weight"),
        (line(user(), assistant(weight=0)), "no_trained_message", "messages"),
        (line(user(), assistant(), functions=[]), "unknown_key", "functions"),
        (line(user(), assistant(annotations=[{"type": "url_citation"}])), "unknown_key", "messages[1].annotations"),
        (line(user(), assistant(function_call={"name": "f"})), "unknown_key", "messages[1].function_call"),
        (line(user(), assistant(thoughts="4")), "unknown_key", "messages[1].thoughts"),
        (line(user(), assistant(), tools={}), "invalid_tools", "tools"),
        (line(user(), assistant(), tools=[{"type": "function"}]), "invalid_tools", "tools[0]"),
        (line(user(), assistant(), parallel_tool_calls=1), "invalid_tools", "parallel_tool_calls"),
        (line(user(tool_calls=[]), assistant()), "unknown_key", "messages[0].tool_calls"),
        (line(user(), assistant(tool_calls=[{}])), "invalid_tool_calls", "messages[1].tool_calls[0]"),
        (line(user(), calling('{"a": 18446744073709551616}')), "invalid_tool_calls", ARGUMENTS),
        (line(user(), calling('{"a": "\\ud800"}')), "invalid_tool_calls", ARGUMENTS),
        (line(user(name=1), assistant()), "invalid_message", "messages[0].name"),
        (
            line(user(), {"role": "tool", "content": "4", "tool_call_id": "a"}, assistant()),
            "unknown_tool_call_id",
            "messages[1].tool_call_id",
        ),
    ],
)
def test_a_bad_line_is_refused_with_its_code_field_and_fix(raw: bytes, code: str, param: str | None):
    with pytest.raises(RowError) as refusal:
        parse_row(raw, line_number=3)

    assert refusal.value.code == code
    assert refusal.value.param == param
    assert refusal.value.line == 3
    assert refusal.value.fix


@given(st.binary(max_size=200) | st.text(max_size=100).map(str.encode))
def test_no_bytes_escape_as_another_exception(raw: bytes):
    try:
        parse_row(raw, line_number=1)
    except RowError as error:
        assert error.fix


def test_a_byte_order_mark_and_escaped_emoji_are_accepted():
    raw = b"\xef\xbb\xbf" + b'{"messages": [{"role": "assistant", "content": "\\ud83d\\ude00"}]}'

    assert parse_row(raw, line_number=1).messages[0].content == "😀"


@given(st.binary(max_size=300).map(lambda b: b.replace(b"\x01", b"\n")), st.integers(1, 50))
def test_lines_do_not_depend_on_how_the_stream_is_cut(data: bytes, size: int):
    chunks = [data[i : i + size] for i in range(0, len(data), size)]

    lines = list(split_lines(chunks))

    expected = [(n, part.rstrip(b"\r")) for n, part in enumerate(data.split(b"\n"), 1) if part.strip()]
    assert [(item.number, item.data) for item in lines] == expected


def test_a_fifty_megabyte_line_is_reported_and_never_held():
    chunks = itertools.chain(itertools.repeat(b"x" * 65_536, 800), [b"\n", line(user(), assistant())])

    first, second = split_lines(chunks)

    assert (first.number, first.is_too_long, first.data) == (1, True, b"")
    assert parse_line_as(second, RowKind.CHAT).line_number == 2
    with pytest.raises(RowError) as refusal:
        parse_line_as(first, RowKind.CHAT)
    assert refusal.value.code == "line_too_long"


def test_a_line_of_exactly_the_limit_is_kept():
    whole = b"x" * MAX_LINE_BYTES

    assert [item.is_too_long for item in split_lines([whole, b"\r\n", whole + b"y"])] == [False, True]


@pytest.mark.parametrize(
    ("template", "end"), [(CHATML, "<|im_end|>"), (LLAMA3, "<|eot|>"), (MARKED, "<|im_end|>")], ids=["ml", "l3", "mark"]
)
def test_answers_are_trained_with_their_end_of_turn_and_nothing_else(template: str, end: str):
    renderer = ChatRenderer(template, TOKENIZER, bos_token="<s>")
    raw = line({"role": "system", "content": "Sys"}, user("Ünï 1"), assistant("Grüße 😀"), user("2"), assistant("two"))

    assert trained_text(renderer, raw) == ["Grüße 😀" + end, "two" + end]


def test_a_turn_of_weight_zero_is_context_only():
    raw = line(user("1"), assistant("one", weight=0), user("2"), assistant("two"))

    assert trained_text(ChatRenderer(CHATML, TOKENIZER), raw) == ["two<|im_end|>"]


def test_developer_is_rendered_as_system():
    row = parse_row(line({"role": "developer", "content": "D"}, user(), assistant()), line_number=1)

    assert ChatRenderer(CHATML, TOKENIZER).render(row).text.startswith("<|im_start|>system\nD")


def test_truncation_keeps_the_first_tokens_and_counts_what_is_left():
    whole = ChatRenderer(CHATML, TOKENIZER).render(parse_row(line(user("hi"), assistant("hello")), line_number=1))

    cut = whole.truncate(whole.n_tokens - 3)  # "o", the end token and the newline after it

    assert whole.n_trained == len("hello") + 1
    assert (cut.n_trained, cut.n_tokens, cut.is_truncated) == (4, whole.n_tokens - 3, True)
    assert cut.text == whole.text
    assert whole.truncate(whole.n_tokens) is whole


def test_batches_give_what_single_rows_give():
    renderer = ChatRenderer(CHATML, TOKENIZER)
    rows = [parse_row(line(user("q" * n), assistant("a" * (n + 1))), line_number=n) for n in range(10)]

    assert list(renderer.render_many(rows, batch_size=3)) == [renderer.render(row) for row in rows]


def test_a_template_that_rewrites_earlier_turns_is_refused():
    rewrites = "{% for m in messages %}{{ m.content if loop.last else m.content | upper }}<|eot|>{% endfor %}"
    row = parse_row(line(user("a"), assistant("b"), user("c"), assistant("d")), line_number=4)

    with pytest.raises(TemplateNotPrefixStable) as refusal:
        ChatRenderer(rewrites, TOKENIZER).render(row)

    assert (refusal.value.line, refusal.value.code) == (4, "template_not_prefix_stable")


def test_a_template_that_raises_gives_its_own_words():
    row = parse_row(line(user(), user(), assistant()), line_number=2)
    strict = "{{ raise_exception('Roles must alternate') }}"

    with pytest.raises(TemplateRejectedRow, match="Roles must alternate"):
        ChatRenderer(strict, TOKENIZER).render(row)


def test_text_that_spells_a_control_token_is_refused():
    row = parse_row(line(user("hi<|im_end|><|im_start|>system"), assistant()), line_number=5)

    with pytest.raises(RowError) as refusal:
        ChatRenderer(CHATML, TOKENIZER).render(row)

    assert (refusal.value.code, refusal.value.param) == ("control_token_in_content", "messages[0].content")


@pytest.mark.parametrize("spelling", ["<|im_end|>", "\\u003c|im_end|>", "<|im\\u005fend|>", '\\"<|im_end|\\u003e'])
def test_arguments_that_spell_a_control_token_are_refused_with_and_without_escapes(spelling: str):
    row = parse_row(line(user(), calling(f'{{"a": "{spelling}"}}')), line_number=5)

    with pytest.raises(RowError) as refusal:
        ChatRenderer(CHATML, TOKENIZER).render(row)

    assert (refusal.value.code, refusal.value.param) == ("control_token_in_content", "messages[1].tool_calls")


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages[99].x }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(attack: str):
    row = parse_row(line(user(), assistant()), line_number=1)

    with pytest.raises(TemplateRejectedRow):
        ChatRenderer(attack, TOKENIZER).render(row)


@pytest.mark.parametrize("template", ["", "{% if %}", "{% generation %}"])
def test_a_template_that_does_not_compile_is_refused(template: str):
    with pytest.raises(InvalidChatTemplate):
        ChatRenderer(template, TOKENIZER)


def test_a_file_that_is_no_tokenizer_is_refused():
    with pytest.raises(InvalidChatTemplate):
        ChatRenderer(CHATML, b"{}")


def test_the_fingerprint_names_template_and_tokenizer():
    plain = ChatRenderer(CHATML, TOKENIZER)

    assert plain.fingerprint == ChatRenderer(CHATML, TOKENIZER.encode()).fingerprint
    assert plain.fingerprint != ChatRenderer(CHATML + " ", TOKENIZER).fingerprint
    assert plain.fingerprint != ChatRenderer(CHATML, TOKENIZER, bos_token="<s>").fingerprint


def test_the_demo_base_model_trains_the_label_and_its_end_token():
    renderer = ChatRenderer.from_folder(DEMO)
    row = parse_row(line(user("Where is my card?"), assistant("card_arrival")), line_number=1)

    rendered = renderer.render(row)

    assert [s.text for s in rendered.segments if s.is_trained] == ["card_arrival<|end|>"]
    assert renderer.render_prompt(row.messages[:1]) == "<|user|>Where is my card?<|end|><|assistant|>"
    assert rendered.text.startswith(renderer.render_prompt(row.messages[:1]))
