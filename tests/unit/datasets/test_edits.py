"""Edits of a row and restored versions: each is a new version, and the old one stays."""

import json

import pytest

from apps.core.database.clock import db_now
from apps.core.errors import InvalidState, InvalidValue
from apps.core.models import AuditEntry
from apps.core.objects.store import read_object
from apps.datasets.intake import versions
from apps.datasets.intake.edits import NewerVersion, RowMissing, edit_row, read_editable_row, restore_version
from apps.datasets.intake.revisions import repair_version
from apps.datasets.intake.versions import StorageFull
from apps.datasets.models import DatasetVersion
from apps.datasets.queries import storage_used_bytes
from apps.datasets.stream import replace_line
from apps.datasets.validation.formats import read_mapping
from apps.datasets.validation.leases import validate_version
from apps.datasets.validation.repair import RepairMode
from apps.finetuning.usage.quotas import set_quota
from tests.factories.datasets import chat_row, jsonl, jsonl_of, make_ready_version

pytestmark = pytest.mark.django_db


def edited(version: DatasetVersion, line: int, text: str | None, *, newest: int | None = None) -> DatasetVersion:
    made = edit_row(version=version, line=line, text=text, newest=newest or version.number, by="user_1", now=db_now())
    validated = validate_version(version_id=made.pk, now=db_now())
    assert validated is not None
    return validated


def rows_of(version: DatasetVersion) -> list[object]:
    return [json.loads(line) for line in read_object(version.data_key).splitlines()]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("end", [b"", b"\n"])
@pytest.mark.parametrize("line", [1, 2, 3])
def test_one_line_of_a_stream_is_replaced_or_left_out(size: int, end: bytes, line: int) -> None:
    content = b"first\n\nthird" + end
    chunks = [content[at : at + size] for at in range(0, len(content), size)]
    lines = [b"first\n", b"\n", b"third" + end]

    for data in (b"new\n", b""):
        lines[line - 1] = data
        assert b"".join(replace_line(chunks, line, data)) == b"".join(lines)


def test_a_saved_row_is_in_the_next_version_and_the_old_version_stays(organization) -> None:
    version = make_ready_version(organization, jsonl(12))
    before = read_object(version.object_key)
    new = chat_row("Where is my car?", "car")

    made = edited(version, 5, json.dumps(new, indent=2))

    assert (made.status, made.number, made.dataset_id, made.derived_from_id) == (
        "ready",
        2,
        version.dataset_id,
        version.pk,
    )
    assert rows_of(made) == [*rows_of(version)[:4], new, *rows_of(version)[5:]]
    assert read_object(version.object_key) == before
    assert b'{"messages": [{"role": "user", "content": "Where is my car?"}' in read_object(made.object_key)
    assert AuditEntry.objects.filter(action="dataset.repaired", target=made.pk).exists()


def test_a_deleted_row_is_missing_in_the_next_version(organization) -> None:
    version = make_ready_version(organization, jsonl(12))

    made = edited(version, 12, None)

    assert (made.status, made.rows, made.layout.dropped) == ("ready", 11, 1)
    assert rows_of(made) == rows_of(version)[:11]


def test_a_row_of_a_table_is_edited_in_the_form_in_which_it_is_kept(organization) -> None:
    content = "prompt,completion\n" + "".join(f"Where is {n}?,here\n" for n in range(10))
    version = make_ready_version(organization, content.encode(), filename="a.csv")

    made = edited(version, 3, json.dumps(chat_row("Where are you?", "here")))

    assert (made.status, made.filename, made.rows) == ("ready", "a.jsonl", 10)
    assert rows_of(made)[2] == chat_row("Where are you?", "here")


def test_the_bad_row_of_a_file_can_be_fixed_by_hand(organization) -> None:
    version = make_ready_version(organization, jsonl(12) + b'{"messages": []}\n')
    assert version.status == "invalid"

    assert edited(version, 13, json.dumps(chat_row())).status == "ready"


USER = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"messages": [\n  {"role": }]}', "not valid JSON at line 2, column 12"),
        (json.dumps({"messages": [USER | {"role": "robot"}]}), "`messages[0]` has the role `robot`"),
        (json.dumps({"messages": [USER]}), "`messages[0].role`: The last message is from user"),
        (json.dumps({"messages": [USER, {"role": "assistant", "content": ""}]}), "`messages[1].content` is empty"),
        (json.dumps(chat_row()) + json.dumps(chat_row()), "not valid JSON"),
        ('{"messages": ' + "[" * 5_000 + "]" * 5_000 + "}", "nested"),
        (json.dumps(chat_row() | {"x": 1}).replace("1}", "NaN}"), "NaN"),
        (json.dumps(chat_row("x" * 300_000)), "longer than 256 KiB"),
        (json.dumps(chat_row("Where is card 0?"), indent=1), "the same as before"),
        ("", "not valid JSON"),
    ],
)
def test_a_row_that_cannot_be_trained_is_refused_in_words_that_name_the_field(organization, text, words) -> None:
    version = make_ready_version(organization, jsonl(12))

    with pytest.raises(InvalidValue) as refusal:
        edited(version, 1, text)

    assert words in refusal.value.message and refusal.value.param == "row"
    assert DatasetVersion.objects.count() == 1


