"""A training file compared with its validation file: what repeats it is counted once, for large files by a task."""

import pytest

from apps.contracts.splits.held_rows import Repeats
from apps.core.models import OutboxMessage
from apps.datasets.inspection import comparisons
from apps.datasets.models import DatasetVersion, VersionComparison
from apps.datasets.tasks import compare
from tests.factories.datasets import chat_row, jsonl, jsonl_of, make_ready_version

pytestmark = pytest.mark.django_db
LONG = "The quick brown fox jumps over the lazy dog while the cat looks on from the warm window sill in the sun"


@pytest.fixture
def pair(organization) -> tuple[DatasetVersion, DatasetVersion]:
    """Twelve of the twenty-two rows of the first stand in the second one, and one nearly does."""
    nearly = [chat_row(f"{LONG} today", "fox"), chat_row("Nothing alike in the other file at all", "none")]
    held = jsonl(12) + jsonl_of(chat_row(LONG, "fox"))
    training = make_ready_version(organization, jsonl(20) + jsonl_of(*nearly), filename="a.jsonl")
    return training, make_ready_version(organization, held, filename="b.jsonl")


def test_small_files_are_compared_at_once_and_once(pair, monkeypatch) -> None:
    training, validation = pair

    made = comparisons.find_or_compare(version=training, other=validation)
    monkeypatch.setattr(comparisons, "iterate_rows", None)
    again = comparisons.find_or_compare(version=training, other=validation)

    assert made is not None and made == again
    assert (made.equal_rows, made.near_rows, made.left_out_rows) == (12, 1, 13)
    marks = [Repeats.A_ROW] * 12 + [Repeats.NOTHING] * 8 + [Repeats.NEARLY_A_ROW, Repeats.NOTHING]
    assert list(comparisons.marks_of(made)) == marks


def test_large_files_are_compared_by_a_task_asked_for_once(pair, monkeypatch) -> None:
    training, validation = pair
    monkeypatch.setattr(comparisons, "COMPARE_NOW_ROWS", 30)

    assert [comparisons.find_or_compare(version=training, other=validation) for _ in range(2)] == [None, None]
    [asked] = OutboxMessage.objects.filter(topic="dataset.compare")
    compare(**asked.payload)

    made = comparisons.find_or_compare(version=training, other=validation)
    assert made is not None and made.left_out_rows == 13


def test_what_older_rules_found_is_looked_for_again(pair) -> None:
    training, validation = pair
    comparisons.compare_versions(version=training, other=validation)
    VersionComparison.objects.update(rules=comparisons.COMPARISON_VERSION - 1, near_rows=9)

    made = comparisons.find_or_compare(version=training, other=validation)

    assert made is not None and made.near_rows == 1
    assert VersionComparison.objects.count() == 1


def test_a_file_that_is_not_ready_is_not_compared(pair) -> None:
    training, validation = pair
    validation.status = "validating"

    assert comparisons.find_or_compare(version=training, other=validation) is None
    assert not OutboxMessage.objects.filter(topic="dataset.compare").exists()
