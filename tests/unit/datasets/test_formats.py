import csv
import gzip
import io
import json
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from apps.contracts.chat import RowKind
from apps.core.errors import InvalidValue, MissingParameter
from apps.datasets.validation.formats import Format, Mapping, detect, read_mapping
from apps.datasets.validation.validator import FileValidator, ValidationReport, validate_file
from tests.factories.datasets import chat_row, jsonl

Rows = list[dict[str, Any]]
CALL = '{"name": "find", "arguments": {"n": 1.50}}'


def read(content: bytes, filename: str = "f.jsonl", mapping: Mapping | None = None) -> tuple[Rows, ValidationReport]:
    """Return the rows a file is kept as, and the report on it."""
    reading = FileValidator(
        [content[at : at + 1000] for at in range(0, len(content), 1000)], filename=filename, mapping=mapping
    )
    reading.start()
    kept = b"".join(reading)
    return [json.loads(line) for line in kept.splitlines() if line.strip()], reading.report


def lines(row: dict[str, Any], count: int = 12) -> bytes:
    return (json.dumps(row) + "\n").encode() * count


def table(rows: Rows) -> bytes:
    out = io.StringIO()
    writer = csv.DictWriter(out, rows[0])
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().encode()


def parquet(rows: Rows, **options: Any) -> bytes:
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), out, **options)
    return out.getvalue()


TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}]
CALLING = {
    "messages": [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Find it"},
        {
            "role": "assistant",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "find", "arguments": "{}"}}],
            "weight": 0,
        },
        {"role": "tool", "tool_call_id": "c", "content": "found"},
        {"role": "assistant", "content": "Found."},
    ],
    "tools": TOOLS,
    "parallel_tool_calls": False,
}
PREFERENCE = {
    "input": {"messages": [{"role": "user", "content": "Hi"}]},
    "preferred_output": [{"role": "assistant", "content": "Hello!"}],
    "non_preferred_output": [{"role": "assistant", "content": "What?"}],
}
HELLO = chat_row("Hi", "Hello!")


@pytest.mark.parametrize(
    ("row", "format", "kind", "kept"),
    [
        (CALLING, "chat", "chat", CALLING),
        (PREFERENCE, "preference", "preference", PREFERENCE),
        ({"text": "Once upon a time."}, "text", "text", {"text": "Once upon a time."}),
        ({"prompt": "Hi", "completion": "Hello!", "id": 7}, "prompt_completion", "chat", HELLO),
        ({"question": "Hi", "answer": "Hello!"}, "prompt_completion", "chat", HELLO),
        ({"prompt": HELLO["messages"][:1], "completion": HELLO["messages"][1:]}, "prompt_completion", "chat", HELLO),
        ({"instruction": "Hi", "input": "", "output": "Hello!"}, "instruction", "chat", HELLO),
        ({"instruction": "Add", "input": "1 1", "output": "2"}, "instruction", "chat", chat_row("Add\n\n1 1", "2")),
        (
            {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]},
            "sharegpt",
            "chat",
            HELLO,
        ),
        ({"prompt": "Hi", "chosen": "Hello!", "rejected": "What?"}, "preference_pairs", "preference", PREFERENCE),
        (
            {
                "prompt": "Hi",
                "chosen": [*HELLO["messages"][:1], {"role": "assistant", "content": "Hello!"}],
                "rejected": [*HELLO["messages"][:1], {"role": "assistant", "content": "What?"}],
            },
            "preference_pairs",
            "preference",
            PREFERENCE,
        ),
        (
            {
                "conversations": [{"from": "human", "value": "Hi"}],
                "chosen": {"from": "gpt", "value": "Hello!"},
                "rejected": {"from": "gpt", "value": "What?"},
            },
            "preference_pairs",
            "preference",
            PREFERENCE,
        ),
        (
            {
                "messages": HELLO["messages"][:1],
                "chosen": {"role": "assistant", "content": "Hello!"},
                "rejected": {"role": "assistant", "content": "What?"},
            },
            "preference_pairs",
            "preference",
            PREFERENCE,
        ),
        (
            {"instruction": "Add", "input": "2 and 3", "chosen": '{"from": "me", "value": 5}', "rejected": "6"},
            "preference_pairs",
            "preference",
            {
                "input": {"messages": [{"role": "user", "content": "Add\n\n2 and 3"}]},
                "preferred_output": [{"role": "assistant", "content": '{"from": "me", "value": 5}'}],
                "non_preferred_output": [{"role": "assistant", "content": "6"}],
            },
        ),
    ],
)
def test_a_format_is_recognised_and_kept_as_our_rows(row: dict, format: str, kind: str, kept: dict) -> None:
    rows, report = read(lines(row))

    assert report.errors == ()
    assert report.mapping and (report.mapping.format, report.kind) == (format, kind)
    assert rows == [kept] * 12


