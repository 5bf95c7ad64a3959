"""The rows that differ between two versions of a dataset: changed, added and removed.

Rows are compared by their content, without their spacing and the order of their keys. A removed and an added row that
stand between the same rows are one changed row. A small pair is compared while the caller waits; for larger ones a
task stores the result beside the newer file.
"""

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec
from django.db import transaction

from apps.contracts.chat import Line
from apps.core.database.clock import db_now
from apps.core.messages import outbox
from apps.core.objects.store import ObjectMissing, object_key, read_object, store
from apps.datasets.intake.lanes import lane_of_rows
from apps.datasets.lifecycle import UNVALIDATED
from apps.datasets.models import DatasetVersion
from apps.datasets.queries import iterate_lines

KEPT_CHANGES = 200  # of each kind
# Upper limits, for both files together, of a pair compared at once: about a quarter of a second.
CHANGES_NOW_BYTES = 4_000_000
CHANGES_NOW_ROWS = 20_000
_HASH_BYTES = 8
_ROWS_COMPARED_AT_ONCE = 200_000


class RowChange(msgspec.Struct, frozen=True):
    """A row's line before and after; 0 for an added row's `old_line` and a removed row's `new_line`."""

    old_line: int
    new_line: int


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    """How many rows changed, were added and were removed, and the first of each kind."""

    changed: int = 0
    added: int = 0
    removed: int = 0
    first_changed: list[RowChange] = []
    first_added: list[RowChange] = []
    first_removed: list[RowChange] = []


class _Rows:
    """The lines of a file and the hash of each row. Memory is 13 bytes a row."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self.lines, self.hashes = array("I"), array("Q")
        for line in lines:
            self.lines.append(line.number)
            self.hashes.append(_hash_of(line))
        self.is_kept = bytearray(len(self.lines))

    def mark_kept(self, others: "_Rows", *, part: int, parts: int) -> None:
        """Mark each row that the other file has too, as often as it has it."""
        left = Counter(each for each in others.hashes if each % parts == part)
        for index, each in enumerate(self.hashes):
            if each % parts == part and left[each]:
                left[each] -= 1
                self.is_kept[index] = 1

    def runs(self) -> Iterator[list[int]]:
        """Yield the lines before each kept row that the other file lacks, and those after the last one."""
        run: list[int] = []
        for line, is_kept in zip(self.lines, self.is_kept, strict=True):
            if is_kept:
                yield run
                run = []
            else:
                run.append(line)
        yield run


def find_changes(*, version: DatasetVersion, since: DatasetVersion) -> Changes | None:
    """Return the changes from `since` to `version`; None if a file is being validated or a task has to compare them.

    Small files are compared now. Raises ObjectMissing if a stored file is gone.
    """
    if version.status in UNVALIDATED or since.status in UNVALIDATED:
        return None
    pair = (version, since)
    if _bytes_of(pair) <= CHANGES_NOW_BYTES and sum(each.rows or 0 for each in pair) <= CHANGES_NOW_ROWS:
        return compare_rows(version=version, since=since)
    try:
        return msgspec.json.decode(read_object(_key(version, since)), type=Changes)
    except ObjectMissing:
        return None


def compare_rows(*, version: DatasetVersion, since: DatasetVersion) -> Changes:
    """Compare two versions row by row and return the changes."""
    old, new = _Rows(iterate_lines(version=since)), _Rows(iterate_lines(version=version))
    parts = 1 + (len(old.lines) + len(new.lines)) // _ROWS_COMPARED_AT_ONCE
    for part in range(parts):
        old.mark_kept(new, part=part, parts=parts)
        new.mark_kept(old, part=part, parts=parts)
    counts = Counter[str]()
    first: dict[str, list[RowChange]] = {"changed": [], "added": [], "removed": []}
    for kind, change in _changes(old, new):
        counts[kind] += 1
        if counts[kind] <= KEPT_CHANGES:
            first[kind].append(change)
    return Changes(
        changed=counts["changed"],
        added=counts["added"],
        removed=counts["removed"],
        first_changed=first["changed"],
        first_added=first["added"],
        first_removed=first["removed"],
    )


def store_changes(*, version: DatasetVersion, since: DatasetVersion) -> None:
    """Compare two versions and keep the result, unless a stored file is gone."""
    try:
        found = compare_rows(version=version, since=since)
    except ObjectMissing:
        return
    store().put_stream(_key(version, since), [msgspec.json.encode(found)])


@transaction.atomic
def request_changes(*, version: DatasetVersion, since: DatasetVersion) -> None:
    """Have a task compare two versions, unless one is being validated.

    Requests are limited to one per hour, so repeating is harmless.
    """
    if {version.status, since.status} & set(UNVALIDATED):
        return
    hour = db_now().strftime("%Y%m%d%H")
    outbox.publish(
        topic="dataset.changes",
        key=f"changes:{_hashes(version, since)}:{version.pk}:{since.pk}:{hour}",
        payload={"version_id": version.pk, "since_id": since.pk},
        organization=version.organization_id,
        lane=lane_of_rows(_bytes_of((version, since))),
    )


def _bytes_of(pair: Iterable[DatasetVersion]) -> int:
    return sum(each.data_bytes for each in pair)


def _key(version: DatasetVersion, since: DatasetVersion) -> str:
    """Return where the changes are stored: under the hashes, as a file may be read again with other columns."""
    name = f"changes-{_hashes(version, since)}.json"
    return object_key(version.organization_id, "datasets", version.pk, name)


def _hashes(version: DatasetVersion, since: DatasetVersion) -> str:
    return f"{since.data_sha256[:16]}-{version.data_sha256[:16]}"


def _hash_of(line: Line) -> int:
    try:
        content = msgspec.json.encode(msgspec.json.decode(line.data), order="sorted")
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        content = line.data
    return int.from_bytes(hashlib.blake2b(content, digest_size=_HASH_BYTES).digest(), "big")


def _changes(old: _Rows, new: _Rows) -> Iterator[tuple[str, RowChange]]:
    for before, after in zip(old.runs(), new.runs(), strict=True):
        both = min(len(before), len(after))
        yield from (("changed", RowChange(*lines)) for lines in zip(before, after, strict=False))
        yield from (("removed", RowChange(line, 0)) for line in before[both:])
        yield from (("added", RowChange(0, line)) for line in after[both:])
