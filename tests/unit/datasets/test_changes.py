"""The rows that differ between two versions of a dataset."""

import json

import pytest

from apps.core.models import OutboxMessage
from apps.datasets.inspection import changes
from apps.datasets.inspection.changes import (
    Changes,
    RowChange,
    compare_rows,
    find_changes,
    request_changes,
    store_changes,
)
from tests.factories.datasets import chat_row, jsonl, jsonl_of, make_ready_version

pytestmark = pytest.mark.django_db


def compared(organization, old: list[str], new: list[str]) -> Changes:
    common = [f"Where is card {n}?" for n in range(10)]
    before, after = (
        make_ready_version(organization, jsonl_of(*map(chat_row, [*rows, *common]))) for rows in (old, new)
    )
    return compare_rows(version=after, since=before)


def test_changed_added_and_removed_rows_are_told_apart(organization) -> None:
    found = compared(organization, ["a", "b", "keep", "c"], ["a", "B", "keep", "x", "y", "z"])

    assert (found.changed, found.added, found.removed) == (2, 2, 0)
    assert found.first_changed == [RowChange(2, 2), RowChange(4, 4)]
    assert found.first_added == [RowChange(0, 5), RowChange(0, 6)]
    assert compared(organization, ["a", "b"], ["a"]).first_removed == [RowChange(2, 0)]


def test_a_row_that_stands_twice_counts_twice(organization) -> None:
    found = compared(organization, ["twin", "twin", "twin"], ["twin", "twin"])

    assert (found.changed, found.added, found.removed) == (0, 0, 1)


def test_spacing_and_the_order_of_keys_are_no_change(organization) -> None:
    rows = [chat_row(f"Where is {n}?") for n in range(10)]
    spaced = b"".join(
        json.dumps(row, indent=None, sort_keys=True, separators=(" ,", " : ")).encode() + b"\n" for row in rows
    )

    found = compare_rows(
        version=make_ready_version(organization, spaced), since=make_ready_version(organization, jsonl_of(*rows))
    )

    assert found == Changes()


def test_many_rows_are_compared_in_parts_with_the_same_result(organization, monkeypatch) -> None:
    whole = compared(organization, ["a", "b", "c"], ["c", "b", "d"])
    monkeypatch.setattr(changes, "_ROWS_COMPARED_AT_ONCE", 2)

    assert compared(organization, ["a", "b", "c"], ["c", "b", "d"]) == whole


def test_the_list_of_changes_is_bounded_and_the_counts_are_not(organization, monkeypatch) -> None:
    monkeypatch.setattr(changes, "KEPT_CHANGES", 2)

    found = compared(organization, [], ["a", "b", "c"])

    assert (found.added, len(found.first_added)) == (3, 2)


def test_large_files_are_compared_once_by_a_task(organization, monkeypatch) -> None:
    old, new = make_ready_version(organization, jsonl(12)), make_ready_version(organization, jsonl(13))
    monkeypatch.setattr(changes, "CHANGES_NOW_BYTES", 10)
    assert find_changes(version=new, since=old) is None

    store_changes(version=new, since=old)

    assert find_changes(version=new, since=old) == Changes(added=1, first_added=[RowChange(0, 13)])


def test_files_that_were_read_again_are_compared_again(organization) -> None:
    old, new = make_ready_version(organization, jsonl(12)), make_ready_version(organization, jsonl(13))
    for _ in range(2):
        request_changes(version=new, since=old)
    new.rows_key, new.rows_sha256 = "elsewhere", "f" * 64

    request_changes(version=new, since=old)

    assert OutboxMessage.objects.filter(topic="dataset.changes").count() == 2
