"""Validation of a file under a lease: the holder reads the file once and stores its report."""

import datetime
import math
import time
from collections.abc import Callable, Iterable, Iterator

import msgspec
from django.db import transaction
from django.db.models import F

from apps.accounts.queries import RegionRefused
from apps.catalog.models import BaseModel
from apps.catalog.queries import ModelNotInstalled, chat_renderer
from apps.core import audit
from apps.core.database.clock import db_now
from apps.core.database.transitions import try_advance
from apps.core.messages import outbox
from apps.core.objects.store import ObjectMissing, StoredObject, object_key, read_chunks, read_object, store
from apps.datasets.inspection import inspections
from apps.datasets.intake.lanes import SMALL_SECONDS, ReadingTime, TakesLong, lane_of
from apps.datasets.intake.revisions import row_key
from apps.datasets.intake.versions import StorageFull, ask_for_long_validation, limited
from apps.datasets.lifecycle import UNVALIDATED, VERSION_TRANSITIONS, DatasetVersionStatus
from apps.datasets.models import DatasetVersion
from apps.datasets.problems import FileErrorCode, LineError, Rejected, as_json
from apps.datasets.rows import kind_of
from apps.datasets.stream import replace_line, select_lines
from apps.datasets.validation.formats import read_mapping
from apps.datasets.validation.repair import COPY, EDIT, FIT, HELD, REPAIRS, TRAINED, RepairMode
from apps.datasets.validation.template_fit import RenderableRows
from apps.datasets.validation.validator import FileValidator, ValidationReport, watched

MAX_ATTEMPTS = 5
LEASE = datetime.timedelta(seconds=60)
_RENEW_SECONDS = 10


def validate_version(*, version_id: str, now: datetime.datetime, is_long: bool = True) -> DatasetVersion | None:
    """Read the file once and mark it ready or invalid; return None when another caller holds it or it is done.

    The caller holds a lease in the row. If it is not renewed, its caller is dead, and the next caller starts over.
    Unless `is_long`, a small file has one second of processor time. Raises TakesLong after that: the next lane reads it
    again.
    """
    version = DatasetVersion.objects.filter(pk=version_id).select_related("derived_from").first()
    if version is None:
        return None
    release_expired_leases(version, now)
    source = version.derived_from
    is_small = lane_of(max(version.bytes, source.bytes if source else 0)) == "data-small"
    lease = _Lease(version, now, most_seconds=SMALL_SECONDS if is_small and not is_long else math.inf)
    if not lease.take():
        return None
    rows = None
    try:
        if version.validation_attempts > MAX_ATTEMPTS:
            message = f"We tried to read the file {MAX_ATTEMPTS} times and failed each time."
            raise Rejected(FileErrorCode.NOT_READ, message, "Upload it again, as plain JSONL if you can.")
        _write_repaired(version, lease)
        report, rows = _read(version, lease)
    except ObjectMissing:
        report = _unreadable(FileErrorCode.CONTENT_CHANGED, "The stored file is gone.", "Upload it again.")
    except ModelNotInstalled as gone:
        report = _unreadable(FileErrorCode.NOT_READ, gone.message, "Choose a base model that is installed.")
    except (StorageFull, RegionRefused) as full:
        report = _unreadable(FileErrorCode.STORAGE_FULL, full.message, "")
    except Rejected as rejected:
        report = _unreadable(rejected.error.code, rejected.error.message, rejected.error.fix)
    except TakesLong:
        lease.hand_over()
        raise
    except LeaseLost:
        return None
    return _record_report(version, report, lease, rows=rows)


def _read(version: DatasetVersion, lease: "_Lease") -> tuple[ValidationReport, StoredObject | None]:
    """Read the file. Unless it already is JSONL of a stored kind, also store its rows in that form."""
    with store().open_stream(version.object_key) as stream:
        mapping = read_mapping(version.given_mapping)
        watch = _watch(version.bytes, lease)
        reading = FileValidator(
            read_chunks(stream),
            filename=version.filename,
            mapping=mapping,
            written_as=version.layout.written_as,
            on_progress=watch,
        )
        reading.start()
        if not reading.is_verbatim:
            stored = store().put_stream(_rows_key(version), _limited(reading, version))
            return reading.report, stored
        for _ in reading:
            pass
        return reading.report, None


def _watch(byte_count: int, lease: "_Lease") -> Callable[[], None]:
    """Return the callback for reading a file: it renews the lease and checks the reading time."""
    time_left = ReadingTime(byte_count)

    def watch() -> None:
        time_left.check()
        lease.renew()

    return watch