def test_a_person_who_has_not_seen_the_newest_version_is_told(organization) -> None:
    version = make_ready_version(organization, jsonl(12))
    edited(version, 1, json.dumps(chat_row("first")))

    with pytest.raises(NewerVersion):
        edited(version, 2, json.dumps(chat_row("second")))
    made = edited(version, 2, json.dumps(chat_row("second")), newest=2)

    assert made.number == 3 and rows_of(made)[0] == rows_of(version)[0]


def test_a_file_keeps_as_many_rows_as_training_needs(organization) -> None:
    with pytest.raises(InvalidValue, match="at least 10"):
        edited(make_ready_version(organization, jsonl(10)), 1, None)


def test_only_rows_that_exist_and_are_short_can_be_edited(organization) -> None:
    long = chat_row("x" * 300_000)
    version = make_ready_version(organization, jsonl(12) + jsonl_of(long))

    with pytest.raises(RowMissing):
        read_editable_row(version=version, line=14)
    with pytest.raises(RowMissing):
        read_editable_row(version=version, line=0)
    with pytest.raises(InvalidState, match="longer than 256 KiB"):
        read_editable_row(version=version, line=13)


def test_an_edit_needs_storage(organization, olga) -> None:
    version = make_ready_version(organization, jsonl(12))
    set_quota(organization=organization, by=olga.pk, now=db_now(), storage_bytes=version.bytes + 10)

    with pytest.raises(StorageFull):
        edited(version, 1, json.dumps(chat_row("new")))


def test_the_files_of_an_organization_are_limited(organization, monkeypatch) -> None:
    version = make_ready_version(organization, jsonl(12))
    monkeypatch.setattr(versions, "MAX_FILES", 2)
    edited(version, 1, json.dumps(chat_row("new")))

    with pytest.raises(StorageFull, match="keeps 2 files, the most allowed"):
        restore_version(version=version, by="user_1", now=db_now())


def test_an_earlier_version_is_restored_as_the_newest(organization) -> None:
    content = "q,a\n" + "".join(f"Where is {n}?,here\n" for n in range(10))
    mapping = {"format": "prompt_completion", "columns": {"prompt": "q", "completion": "a"}}
    version = make_ready_version(organization, content.encode(), filename="a.csv", mapping=read_mapping(mapping))
    edited(version, 1, json.dumps(chat_row()))

    restored = restore_version(version=version, by="user_1", now=db_now())
    validated = validate_version(version_id=restored.pk, now=db_now())

    assert validated is not None
    assert (validated.number, validated.status, validated.filename, validated.sha256) == (
        3, "ready", "a.csv", version.sha256,
    )  # fmt: skip
    assert rows_of(validated) == rows_of(version)
    with pytest.raises(InvalidState, match="newest version already"):
        restore_version(version=validated, by="user_1", now=db_now())


def test_restored_versions_count_as_stored_before_they_are_written(organization, olga) -> None:
    version = make_ready_version(organization, jsonl(12))
    edited(version, 1, json.dumps(chat_row("new")))
    set_quota(organization=organization, by=olga.pk, now=db_now(), storage_bytes=4 * version.bytes)

    restore_version(version=version, by="user_1", now=db_now())
    with pytest.raises(StorageFull):
        for _ in range(3):
            restore_version(version=version, by="user_1", now=db_now())

    assert storage_used_bytes(organizations=[organization.pk]).total() <= 4 * version.bytes


def test_a_version_is_not_restored_over_one_that_was_not_seen(organization) -> None:
    version = make_ready_version(organization, jsonl(12))
    edited(version, 1, json.dumps(chat_row("new")))
    restore_version(version=version, newest=2, by="user_1", now=db_now())

    with pytest.raises(NewerVersion):
        restore_version(version=version, newest=2, by="user_1", now=db_now())


def test_a_bad_row_of_a_converted_file_is_edited_and_the_good_rows_stay_good(organization) -> None:
    """The bad rows keep their columns and come first, so they look like a file of another format."""
    bad, pair = ({"prompt": "Where is my card?", "completion": answer} for answer in (None, "here"))
    version = make_ready_version(organization, jsonl_of(*[bad] * 14, *[pair] * 10))
    assert version.error_count == 14

    made = edited(version, 1, json.dumps(chat_row()))
    restored = restore_version(version=version, by="user_1", now=db_now())
    validate_version(version_id=restored.pk, now=db_now())
    again = edit_row(version=made, line=2, text=json.dumps(chat_row()), newest=3, by="user_1", now=db_now())
    again = validate_version(version_id=again.pk, now=db_now())
    copy = restore_version(version=made, by="user_1", now=db_now())
    copy = validate_version(version_id=copy.pk, now=db_now())
    repaired = repair_version(version=copy, mode=RepairMode.DROP, by="user_1", now=db_now())
    repaired = validate_version(version_id=repaired.pk, now=db_now())

    assert [each.error_count for each in (made, again, copy, repaired)] == [13, 12, 13, 0]
    assert (repaired.rows, repaired.kind) == (11, "chat")


@pytest.mark.parametrize(
    ("stored", "text"),
    [
        (json.dumps(chat_row()).replace('"assistant"', '"assistant", "weight": true'), '"assistant", "weight": 1'),
        (json.dumps(chat_row()).replace('"assistant"', '"assistant", "role": "assistant"'), '"assistant"'),
    ],
)
def test_the_correction_that_an_error_asks_for_is_a_change(organization, stored, text) -> None:
    version = make_ready_version(organization, jsonl(12) + stored.encode() + b"\n")
    assert version.status == "invalid"

    assert edited(version, 13, json.dumps(chat_row()).replace('"assistant"', text)).status == "ready"
