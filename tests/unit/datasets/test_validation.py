import gzip
import hashlib
import io
import json
import random
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator

import pytest

from apps.datasets.problems import KEPT_PROBLEMS
from apps.datasets.stream import LINES_PER_OFFSET, MAX_BLANKS
from apps.datasets.validation.validator import ValidationReport, validate_file
from tests.factories.datasets import chat_row, jsonl


def validate(content: bytes, *, chunk: int = 4096) -> ValidationReport:
    return validate_file(content[start : start + chunk] for start in range(0, len(content), chunk))


def line(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"


def zipped() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("train.jsonl", jsonl())
    return buffer.getvalue()


def test_a_good_file_is_counted_and_hashed() -> None:
    report = validate(jsonl(25))

    assert (report.rows, report.error_count, report.is_valid) == (25, 0, True)
    assert report.sha256 == hashlib.sha256(jsonl(25)).hexdigest()


def test_neither_windows_line_ends_nor_blank_lines_nor_a_missing_last_newline_are_errors() -> None:
    content = jsonl().replace(b"\n", b"\r\n\r\n").rstrip()

    assert validate(content).is_valid


@pytest.mark.parametrize("wrap", [bytes, gzip.compress])
@pytest.mark.parametrize("blank", [b"\n", b" "])
def test_a_file_of_blank_lines_or_spaces_is_refused(wrap: Callable[[bytes], bytes], blank: bytes) -> None:
    short, long = (validate(wrap(jsonl() + blank * count + jsonl())) for count in (1_000, 2 * MAX_BLANKS))

    assert short.is_valid and [error.code for error in long.errors] == ["too_many_blanks"]


@pytest.mark.parametrize(
    ("row", "code", "param"),
    [
        ({"messages": [{"role": "robot", "content": "x"}]}, "invalid_role", "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x"}]}, "last_message_not_assistant", "messages[0].role"),
        (chat_row(answer="  "), "empty_assistant_content", "messages[1].content"),
        ({"prompt": "a", "completion": "b"}, "missing_messages", "messages"),
        ([1], "not_an_object", None),
        ({"messages": []}, "invalid_messages", "messages"),
    ],
)
def test_a_bad_row_is_named_by_line_code_field_and_fix(row: object, code: str, param: str | None) -> None:
    report = validate(jsonl() + line(row) + jsonl(1))

    assert (report.rows, report.error_count) == (14, 1)
    error = report.errors[0]
    assert (error.line, error.code, error.param) == (13, code, param)
    assert error.message and error.fix


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "empty_file"),
        (b"\n\n", "empty_file"),
        (jsonl(9), "too_few_rows"),
        (jsonl().decode().encode("utf-16"), "not_utf8"),
        (jsonl() + line(chat_row("é")).decode("unicode_escape").encode("latin-1"), "not_utf8"),
        (jsonl()[:-20], "truncated_last_line"),
        (zipped(), "not_jsonl"),
        (b"PAR1" + bytes(100) + b"PAR1", "invalid_table"),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), "not_jsonl"),
        (b"<!doctype html><html>", "not_jsonl"),
        (bytes(5000), "not_jsonl"),
        (jsonl() + b'{"messages": "\x00"}\n', "nul_character"),
    ],
)
def test_a_file_that_is_not_what_it_says_has_its_own_code(content: bytes, code: str) -> None:
    report = validate(content)

    assert not report.is_valid
    assert code in [error.code for error in report.errors]
    assert all(error.fix for error in report.errors)
    assert report.sha256 == hashlib.sha256(content).hexdigest(), "the hash is known however early a file is rejected"


def test_the_first_errors_are_kept_and_all_are_counted() -> None:
    report = validate(jsonl() + line({"messages": 1}) * 5_000)

    assert report.error_count == 5_000
    assert [error.line for error in report.errors] == list(range(13, 13 + KEPT_PROBLEMS))


def test_a_line_of_50_megabytes_is_refused_with_bounded_memory() -> None:
    def chunks() -> Iterator[bytes]:
        yield jsonl() + b'{"messages": "'
        for _ in range(50 * 4):
            yield b"x" * 256 * 1024
        yield b'"}\n' + jsonl()

    tracemalloc.start()
    report = validate_file(chunks())
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert (report.rows, report.error_count) == (25, 1)
    assert (report.errors[0].line, report.errors[0].code) == (13, "line_too_long")
    assert peak_bytes < 6 * 1024 * 1024


PAIR = {"prompt": "Hi", "completion": "Hello!"}


@pytest.mark.parametrize(
    ("start", "errors"),
    [
        (line(PAIR | {"prompt": "x" * 1_100_000}), ["line_too_long"]),
        (line(PAIR | {"prompt": "x" * 1_100_000}) * 2, ["line_too_long"] * 2),
        (b"\n" + line(PAIR | {"prompt": "x" * 160_000}), []),
        (line(PAIR | {"prompt": "x" * 160_000}), []),
    ],
)
def test_a_long_first_row_does_not_hide_the_format(start: bytes, errors: list[str]) -> None:
    report = validate(start + line(PAIR) * 20)

    assert [error.code for error in report.errors] == errors
    assert report.mapping and report.mapping.format == "prompt_completion"


@pytest.mark.parametrize("end", [b"\n", b""])
@pytest.mark.parametrize("wrap", [bytes, gzip.compress])
def test_a_last_row_is_cut_off_only_where_no_line_break_ends_it(wrap, end: bytes) -> None:
    [error] = validate(wrap(jsonl() + b'{"messages": [' + end)).errors

    assert error.code == ("invalid_json" if end else "truncated_last_line")


def test_many_rows_take_no_more_memory_than_few() -> None:
    row = line(chat_row())

    tracemalloc.start()
    report = validate_file(row * 100 for _ in range(100))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert report.rows == 10_000
    assert peak_bytes < 2 * 1024 * 1024


@pytest.mark.parametrize("chunk", [1, 7, 4096, 10**9])
def test_line_offsets_point_at_line_starts_however_the_file_is_cut(chunk: int) -> None:
    lengths = random.Random(1)
    rows = [line(chat_row("x" * lengths.randrange(80))) for _ in range(3 * LINES_PER_OFFSET + 5)]

    report = validate(b"".join(rows), chunk=chunk)

    starts = [sum(map(len, rows[:number])) for number in range(0, len(rows), LINES_PER_OFFSET)]
    assert list(report.line_offsets) == starts


def test_messages_hold_nothing_the_database_or_a_page_could_choke_on() -> None:
    bad = b'{"\\u0000\\ud800\xe2\x80\xae": 1, "\\u0000\\ud800\xe2\x80\xae": 2}\n'

    report = validate(jsonl() + bad)

    error = report.errors[0]
    assert error.code == "duplicate_key"
    assert not set(error.message) & {"\x00", "\ud800", "\u202e"}