def _write_repaired(version: DatasetVersion, lease: "_Lease") -> None:
    """Write the bytes of a version that is made from another, unless they exist."""
    source = version.derived_from
    if not version.repair or version.sha256 or source is None:
        return
    write = {FIT: _fit, EDIT: _edit, COPY: _copy, TRAINED: _part, HELD: _part}.get(version.repair, _repair)
    stored, repaired, dropped = write(version, source, lease)
    version.bytes, version.sha256 = stored.bytes, stored.sha256
    version.layout = msgspec.structs.replace(version.layout, repaired=repaired, dropped=dropped)
    version.save(update_fields=["bytes", "sha256", "layout"])


def _repair(version: DatasetVersion, source: DatasetVersion, lease: "_Lease") -> tuple[StoredObject, int, int]:
    """Return the stored file and the numbers of repaired and dropped rows."""
    with store().open_stream(source.object_key) as stream:
        reading = FileValidator(
            read_chunks(stream),
            filename=source.filename,
            mapping=read_mapping(source.given_mapping),
            written_as=source.layout.written_as,
            repair=REPAIRS[RepairMode(version.repair)],
            on_progress=_watch(source.bytes, lease),
        )
        reading.start()
        stored = store().put_stream(version.object_key, _limited(reading, version))
    if reading.rejection is not None:  # the written bytes are not the whole file
        store().delete(version.object_key)
        raise Rejected(FileErrorCode(reading.rejection.code), reading.rejection.message, reading.rejection.fix)
    return stored, reading.report.repaired, reading.report.dropped


def _fit(version: DatasetVersion, source: DatasetVersion, lease: "_Lease") -> tuple[StoredObject, int, int]:
    """Return as `_repair` does."""
    renderer = chat_renderer(base_model=BaseModel.objects.get(pk=version.layout.fits))
    with store().open_stream(source.data_key) as stream:
        watch = _watch(source.data_bytes, lease)
        renderable = RenderableRows(read_chunks(stream), kind=kind_of(source), renderer=renderer, on_progress=watch)
        stored = store().put_stream(version.object_key, _limited(renderable, version))
    return stored, 0, renderable.dropped


def _edit(version: DatasetVersion, source: DatasetVersion, lease: "_Lease") -> tuple[StoredObject, int, int]:
    """Return as `_repair` does."""
    row = read_object(row_key(version))
    with store().open_stream(source.data_key) as stream:
        lines = watched(read_chunks(stream), _watch(source.data_bytes, lease))
        rows = replace_line(lines, version.layout.edited_line, row)
        stored = store().put_stream(version.object_key, _limited(rows, version))
    return stored, 1 if row else 0, 0 if row else 1


def _copy(version: DatasetVersion, source: DatasetVersion, lease: "_Lease") -> tuple[StoredObject, int, int]:
    """Return as `_repair` does."""
    watch = _watch(source.bytes, lease)
    return store().compose(version.object_key, [source.object_key], on_chunk=lambda _: watch()), 0, 0


def _part(version: DatasetVersion, source: DatasetVersion, lease: "_Lease") -> tuple[StoredObject, int, int]:
    """Return as `_repair` does."""
    inspection, split = inspections.find_inspection(version=source), version.layout.split
    held = inspections.held_out_rows(inspection=inspection, split=split) if inspection and split else []
    if len(held) != source.rows:
        raise Rejected(FileErrorCode.NOT_READ, "The rows of the file were not inspected.", "Split it again later.")
    with store().open_stream(source.data_key) as stream:
        lines = watched(read_chunks(stream), _watch(source.data_bytes, lease))
        rows = select_lines(lines, [is_held == (version.repair == HELD) for is_held in held])
        stored = store().put_stream(version.object_key, _limited(rows, version))
    return stored, 0, 0


def _limited(pieces: Iterable[bytes], version: DatasetVersion) -> Iterator[bytes]:
    return limited(pieces, organization=version.organization_id, by=version.created_by)


def _rows_key(version: DatasetVersion) -> str:
    return object_key(version.organization_id, "datasets", version.pk, "rows.jsonl")


class LeaseLost(Exception):
    """Another worker has taken over the validation."""


class HeldByAnother(Exception):
    """Another worker validates the file, or died doing so: the message is delivered again."""