@pytest.mark.parametrize(
    ("chosen", "rejected"),
    [(None, None), (True, False), ("Hello!", "What?"), (HELLO["messages"], chat_row("Hi", "What?")["messages"])],
)
def test_a_chat_with_other_columns_stays_a_chat(chosen: object, rejected: object) -> None:
    rows, report = read(parquet([HELLO | {"chosen": chosen, "rejected": rejected}] * 12))

    assert report.errors == () and report.kind == "chat"
    assert rows[0]["messages"] == HELLO["messages"]


def test_a_prompt_that_ends_with_an_answer_is_refused() -> None:
    _, report = read(lines({"prompt": HELLO["messages"], "chosen": "Hello!", "rejected": "What?"}))

    assert "ends with an answer" in report.errors[0].message


def test_input_beside_a_prompt_is_not_used() -> None:
    rows, report = read(lines({"prompt": "Hi", "input": {"a": 1}, "chosen": "Hello!", "rejected": "What?"}))

    assert report.errors == () and rows == [PREFERENCE] * 12


def test_text_that_looks_like_turns_stays_text() -> None:
    text = '[{"from":"2020","value":"5"}]'

    rows, report = read(lines({"prompt": "Hi", "completion": text}))

    assert report.errors == () and rows[0] == chat_row("Hi", text)


def test_turns_are_passed_on_as_the_text_they_stand_in() -> None:
    turns = b'[{"role": "user", "content": "Hi", "name": "\\u00e9"}]'
    reading = FileValidator([b'{"prompt": %s, "completion": "Hello!"}\n' % turns * 12])
    reading.start()

    kept = b"".join(reading)

    assert kept.count(turns[1:-1]) == 12 and reading.report.is_valid


def test_sharegpt_calls_become_tool_calls_with_their_arguments_as_they_stood() -> None:
    turns = [
        {"from": "human", "value": "Find it"},
        {"from": "function_call", "value": CALL},
        {"from": "observation", "value": "found"},
        {"from": "gpt", "value": "Found."},
    ]

    rows, report = read(lines({"conversations": turns, "system": "Be brief."}))

    assert report.errors == ()
    system, _, call, answer, _ = rows[0]["messages"]
    assert system == {"role": "system", "content": "Be brief."}
    assert call["tool_calls"][0]["function"] == {"name": "find", "arguments": '{"n": 1.50}'}
    assert answer == {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "found"}


PAIRS = [{"prompt": f'Hi, {number}\n"you"', "completion": "Hello!"} for number in range(12)]
CHATS = [chat_row(f'Hi, {number}\n"you"', "Hello!") for number in range(12)]


