"""Inspections of versions: made once by a task, kept, and read by pages."""

from array import array
from collections.abc import Iterator
from functools import lru_cache

from django.db import transaction

from apps.contracts.split import Split
from apps.core import outbox
from apps.core.clock import db_now
from apps.core.object_store import ObjectMissing, read_object, store
from apps.datasets.inspection import INSPECTION_VERSION, as_json, inspect_rows, repeats
from apps.datasets.models import DatasetVersion, VersionInspection
from apps.datasets.rows import iterate_rows

# Identities and keys of so many rows are read while somebody waits: 3.2 MB, 0.1 s.
IDENTITIES_READ_NOW = 200_000
_CHUNK_ROWS = 64 * 1024
_IDENTITIES_LIMIT_BYTES = 128 * 1024 * 1024


def find_inspection(*, version: DatasetVersion) -> VersionInspection | None:
    """Return the inspection of this version by the present rules, if there is one."""
    return VersionInspection.objects.filter(version=version, rules=INSPECTION_VERSION).first()


def inspect_version(*, version: DatasetVersion) -> VersionInspection | None:
    """Inspect a ready version unless that is done; return None for one that is not ready."""
    if version.status != "ready":
        return None
    found = find_inspection(version=version)
    if found:
        return found
    with iterate_rows(version=version) as rows:
        made = inspect_rows(rows)
    key = f"{version.object_key.rsplit('/', 1)[0]}/identities-{INSPECTION_VERSION}.bin"
    store().put_stream(key, _chunks(made.identities, made.keys))
    inspection, _ = VersionInspection.objects.update_or_create(
        version=version,
        defaults={
            "organization_id": version.organization_id,
            "rules": INSPECTION_VERSION,
            "findings": as_json(made.findings),
            "distinct_rows": len(made.identities) - sum(1 for _ in repeats(made.identities)),
            "identities_key": key,
        },
    )
    return inspection


def _chunks(*columns: "array[int]") -> Iterator[bytes]:
    for column in columns:
        for at in range(0, len(column), _CHUNK_ROWS):
            yield column[at : at + _CHUNK_ROWS].tobytes()


@transaction.atomic
def request_inspection(*, version: DatasetVersion) -> None:
    """Have a task inspect the version. Asking again is harmless: one is asked for in an hour."""
    hour = db_now().strftime("%Y%m%d%H")
    key = f"inspect:{version.pk}:{INSPECTION_VERSION}:{hour}"
    outbox.publish(topic="dataset.inspect", key=key, payload={"version_id": version.pk})


def identities_of(*, inspection: VersionInspection) -> array:
    """Return each row's identity in file order, empty where the object is gone."""
    return _numbers_of(inspection)[0]


def _numbers_of(inspection: VersionInspection) -> tuple["array[int]", "array[int]"]:
    """Return the identities and the keys, which lie one after the other in one object."""
    numbers = array("Q")
    try:
        numbers.frombytes(read_object(inspection.identities_key, limit_bytes=_IDENTITIES_LIMIT_BYTES))
    except ObjectMissing:
        pass
    half = len(numbers) // 2
    return numbers[:half], numbers[half:]


def held_out_rows(*, inspection: VersionInspection, split: Split) -> list[bool]:
    """Return which rows a run with this share and seed would hold out, in file order."""
    return split.held_out(_numbers_of(inspection)[1])


def shared_rows(*, inspection: VersionInspection, other: VersionInspection) -> list[bool]:
    """Return for each row of `inspection`, in file order, whether the other version has it too."""
    theirs = set(identities_of(inspection=other))
    return [identity in theirs for identity in identities_of(inspection=inspection)]


def find_overlap(*, version: DatasetVersion, other: DatasetVersion) -> int | None:
    """Return how many rows of `version` stand in the other one too; None where both are not looked through yet, or are
    too long to be compared while somebody waits."""
    if max(version.rows or 0, other.rows or 0) > IDENTITIES_READ_NOW:
        return None
    one, two = find_inspection(version=version), find_inspection(version=other)
    return _counted_overlap(one.pk, two.pk, INSPECTION_VERSION) if one and two else None


@lru_cache(maxsize=1024)
def _counted_overlap(inspection_id: int, other_id: int, rules: int) -> int:
    """An inspection by the same rules never changes, and a page asks for each of its quotes."""
    found = VersionInspection.objects.in_bulk([inspection_id, other_id])
    return count_overlap(inspection=found[inspection_id], other=found[other_id])


def count_overlap(*, inspection: VersionInspection, other: VersionInspection) -> int:
    """Return how many rows of `inspection` stand in the other version too."""
    return sum(shared_rows(inspection=inspection, other=other))
