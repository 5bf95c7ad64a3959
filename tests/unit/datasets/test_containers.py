"""What a file is taken for, and values of its rows that text has no form for or that are not trained on."""

import io
import json
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from apps.datasets.problems import MAX_LINE_BYTES
from apps.datasets.validation.validator import FileValidator, ValidationReport, validate_file
from tests.factories.datasets import chat_row

PAIR = {"prompt": "Hi", "completion": "Hello!"}


def read(content: bytes, filename: str = "f.jsonl") -> tuple[list[dict[str, Any]], ValidationReport]:
    """Return the rows a file is kept as, and the report on it."""
    reading = FileValidator([content], filename=filename)
    reading.start()
    kept = b"".join(reading)
    return [json.loads(line) for line in kept.splitlines() if line.strip()], reading.report


def parquet(*rows: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), out)
    return out.getvalue()


@pytest.mark.parametrize(
    ("filename", "start", "container"),
    [
        ("a.md", "[link](http://example.com)", "text"),
        ("a.txt", "[00:01] Hello.", "text"),
        ("a.md", "{note} Hello.", "text"),
        ("a.txt", ' [\n {"text": "a"}]', "json"),
        ("a.txt", '{ "text": "a"}', "jsonl"),
        ("a.txt", "{'text': 'a'}", "jsonl"),
        ("a.json", "[00:01]", "json"),
        ("a", "{note}", "jsonl"),
    ],
)
def test_text_may_begin_with_a_bracket(filename, start, container) -> None:
    assert validate_file([start.encode()], filename=filename).container == container


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spare",
    [
        b"1600000000000000000000",
        b"NaN",
        b'[Infinity, {"a": -Infinity}]',
        b'"\\ud800"',
        b'"\\u0000"',
        b'{"a": [1, 2], "b": "},\\"x"}',
    ],
)
def test_a_column_that_is_not_trained_on_may_hold_anything(spare) -> None:
    rows, report = read(b'{"id": %s, "prompt": 1.50 , "more" : %s, "completion": "Hello!"}\n' % (spare, spare) * 12)

    assert report.errors == () and report.columns == ("id", "prompt", "more", "completion")
    assert rows == [chat_row("1.50", "Hello!")] * 12


@pytest.mark.parametrize("spare", [1600000000000000000, float("nan"), b"\xff\xd8 an image"])
def test_a_column_of_parquet_that_is_not_trained_on_may_hold_anything(spare) -> None:
    rows, report = read(parquet(*[PAIR | {"id": spare}] * 12))

    assert report.errors == () and rows == [chat_row("Hi", "Hello!")] * 12


@pytest.mark.parametrize(
    ("value", "code"), [(b"NaN", "invalid_number"), (b"1" * 19, "invalid_number"), (b'"\\ud800"', "lone_surrogate")]
)
def test_a_refused_value_names_its_column(value, code) -> None:
    _, report = read(b'{"prompt": "Hi", "spare": NaN, "completion": %s}\n' % value * 12)

    assert {(error.code, error.param) for error in report.errors} == {(code, "completion")}
    assert report.columns == ("prompt", "spare", "completion")


def test_bytes_of_parquet_are_text_where_they_can_be() -> None:
    turns = [{"role": b"user", "content": "Grüße".encode()}, {"role": b"assistant", "content": b"Hello!"}]
    chats, chat = read(parquet(*[{"messages": turns}] * 12))
    _, report = read(parquet(*[PAIR | {"completion": b"ok"}] * 11, PAIR | {"completion": b"\xff"}))

    assert chat.errors == () and chats == [chat_row("Grüße", "Hello!")] * 12
    assert [(error.line, error.param, error.message) for error in report.errors] == [
        (12, "completion", "`completion` is not text.")
    ]


@pytest.mark.parametrize("name", ["\\u0000", "\\ud800"])
def test_a_column_whose_name_the_database_cannot_hold_is_not_listed(name) -> None:
    assert read(b'{"%s": 1, "prompt": "a", "completion": "b"}\n' % name.encode() * 12)[1].columns == (
        "prompt", "completion",
    )  # fmt: skip


# --- tables -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("header", [b"", b"prompt,completion\n"])
def test_a_row_of_a_table_ends_somewhere(header) -> None:
    value = b'"' + b"word word\n" * (MAX_LINE_BYTES // 20) + b'",'

    [error] = validate_file([header, *[value] * 8], filename="a.csv").errors

    assert (error.code, error.line) == ("invalid_table", 1) and "is longer than 2 MiB" in error.message


def test_a_table_has_a_limit_of_columns() -> None:
    header = ",".join(f"c{number}" for number in range(5_001))

    [error] = validate_file([header.encode() + b"\n"], filename="a.csv").errors

    assert (error.code, error.message) == (
        "invalid_table", "The header names 5,001 columns; a table may have 5,000.",
    )  # fmt: skip
