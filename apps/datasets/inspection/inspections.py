"""Inspections of versions: computed once by a task and stored for pages."""

import zlib
from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from django.db import transaction

from apps.contracts.splits.split import Split
from apps.core.database.clock import db_now
from apps.core.messages import outbox
from apps.core.objects.store import ObjectMissing, read_object, store
from apps.datasets.inspection.inspector import INSPECTION_VERSION, as_json, inspect_rows, not_inspected, repeats
from apps.datasets.intake.lanes import ReadingTime, lane_of_rows
from apps.datasets.lifecycle import DatasetVersionStatus
from apps.datasets.models import DatasetVersion, VersionInspection
from apps.datasets.problems import Rejected
from apps.datasets.rows import iterate_rows

# The keys of this many rows may be read while the caller waits: 1.6 MB, 0.1 s.
KEYS_READ_NOW = 200_000
_CHUNK_ROWS = 64 * 1024
_KEYS_LIMIT_BYTES = 64 * 1024 * 1024


def find_inspection(*, version: DatasetVersion) -> VersionInspection | None:
    """Return the inspection of this version under the current rules, if there is one."""
    return VersionInspection.objects.filter(version=version, rules=INSPECTION_VERSION).first()


def inspect_version(*, version: DatasetVersion) -> VersionInspection | None:
    """Inspect a ready version unless that is done; return None for a version that is not ready."""
    if version.status != DatasetVersionStatus.READY:
        return None
    found = find_inspection(version=version)
    if found:
        return found
    try:
        with iterate_rows(version=version, on_progress=ReadingTime(version.data_bytes).check) as rows:
            made = inspect_rows(rows)
    except Rejected:
        made = not_inspected(rows=version.rows or 0)
    key = f"{version.object_key.rsplit('/', 1)[0]}/keys-{INSPECTION_VERSION}.bin"
    store().put_stream(key, _chunks(made.keys))
    inspection, _ = VersionInspection.objects.update_or_create(
        version=version,
        defaults={
            "organization_id": version.organization_id,
            "rules": INSPECTION_VERSION,
            "findings": as_json(made.findings),
            "distinct_rows": len(made.identities) - sum(1 for _ in repeats(made.identities)),
            "identities_key": key,
            "line_steps": _steps(made.lines),
        },
    )
    return inspection


def lines_of_rows(*, version: DatasetVersion, inspection: VersionInspection | None) -> Sequence[int]:
    """Return the line of each row, in file order: 1, 2, … where no line is blank, and without an inspection."""
    if inspection is None or not inspection.line_steps:
        return range(1, (version.rows or 0) + 1)
    steps = array("I")
    steps.frombytes(zlib.decompress(inspection.line_steps))
    return array("I", accumulate(steps))


def _steps(lines: "array[int]") -> bytes:
    has_blanks = bool(lines) and lines[-1] != len(lines)
    steps = (after - before for before, after in pairwise([0, *lines]))
    return zlib.compress(array("I", steps).tobytes()) if has_blanks else b""


def _chunks(keys: "array[int]") -> Iterator[bytes]:
    for at in range(0, len(keys), _CHUNK_ROWS):
        yield keys[at : at + _CHUNK_ROWS].tobytes()


@transaction.atomic
def request_inspection(*, version: DatasetVersion) -> None:
    """Have a task inspect the version. Requests are limited to one per hour, so repeating is harmless."""
    hour = db_now().strftime("%Y%m%d%H")
    key = f"inspect:{version.pk}:{INSPECTION_VERSION}:{hour}"
    outbox.publish(
        topic="dataset.inspect",
        key=key,
        payload={"version_id": version.pk},
        organization=version.organization_id,
        lane=lane_of_rows(version.data_bytes),
    )


def held_out_rows(*, inspection: VersionInspection, split: Split) -> list[bool]:
    """Return which rows a run with this share and seed would hold out, in file order."""
    keys = array("Q")  # decide each row's side of the split; empty if the object is gone
    try:
        keys.frombytes(read_object(inspection.identities_key, limit_bytes=_KEYS_LIMIT_BYTES))
    except ObjectMissing:
        pass
    return split.held_out(keys)
