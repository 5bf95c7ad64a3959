"""Comparisons of a training file with its validation file, computed once and stored for pages and quotes.

A small pair is compared while the caller waits; a task compares larger ones.
"""

import zlib

from django.db import transaction

from apps.contracts.splits.held_rows import Repeats, ValidationIndex, repeats_of
from apps.core.database.clock import db_now
from apps.core.messages import outbox
from apps.datasets.intake.lanes import lane_of_rows
from apps.datasets.lifecycle import DatasetVersionStatus
from apps.datasets.models import DatasetVersion, VersionComparison
from apps.datasets.rows import iterate_rows

# Increased when a comparison could find something else. A pair compared under older rules is compared again.
COMPARISON_VERSION = 1
# Upper limits, for both files together, of a pair compared at once: about a second.
COMPARE_NOW_ROWS = 5_000
COMPARE_NOW_BYTES = 4_000_000


def find_comparison(*, version: DatasetVersion, other: DatasetVersion) -> VersionComparison | None:
    """Return how this version repeats the other under the current rules, if they were compared."""
    found = VersionComparison.objects.filter(version=version, other=other, rules=COMPARISON_VERSION)
    return found.defer("marks").first()


def find_or_compare(*, version: DatasetVersion, other: DatasetVersion) -> VersionComparison | None:
    """Return the comparison, computed now if both files are small; None if one is not ready or a task was requested."""
    found = find_comparison(version=version, other=other)
    if found is not None or {version.status, other.status} != {DatasetVersionStatus.READY}:
        return found
    pair = (version, other)
    is_small = sum(each.rows or 0 for each in pair) <= COMPARE_NOW_ROWS
    if is_small and sum(each.bytes for each in pair) <= COMPARE_NOW_BYTES:
        return compare_versions(version=version, other=other)
    request_comparison(version=version, other=other)
    return None


def compare_versions(*, version: DatasetVersion, other: DatasetVersion) -> VersionComparison | None:
    """Compare two ready versions unless that is done; return None when one is not ready."""
    if {version.status, other.status} != {DatasetVersionStatus.READY}:
        return None
    found = find_comparison(version=version, other=other)
    if found is not None:
        return found
    with iterate_rows(version=other) as rows:
        held = ValidationIndex(rows)
    with iterate_rows(version=version) as rows:
        marks = bytes(repeats_of(rows, held))
    comparison, _ = VersionComparison.objects.update_or_create(
        version=version,
        other=other,
        defaults={
            "organization_id": version.organization_id,
            "rules": COMPARISON_VERSION,
            "equal_rows": marks.count(Repeats.A_ROW),
            "near_rows": marks.count(Repeats.NEARLY_A_ROW),
            "marks": zlib.compress(marks),
        },
    )
    return comparison


def marks_of(comparison: VersionComparison) -> bytes:
    """Return a `Repeats` for each row of the version, in file order."""
    return zlib.decompress(comparison.marks)


@transaction.atomic
def request_comparison(*, version: DatasetVersion, other: DatasetVersion) -> None:
    """Have a task compare two versions. Requests are limited to one per hour, so repeating is harmless."""
    hour = db_now().strftime("%Y%m%d%H")
    key = f"compare:{version.pk}:{other.pk}:{COMPARISON_VERSION}:{hour}"
    outbox.publish(
        topic="dataset.compare",
        key=key,
        payload={"version_id": version.pk, "other_id": other.pk},
        organization=version.organization_id,
        lane=lane_of_rows(version.data_bytes + other.data_bytes),
    )
