"""Validation of a batch's file. Every line becomes a request, or the batch fails and names its first bad lines."""

import datetime
import io
from codecs import BOM_UTF8
from collections.abc import Iterator
from typing import IO, Any, cast

import msgspec
from django.db import transaction

from apps.batches.endings import announce_end
from apps.batches.files import MAX_FILE_BYTES
from apps.batches.lifecycle import BATCH_TRANSITIONS, BatchStatus
from apps.batches.models import Batch, BatchRequest
from apps.contracts.chat.errors import RowError, RowErrorCode
from apps.contracts.chat.lines import parse_json
from apps.core.database.transitions import try_advance
from apps.core.errors import DomainError
from apps.core.http.json_bodies import decode_body
from apps.core.objects.store import ObjectMissing, store

MAX_REQUESTS = 50_000  # OpenAI's limit
MAX_LINES = 2 * MAX_REQUESTS  # blank ones included, so that a validation takes seconds
MAX_LINE_BYTES = 4 * 1024 * 1024  # the gateway's own limit of a body
MAX_CUSTOM_ID = 256
MAX_ERRORS = 20
_ROWS_AT_ONCE = 1_000
_READ_BYTES = 1024 * 1024


class BatchLine(msgspec.Struct):
    """A line of the file, as OpenAI defines it."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Body(msgspec.Struct):
    model: str
    stream: Any = None


class _SentLine(msgspec.Struct):
    """The same line with its body, to name the faulty field."""

    custom_id: str
    method: str
    url: str
    body: _Body


class BadLine(Exception):
    """The line is not a valid request. `code`, `param` and the message are for the customer."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param


_decode_line = msgspec.json.Decoder(BatchLine).decode
_decode_body = msgspec.json.Decoder(_Body).decode
_sent_line = msgspec.json.Decoder(_SentLine)


def validate(*, batch: Batch, now: datetime.datetime) -> None:
    """Save the batch's requests and begin it, or fail it with its first errors. A killed validation leaves nothing."""
    errors: list[dict[str, object]] = []
    try:
        with transaction.atomic():
            total, model_name = _save_requests(batch, errors)
            if errors:
                raise _Failed
            has_begun = try_advance(
                batch, to=BatchStatus.IN_PROGRESS, transitions=BATCH_TRANSITIONS,
                total=total, model_name=model_name, in_progress_at=now,
            )  # fmt: skip
            if not has_begun:
                raise _Failed  # it was cancelled meanwhile
    except _Failed:
        if errors:
            _fail(batch, errors, now)


@transaction.atomic
def _fail(batch: Batch, errors: list[dict[str, object]], now: datetime.datetime) -> None:
    if try_advance(batch, to=BatchStatus.FAILED, transitions=BATCH_TRANSITIONS, errors=errors, failed_at=now):
        announce_end(batch=batch, status=BatchStatus.FAILED)


class _Failed(Exception):
    """Raised to roll this validation back."""


def _save_requests(batch: Batch, errors: list[dict[str, object]]) -> tuple[int, str]:
    rows: list[BatchRequest] = []
    known: set[str] = set()
    model_name = ""
    try:
        for number, offset, raw in _lines(batch):
            try:
                if number > MAX_LINES:
                    raise BadLine("too_many_requests", f"A file has at most {MAX_LINES:,} lines, blank ones included.")
                line, name = parse_line(raw, endpoint=batch.endpoint)
                if line.custom_id in known:
                    shown = line.custom_id[:60]
                    raise BadLine("duplicate_custom_id", f"The custom_id '{shown}' is used twice.", "custom_id")
                if len(known) >= MAX_REQUESTS:
                    raise BadLine("too_many_requests", f"A batch has at most {MAX_REQUESTS:,} requests.")
            except BadLine as bad:
                errors.append({"line": number, "code": bad.code, "message": str(bad), "param": bad.param})
                if len(errors) >= MAX_ERRORS or bad.code == "too_many_requests":
                    return 0, ""
                continue
            known.add(line.custom_id)
            model_name = model_name or name
            rows.append(
                BatchRequest(
                    organization_id=batch.organization_id, batch=batch, line=number, custom_id=line.custom_id,
                    offset=offset, bytes=len(raw),
                )
            )  # fmt: skip
            if len(rows) >= _ROWS_AT_ONCE:
                BatchRequest.objects.bulk_create(rows)
                rows.clear()
    except ObjectMissing:
        errors.append({"line": None, "code": "file_not_found", "message": "The file was deleted.", "param": None})
    if not known and not errors:
        errors.append({"line": None, "code": "empty_file", "message": "The file has no requests.", "param": None})
    BatchRequest.objects.bulk_create(rows)
    return len(known), model_name


