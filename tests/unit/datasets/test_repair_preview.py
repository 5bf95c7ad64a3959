"""What a preview of a repair shows: the rows that the repair changes or leaves out."""

import json

import pytest

from apps.core.database.clock import db_now
from apps.core.objects.store import read_object
from apps.datasets.inspection.repair_preview import preview_repair
from apps.datasets.intake.revisions import repair_version
from apps.datasets.models import DatasetVersion
from apps.datasets.validation.leases import validate_version
from apps.datasets.validation.repair import RepairMode
from tests.factories.datasets import chat_row, jsonl, jsonl_of, make_ready_version

pytestmark = pytest.mark.django_db
BAD = [
    chat_row("Hi") | {"id": 4},  # has one fix
    {"messages": [{"role": "user", "content": "Hi"}]},  # has none
]


@pytest.mark.parametrize("mode", list(RepairMode))
def test_a_preview_shows_what_the_repair_does(organization, mode: RepairMode) -> None:
    version = make_ready_version(organization, jsonl(12) + jsonl_of(*BAD) + b'{"messages": [')
    assert version.status == "invalid"

    preview = preview_repair(version=version, mode=mode)

    repaired = repair_version(version=version, mode=mode, by="user_1", now=db_now())
    validate_version(version_id=repaired.pk, now=db_now())
    added = read_object(DatasetVersion.objects.get(pk=repaired.pk).object_key).decode().splitlines()[12:]
    assert [row.after for row in preview.rows if row.after is not None] == added
    assert [row.problem.line for row in preview.rows] == [13, 14, 15]
    assert (preview.total, preview.listed, preview.fixed) == (3, 3, len(added))
    assert json.loads(preview.rows[0].before) == BAD[0]


def test_a_preview_of_a_table_shows_its_rows(organization) -> None:
    content = "prompt,completion\n" + "".join(f"Where is {n}?,here\n" for n in range(10)) + "one,\nonly one value\n"
    version = make_ready_version(organization, content.encode(), filename="a.csv")

    preview = preview_repair(version=version, mode=RepairMode.REPAIR, skip=1)

    assert (preview.total, [row.problem.line for row in preview.rows]) == (2, [12])
    assert preview.rows[0].after is None


def test_bad_rows_far_from_each_other_are_counted(organization) -> None:
    fixable = jsonl_of(BAD[0])
    version = make_ready_version(organization, fixable + jsonl(300) + fixable + jsonl(700) + fixable + jsonl_of(BAD[1]))

    preview = preview_repair(version=version, mode=RepairMode.REPAIR, skip=2, limit=1)

    assert (preview.total, preview.listed, preview.fixed) == (4, 4, 3)
    assert [row.problem.line for row in preview.rows] == [1003]
    assert json.loads(preview.rows[0].before) == BAD[0]


def test_more_bad_rows_than_a_page_reads_are_not_counted_by_what_becomes_of_them(organization) -> None:
    version = make_ready_version(organization, jsonl(12) + jsonl_of(*[BAD[0]] * 51))

    preview = preview_repair(version=version, mode=RepairMode.REPAIR)

    assert (preview.total, preview.listed, preview.fixed, len(preview.rows)) == (51, 51, None, 10)


def test_a_file_without_bad_rows_has_no_preview(organization) -> None:
    assert preview_repair(version=make_ready_version(organization), mode=RepairMode.DROP).total == 0
    assert preview_repair(version=make_ready_version(organization, jsonl(2)), mode=RepairMode.DROP).total == 0
