"""Files that are no training data, or lie about what they are: each is refused by its own code, with a way to fix it.

What is made to exhaust memory is in test_hostile_files.py, each in a process of its own.
"""

import bz2
import gzip
import io
import json
import lzma
import random
import struct
import tarfile
import zipfile
from collections.abc import Callable
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from apps.datasets.validation.validator import ValidationReport, validate_file
from tests.factories.datasets import chat_row, jsonl

GOOD = jsonl(20)
CSV = b"prompt,completion\n" + b"a,b\n" * 12
NOISE = random.Random(5).randbytes(60_000)


def judge(content: bytes, filename: str) -> ValidationReport:
    return validate_file([content[at : at + 65_536] for at in range(0, len(content), 65_536)], filename=filename)


def zipped(name: str = "../../etc/passwd", content: bytes = b"0" * 5_000_000) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, content)
    return out.getvalue()


def tarred() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        link = tarfile.TarInfo("train.jsonl")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    return out.getvalue()


def parquet(table: pyarrow.Table) -> bytes:
    out = io.BytesIO()
    pyarrow.parquet.write_table(table, out)
    return out.getvalue()


PARQUET = parquet(pyarrow.table({"text": ["x"] * 12}))


def nested_parquet() -> bytes:
    kind: Any = pyarrow.string()
    value: Any = "x"
    for _ in range(60):
        kind, value = pyarrow.list_(kind), [value]
    return parquet(pyarrow.table({"text": pyarrow.array([value] * 12, kind)}))


def twice_named() -> bytes:
    columns = [pyarrow.array(["a"] * 12), pyarrow.array(["b"] * 12)]
    return parquet(pyarrow.Table.from_arrays(columns, names=["text", "text"]))


def many_nulls() -> bytes:
    return parquet(pyarrow.table({"text": pyarrow.nulls(3_000_000, pyarrow.string())}))


def no_text() -> bytes:
    words = pyarrow.array([b"\xff\xfe"] * 12, pyarrow.binary()).view(pyarrow.string())
    return parquet(pyarrow.table({"text": words}))