def _lines(batch: Batch) -> Iterator[tuple[int, int, bytes]]:
    """Yield the number, place and text of each line that is not blank, and of every line beyond MAX_LINES.

    Of a line that is too long, only the first bytes are yielded.
    """
    stored = cast(io.RawIOBase, store().open_stream(batch.input_file.object_key))
    with io.BufferedReader(stored, _READ_BYTES) as stream:  # alone, a bucket's stream reads lines byte by byte
        number = offset = 0
        while offset < MAX_FILE_BYTES + 1 and (raw := _read_line(stream)):
            number += 1
            length = len(raw)
            if length > MAX_LINE_BYTES:
                while not raw.endswith(b"\n") and (raw := _read_line(stream)):
                    length += len(raw)
                yield number, offset, b"x" * (MAX_LINE_BYTES + 1)
            else:
                text = raw.removeprefix(BOM_UTF8)
                if text.strip() or number > MAX_LINES:
                    yield number, offset + len(raw) - len(text), text
            offset += length


def _read_line(stream: IO[bytes]) -> bytes:
    return stream.readline(MAX_LINE_BYTES + 2)


def parse_line(raw: bytes, *, endpoint: str) -> tuple[BatchLine, str]:
    """Return the request of a line and the name of its model. Raises BadLine."""
    if len(raw) > MAX_LINE_BYTES:
        raise BadLine("line_too_long", f"A line may have up to {MAX_LINE_BYTES // 1024**2} MiB.")
    try:
        line = _decode_line(raw)
    except msgspec.ValidationError:
        raise _bad_field(raw) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadLine("invalid_json_line", _why_unreadable(raw)) from error
    if not 1 <= len(line.custom_id) <= MAX_CUSTOM_ID or "\x00" in line.custom_id:
        text = f"A custom_id has 1 to {MAX_CUSTOM_ID} characters and no NUL character."
        raise BadLine("invalid_custom_id", text, "custom_id")
    if line.method != "POST":
        raise BadLine("invalid_method", "The method must be POST.", "method")
    if line.url != endpoint:
        text = f"The url is '{line.url[:60]}', but the batch is for {endpoint}."
        raise BadLine("invalid_url", text.replace("\x00", ""), "url")
    try:
        body = _decode_body(line.body)
    except msgspec.ValidationError:
        raise _bad_field(raw) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadLine("invalid_request", "The body is not valid JSON, or nested too deeply.", "body") from error
    if not body.model or len(body.model) > 200 or "\x00" in body.model:
        raise BadLine("invalid_request", "The body must name a model.", "body.model")
    if body.stream:
        raise BadLine("invalid_request", "Answers of a batch are not streamed. Remove 'stream'.", "body.stream")
    return line, body.model


def _why_unreadable(raw: bytes) -> str:
    """Return the error in the text of a line, with its fix, as for rows of a dataset."""
    try:
        parse_json(raw, 1)
    except RowError as error:
        if error.code is not RowErrorCode.TOO_DEEP:  # its fix is about rows
            return f"{error.message} {error.fix}"
    return "The line is not a JSON object, or nested too deeply."


def _bad_field(raw: bytes) -> BadLine:
    """Return the error of a line in which a field is missing or has another type."""
    try:
        decode_body(raw, _sent_line)
    except DomainError as error:
        return BadLine("invalid_request", error.message, error.param)
    return BadLine("invalid_request", "The line is not a request. Send custom_id, method, url and body.")
