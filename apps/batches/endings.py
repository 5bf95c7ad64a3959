"""The end of a batch: its answers and errors become files, and its requests are deleted."""

import datetime
from collections.abc import Iterator
from typing import Any

import msgspec
from django.db import transaction

from apps.accounts.notices.events import announce_batch
from apps.batches.files import OUTPUT_PURPOSE, new_file
from apps.batches.lifecycle import BATCH_TRANSITIONS, INTERNAL_PURPOSE, BatchStatus, RequestStatus
from apps.batches.models import Batch, BatchFile, BatchRequest
from apps.core import audit
from apps.core.database.transitions import try_advance
from apps.core.messages import outbox
from apps.core.objects.store import object_key, store

_STOPS = {
    BatchStatus.EXPIRED: ("batch_expired", "This request was not executed before the batch expired."),
    BatchStatus.CANCELLED: ("batch_cancelled", "This request was not executed before the batch was cancelled."),
}
_STAMPS = {
    BatchStatus.COMPLETED: "completed_at",
    BatchStatus.EXPIRED: "expired_at",
    BatchStatus.CANCELLED: "cancelled_at",
}
_ROWS_AT_ONCE = 8  # each answer may have 16 MiB


def finish(*, batch: Batch, to: BatchStatus, now: datetime.datetime) -> None:
    """Write the files of a batch that has no request in progress, and end the batch.

    The error file has the reason for each request without an answer. A killed call is repeated and writes the same
    objects again.
    """
    stop = batch.stop or dict(zip(("code", "message"), _STOPS.get(to, ("", "")), strict=True))
    answered = BatchRequest.objects.filter(batch=batch, status=RequestStatus.COMPLETED).order_by("line")
    others = BatchRequest.objects.filter(batch=batch).exclude(status=RequestStatus.COMPLETED).order_by("line")
    output = _write(batch, "output", (row.result.encode() for row in answered.iterator(_ROWS_AT_ONCE)), now)
    errors = _write(batch, "errors", (_error_line(row, stop) for row in others.iterator(_ROWS_AT_ONCE)), now)
    stamp: dict[str, Any] = {_STAMPS[to]: now}
    with transaction.atomic():
        for file in (output, errors):
            if file is not None:
                file.save(force_insert=True)
        moved = try_advance(
            batch, to=to, transitions=BATCH_TRANSITIONS,
            output_file=output, error_file=errors, failed=others.count(), **stamp,
        )  # fmt: skip
        if not moved:  # another process ended it first
            transaction.set_rollback(True)
            return
        BatchRequest.objects.filter(batch=batch).delete()
        audit.record(organization=batch.organization_id, by="system", action=f"batch.{to}", target=batch.pk)
        announce_end(batch=batch, status=to)


def announce_end(*, batch: Batch, status: BatchStatus) -> None:
    """Record the event of this end, for webhooks or the run that asked. Run it in the transaction of the change."""
    if batch.eval_run:
        payload = {"batch_id": batch.pk}
        outbox.publish(
            topic="eval.answered", key=f"eval:{batch.pk}", payload=payload, organization=batch.organization_id
        )
        return
    announce_batch(organization=batch.organization_id, batch_id=batch.pk, status=status, path=f"/batches/{batch.pk}")


def _write(batch: Batch, name: str, lines: Iterator[bytes], now: datetime.datetime) -> BatchFile | None:
    first = next(lines, None)
    if first is None:
        return None
    purpose = INTERNAL_PURPOSE if batch.eval_run else OUTPUT_PURPOSE
    file = new_file(
        batch.organization_id, purpose, f"{batch.pk}_{name}.jsonl", by="system", now=now,
        expires_after_seconds=batch.output_expires_after_seconds, project_id=batch.project_id,
    )  # fmt: skip
    file.object_key = object_key(batch.organization_id, "batches", batch.pk, f"{name}.jsonl")

    def pieces() -> Iterator[bytes]:
        yield first + b"\n"
        for line in lines:
            yield line + b"\n"

    file.bytes = store().put_stream(file.object_key, pieces()).bytes
    return file


def _error_line(row: BatchRequest, stop: dict[str, str]) -> bytes:
    if row.result:
        return row.result.encode()
    return msgspec.json.encode({"id": row.pk, "custom_id": row.custom_id, "response": None, "error": stop})