class _Lease:
    """The right to validate one version. Its expiry is stored in the row and is also the fencing token."""

    def __init__(self, version: DatasetVersion, now: datetime.datetime, *, most_seconds: float = math.inf) -> None:
        self._version, self._renewed = version, time.monotonic()
        # Processor time: on a busy machine, the same file takes longer and costs the others no more.
        self._end = time.thread_time() + most_seconds
        self.expires_at = now + LEASE

    def take(self) -> bool:
        return try_advance(
            self._version,
            to=DatasetVersionStatus.VALIDATING,
            transitions=VERSION_TRANSITIONS,
            validation_lease_expires_at=self.expires_at,
            validation_attempts=F("validation_attempts") + 1,
        )

    @transaction.atomic
    def hand_over(self) -> None:
        """Return the version for the next lane."""
        is_mine = try_advance(
            self._version,
            to=DatasetVersionStatus.UPLOADED,
            transitions=VERSION_TRANSITIONS,
            guard={"validation_lease_expires_at": self.expires_at},
            validation_lease_expires_at=None,
            validation_attempts=F("validation_attempts") - 1,
        )
        if is_mine:
            ask_for_long_validation(self._version)

    def renew(self) -> None:
        """Renew the lease when it is due. Raises TakesLong, LeaseLost."""
        if time.thread_time() > self._end:
            raise TakesLong
        if time.monotonic() - self._renewed < _RENEW_SECONDS:
            return
        self._renewed, expires_at = time.monotonic(), db_now() + LEASE
        held = DatasetVersion.objects.filter(
            pk=self._version.pk, status=DatasetVersionStatus.VALIDATING, validation_lease_expires_at=self.expires_at
        )
        if not held.update(validation_lease_expires_at=expires_at):
            raise LeaseLost
        self.expires_at = expires_at


def release_expired_leases(version: DatasetVersion, now: datetime.datetime) -> None:
    """Release a version whose validator stopped renewing its lease."""
    try_advance(
        version,
        to=DatasetVersionStatus.UPLOADED,
        transitions=VERSION_TRANSITIONS,
        guard={"validation_lease_expires_at__lt": now},
        validation_lease_expires_at=None,
    )


def require_done(*, version_id: str) -> None:
    """Raise HeldByAnother for a version that is not validated yet: its lease has not ended."""
    if DatasetVersion.objects.filter(pk=version_id, status__in=UNVALIDATED).exists():
        raise HeldByAnother(version_id)


def _unreadable(code: str, message: str, fix: str) -> ValidationReport:
    error = LineError(line=1, code=code, message=message, fix=fix)
    return ValidationReport(rows=0, error_count=1, errors=(error,), line_offsets=(), sha256="", is_rejected=True)


@transaction.atomic
def _record_report(
    version: DatasetVersion, report: ValidationReport, lease: _Lease, *, rows: StoredObject | None = None
) -> DatasetVersion | None:
    is_intact = report.sha256 == version.sha256
    is_ready = report.is_valid and is_intact
    errors = as_json(report.errors)
    if report.is_valid and not is_intact:
        message = "The stored file is not the one that was uploaded."
        errors = as_json(
            [LineError(line=1, code=FileErrorCode.CONTENT_CHANGED, message=message, fix="Upload it again.")]
        )
    is_mine = try_advance(
        version,
        to=DatasetVersionStatus.READY if is_ready else DatasetVersionStatus.INVALID,
        transitions=VERSION_TRANSITIONS,
        guard={"validation_lease_expires_at": lease.expires_at},
        rows=report.rows,
        error_count=report.error_count or (0 if is_intact else 1),
        errors=errors,
        line_offsets=list(report.line_offsets),
        kind=report.kind,
        layout=msgspec.structs.replace(
            version.layout,
            container=report.container,
            is_gzip=report.is_gzip,
            is_rejected=report.is_rejected,
            mapping=report.mapping,
            columns=report.columns,
            sample=report.sample,
        ),
        rows_key=_rows_key(version) if rows else "",
        rows_bytes=rows.bytes if rows else 0,
        rows_sha256=rows.sha256 if rows else "",
        validated_at=db_now(),
        validation_lease_expires_at=None,
    )
    if not is_mine:
        return None
    audit.record(
        organization=version.organization_id, by="system", action="dataset.validated", target=version.pk,
        status=version.status, rows=report.rows, error_count=version.error_count, kind=report.kind,
    )  # fmt: skip
    return version


@transaction.atomic
def announce(*, version: DatasetVersion) -> None:
    """Publish that the file is validated; tokens of a small file are counted by then."""
    key = f"validated:{version.pk}:{version.validated_at and version.validated_at.timestamp()}"
    payload = {"version_id": version.pk}
    outbox.publish(topic="dataset.validated", key=key, payload=payload, organization=version.organization_id)