@pytest.mark.parametrize(
    ("content", "filename", "container"),
    [
        (b"".join(json.dumps(row).encode() + b"\n" for row in PAIRS), "a.jsonl", "jsonl"),
        (json.dumps(PAIRS, indent=2).encode(), "a.json", "json"),
        (b"\xef\xbb\xbf" + json.dumps(PAIRS).encode(), "noname", "json"),
        (table(PAIRS), "a.csv", "csv"),
        (table(PAIRS).replace(b",", b"\t").replace(b"Hi\t", b"Hi,"), "a.tsv", "csv"),
        (parquet(PAIRS), "a.parquet", "parquet"),
        (parquet(PAIRS, compression="zstd", use_dictionary=False), "noname", "parquet"),
    ],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_every_container_gives_the_same_rows(content: bytes, filename: str, container: str, zipped: bool) -> None:
    if zipped:
        content, filename = gzip.compress(content), f"{filename}.gz"

    rows, report = read(content, filename)

    assert report.errors == ()
    assert (report.container, report.is_gzip, report.rows) == (container, zipped, 12)
    assert rows == CHATS


def test_a_good_jsonl_file_of_our_rows_is_its_own_rows_byte_for_byte() -> None:
    content = jsonl(40).replace(b'"role": ', b'"role" :   ')
    reading = FileValidator([content])

    reading.start()

    assert reading.is_verbatim
    assert b"".join(reading) == content
    assert reading.report.is_valid


def test_columns_of_messages_in_tables_keep_their_json_and_gain_no_keys() -> None:
    as_text = [
        {
            "messages": json.dumps(CALLING["messages"]),
            "tools": json.dumps(TOOLS),
            "note": "x",
            "parallel_tool_calls": told,
        }
        for told in ("false", "False") * 6
    ]
    mixed = [HELLO, CALLING] * 6

    from_csv, _ = read(table(as_text), "a.csv")
    from_parquet, report = read(parquet([{"messages": row["messages"]} for row in mixed]), "a.parquet")

    assert from_csv == [{"messages": CALLING["messages"], "tools": TOOLS, "parallel_tool_calls": False}] * 12
    assert report.errors == ()
    assert from_parquet == [{"messages": row["messages"]} for row in mixed]


def test_plain_text_is_a_row_for_each_stretch_between_blank_lines() -> None:
    content = "\n\n".join(f"Paragraph {number},\nsecond line é." for number in range(12)).encode()

    rows, report = read(content, "book.txt")

    assert (report.container, report.kind, report.errors) == ("text", "text", ())
    assert rows[3] == {"text": "Paragraph 3,\nsecond line é."}
    _, unparted = read(content.replace(b"\n\n", b"\n"), "book.txt")
    assert unparted.errors[0].fix == "Put a blank line between rows, or add more text."


@pytest.mark.parametrize("write", ["table", "parquet", "lines", "array"])
@pytest.mark.parametrize("zipped", [False, True])
def test_columns_nobody_can_guess_are_asked_for_and_then_read_as_told(write: str, zipped: bool) -> None:
    asked = [{"utterance": f"Hi {number}", "label": "greeting"} for number in range(12)]
    content = {
        "table": table(asked),
        "parquet": parquet(asked),
        "lines": b"".join(lines(row, 1) for row in asked),
        "array": json.dumps(asked).encode(),
    }[write]
    name = "a.csv" if write == "table" else "a"
    if zipped:
        content, name = gzip.compress(content), f"{name}.gz"

    _, report = read(content, name)
    mapping = Mapping(format=Format.PROMPT_COMPLETION, columns={"prompt": "utterance", "completion": "label"})
    rows, mapped = read(content, name, mapping)

    assert [error.code for error in report.errors] == ["unknown_columns"]
    assert report.columns == ("utterance", "label") and len(report.sample) == 5
    assert mapped.errors == () and rows[0] == chat_row("Hi 0", "greeting")


@pytest.mark.parametrize(
    ("content", "filename", "mapping", "code", "line"),
    [
        (lines(PAIRS[0]) + lines({"prompt": "Hi", "completion": None}, 1), "a.jsonl", None, "missing_value", 13),
        (lines(PAIRS[0]) + lines({"prompt": "Hi", "completion": [1]}, 1), "a.jsonl", None, "invalid_value", 13),
        (lines(PAIRS[0]) + b'{"prompt": 1, "prompt": 2, "completion": 3}\n', "a.jsonl", None, "duplicate_key", 13),
        (table(PAIRS) + b"only one\n", "a.csv", None, "invalid_table", 13),
        (table(PAIRS) + b'"never closed,' + b"xxxxx\n" * 200_000, "a.csv", None, "invalid_table", 13),
        (b"a,a\n1,2\n", "a.csv", None, "invalid_table", 1),
        (json.dumps(PAIRS)[:-9].encode(), "a.json", None, "invalid_array", 12),
        (json.dumps([*PAIRS, 5]).encode(), "a.json", None, "not_an_object", 13),
        (json.dumps(PAIRS).encode() + b"x", "a.json", None, "invalid_array", 12),
        (b"[" * 100_000, "a.json", None, "invalid_array", 1),
        (lines({"conversations": [{"from": "ghost", "value": "x"}]}), "a.jsonl", None, "invalid_role", 1),
        (lines({"a": 1, "b": 2}), "a.jsonl", None, "unknown_columns", 1),
        (table(PAIRS), "a.csv", Mapping(format=Format.TEXT, columns={"text": "body"}), "missing_column", 1),
        (gzip.compress(jsonl())[:-20], "a.gz", None, "truncated_file", 1),
        (gzip.compress(gzip.compress(jsonl())), "a.gz", None, "not_jsonl", 1),
        (jsonl().replace(b"Where", b"\xff\xfe", 1), "a.txt", None, "not_utf8", 1),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_its_place(content, filename, mapping, code: str, line: int) -> None:
    report = validate_file([content], filename=filename, mapping=mapping)

    assert (report.errors[0].code, report.errors[0].line) == (code, line)
    assert all(error.message and error.fix for error in report.errors)


def test_rows_without_any_column_are_told_so() -> None:
    [error] = validate_file([lines({})], filename="a.jsonl", mapping=None).errors

    assert (error.code, error.message.endswith("Found: no columns at all.")) == ("unknown_columns", True)


@pytest.mark.parametrize(
    ("rows", "format"),
    [
        ([["text", "label"]], None),
        ([["text", "url", "title"]], Format.TEXT),
        ([["messages"], ["messages"], ["prompt", "completion"]], Format.CHAT),
        ([["prompt", "response", "category"]], Format.PROMPT_COMPLETION),
        ([["instruction", "context", "response"]], Format.INSTRUCTION),
        ([], None),
    ],
)
def test_detection_goes_by_what_most_rows_have(rows: list[list[str]], format: Format | None) -> None:
    found = detect(rows)

    assert (found and found.format) == format


@pytest.mark.parametrize(
    "wrong",
    [
        "nonsense",
        {"format": "alpaca"},
        {"format": "chat", "columns": {"nope": "x"}},
        {"format": "prompt_completion", "columns": {"prompt": "q"}},
        {"columns": {}},
        [],
        {"format": "text", "columns": {"text": "x" * 500}},
    ],
)
def test_a_mapping_that_makes_no_sense_is_refused(wrong: object) -> None:
    with pytest.raises((InvalidValue, MissingParameter)) as refused:
        read_mapping(wrong)

    assert str(refused.value.param).startswith("mapping")


def test_a_mapping_names_its_kind() -> None:
    mapping = read_mapping('{"format": "sharegpt"}')

    assert mapping and mapping.kind is RowKind.CHAT and mapping.columns["conversations"] == "conversations"


def test_long_names_of_columns_are_not_kept() -> None:
    """Every list of files would carry them."""
    rows = b"".join(
        json.dumps({f"{n}" + "x" * 300: 1, "prompt": "a", "completion": "b"}).encode() + b"\n" for n in range(12)
    )

    assert validate_file([rows]).columns == ("prompt", "completion")


@pytest.mark.parametrize(
    ("filename", "row"),
    [
        ("many.jsonl.gz", b'{"messages":[{"role":"user","content":"Hi"},{"role":"assistant","content":"Yes"}]}\n'),
        ("long.csv.gz", b'"' + b"Hi " * 20_000 + b'","Yes"\n'),
    ],
)
def test_progress_is_reported_by_content_and_not_by_the_size_of_the_archive(filename, row):
    """The archive is one piece of some kilobytes; its reader has limits on time that need reports."""
    head = b"prompt,completion\n" if ".csv" in filename else b""
    content = head + row * (4_000_000 // len(row))
    reports = []
    reading = FileValidator([gzip.compress(content)], filename=filename, on_progress=lambda: reports.append(1))

    reading.start()
    for _ in reading:
        pass

    assert reading.report.error_count == 0
    assert len(reports) >= 4  # one for each megabyte