FILES: dict[str, tuple[bytes | Callable[[], bytes], str, str]] = {
    "zip": (zipped, "a.zip", "not_jsonl"),
    "zip named jsonl": (zipped, "a.jsonl", "not_jsonl"),
    "spreadsheet": (lambda: zipped("xl/workbook.xml", b"<x/>"), "a.xlsx", "not_jsonl"),
    "tar with a symlink": (tarred, "a.tar", "not_jsonl"),
    "tar in gzip": (lambda: gzip.compress(tarred()), "a.jsonl.gz", "not_jsonl"),
    "gzip in gzip": (lambda: gzip.compress(gzip.compress(GOOD)), "a.jsonl.gz", "not_jsonl"),
    "zip in gzip": (lambda: gzip.compress(zipped()), "a.jsonl.gz", "not_jsonl"),
    "bzip2": (bz2.compress(GOOD), "a.jsonl.bz2", "not_jsonl"),
    "xz": (lzma.compress(GOOD), "a.jsonl.xz", "not_jsonl"),
    "gzip cut off": (gzip.compress(GOOD)[:-20], "a.jsonl.gz", "truncated_file"),
    "gzip with a wrong checksum": (gzip.compress(GOOD)[:-8] + bytes(8), "a.jsonl.gz", "truncated_file"),
    "gzip and more": (gzip.compress(GOOD) + b"more", "a.jsonl.gz", "truncated_file"),
    "gzip of nothing": (gzip.compress(b""), "a.jsonl.gz", "empty_file"),
    "start of a gzip": (b"\x1f\x8b", "a.jsonl.gz", "truncated_file"),
    "empty": (b"", "a.jsonl", "empty_file"),
    "blank lines": (b"\n" * 5_000, "a.jsonl", "empty_file"),
    "NUL bytes": (bytes(50_000), "a.jsonl", "not_jsonl"),
    "noise": (NOISE, "a.jsonl", "not_jsonl"),
    "UTF-16": (GOOD.decode().encode("utf-16"), "a.jsonl", "not_utf8"),
    "UTF-16 without a mark": (GOOD.decode().encode("utf-16-le"), "a.jsonl", "not_jsonl"),
    "old Mac lines": (GOOD.replace(b"\n", b"\r"), "a.jsonl", "not_jsonl"),
    "old Mac table": (CSV.replace(b"\n", b"\r"), "a.csv", "not_jsonl"),
    "HTML": (b"<!DOCTYPE html><html></html>", "a.jsonl", "not_jsonl"),
    "XML with entities": (b'<?xml version="1.0"?><!DOCTYPE l [<!ENTITY a "b">]>', "a.jsonl", "not_jsonl"),
    "PDF": (b"%PDF-1.7", "a.jsonl", "not_jsonl"),
    "PDF and rows": (b"%PDF-1.4\n" + GOOD, "a.jsonl", "not_jsonl"),
    "rows and a zip": (GOOD + zipped(), "a.jsonl", "nul_character"),
    "PNG": (b"\x89PNG\r\n\x1a\n", "a.jsonl", "not_jsonl"),
    "program": (b"\x7fELF", "a.jsonl", "not_jsonl"),
    "pickle": (b"\x80\x04\x95" + b"x" * 50, "a.jsonl", "not_jsonl"),
    "weights": (struct.pack("<Q", 100) + json.dumps({"w": {"dtype": "F32"}}).encode(), "a.jsonl", "not_jsonl"),
    "Arrow": (b"ARROW1\0\0", "a.parquet", "not_jsonl"),
    "JSON of one object": (json.dumps({"data": [chat_row()] * 12}).encode(), "a.json", "unknown_columns"),
    "array cut off": (json.dumps([chat_row()] * 12).encode()[:-1], "a.json", "invalid_array"),
    "array of numbers": (json.dumps(list(range(12))).encode(), "a.json", "not_an_object"),
    "array and a comma": (json.dumps([chat_row()] * 12).encode()[:-1] + b",]", "a.json", "invalid_array"),
    "two arrays": (json.dumps([chat_row()] * 12).encode() * 2, "a.json", "invalid_array"),
    "JSON string": (b'"hello"', "a.json", "not_an_object"),
    "table without a header": (b"a,b\n" * 12, "a.csv", "unknown_columns"),
    "table with a header alone": (b"prompt,completion\n", "a.csv", "empty_file"),
    "table naming a column twice": (CSV.replace(b"completion", b"prompt"), "a.csv", "invalid_table"),
    "table with a short row": (CSV + b"a\n", "a.csv", "invalid_table"),
    "table with NUL": (CSV.replace(b"a,", b"a\0,"), "a.csv", "not_jsonl"),
    "table in Latin-1": (CSV + "é,b\n".encode("latin-1"), "a.csv", "not_utf8"),
    "Parquet cut off": (PARQUET[:-30], "a.parquet", "invalid_table"),
    "start of a Parquet file": (b"PAR1", "a.parquet", "invalid_table"),
    "Parquet of noise": (b"PAR1" + NOISE + b"PAR1", "a.parquet", "invalid_table"),
    "Parquet with a huge footer": (PARQUET[:-8] + b"\xff\xff\xff\x7fPAR1", "a.parquet", "invalid_table"),
    "Parquet nested sixty deep": (nested_parquet, "a.parquet", "invalid_table"),
    "Parquet of three million nulls": (many_nulls, "a.parquet", "too_many_rows"),
    "Parquet naming a column twice": (twice_named, "a.parquet", "invalid_table"),
    "Parquet of text that is none": (no_text, "a.parquet", "invalid_table"),
    "Parquet of five thousand columns": (
        lambda: parquet(pyarrow.table({f"c{n}": ["x"] for n in range(5_000)})), "a.parquet", "unknown_columns",
    ),
    "text of noise": (NOISE, "a.txt", "not_jsonl"),
    "text in Latin-1": ("Grüße\n\n".encode("latin-1") * 12, "a.txt", "not_utf8"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_no_training_data_is_refused_by_its_own_code(name: str) -> None:
    made, filename, code = FILES[name]

    report = judge(made if isinstance(made, bytes) else made(), filename)

    assert not report.is_valid
    assert code in {error.code for error in report.errors[:2]}, report.errors[:2]
    assert all(error.message and error.fix for error in report.errors)


def answered(content: str) -> bytes:
    """A row whose answer is this JSON text."""
    return (
        b'{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": %s}]}\n' % content.encode()
    )


def weighted(number: str) -> bytes:
    return b'{"messages": [{"role": "assistant", "content": "x", "weight": %s}]}\n' % number.encode()


ROWS = {
    "NaN": (answered("NaN"), "invalid_number"),
    "Infinity beside": (b'{"messages": [], "x": Infinity}\n', "invalid_number"),
    "a number beyond any float": (weighted("1e400"), "invalid_number"),
    "a number of 5,000 digits": (weighted("9" * 5_000), "invalid_number"),
    "a role given twice": (
        b'{"messages": [{"role": "user", "role": "system", "content": "x"}, {"role": "assistant", "content": "y"}]}\n',
        "duplicate_key",
    ),
    "a role given twice, once in escapes": (
        b'{"messages": [{"role": "user", "r\\u006fle": "system", "content": "x"}]}\n',
        "duplicate_key",
    ),
    "100,000 brackets": (b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n", "too_deep"),
    "half a surrogate pair": (answered('"\\ud800"'), "lone_surrogate"),
    "NUL in escapes": (answered('"a\\u0000b"'), "nul_character"),
    "a control character": (answered('"a\x01b"'), "invalid_json"),
    "overlong UTF-8": (answered('"%"').replace(b"%", b"\xc0\xaf"), "not_utf8"),
    "two rows on a line": (GOOD.splitlines()[0] * 2 + b"\n", "invalid_json"),
    "3,000 messages": (
        json.dumps({"messages": [{"role": "user", "content": "x"}] * 3_000}).encode() + b"\n", "too_many_messages",
    ),
    "arguments of brackets": (
        answered('"x", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "%s"}}]' % ("[" * 50_000)),
        "invalid_tool_calls",
    ),
    "arguments of objects": (
        answered(
            '"x", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "%s"}}]'
            % ('{\\"a\\":' * 900 + "1" + "}" * 900)
        ),
        "invalid_tool_calls",
    ),
    "a key nobody reads": (b'{"__proto__": {}, "messages": []}\n', "unknown_key"),
    "a line of 2 MiB": (answered('"' + "x" * 2 * 1024**2 + '"'), "line_too_long"),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_a_hostile_row_is_refused_by_itself_and_its_neighbours_are_kept(name: str) -> None:
    row, code = ROWS[name]

    report = judge(GOOD + row + GOOD, "a.jsonl")

    assert (report.rows, report.error_count) == (41, 1)
    assert (report.errors[0].line, report.errors[0].code) == (21, code)
    assert report.errors[0].fix


def test_signs_of_another_kind_are_kept_as_they_are() -> None:
    texts = ["\u202ereversed", "line\u2028separator", "=cmd|' /C calc'!A0", "<script>alert(1)</script>", "\x1b[31mred"]

    report = judge(b"".join(answered(json.dumps(text)) for text in texts * 4), "a.jsonl")

    assert report.is_valid
