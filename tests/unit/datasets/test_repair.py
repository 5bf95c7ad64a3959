import json
import time
import tracemalloc

import pytest

from apps.accounts.models import Organization
from apps.catalog.queries import chat_renderer
from apps.contracts.chat import Line, RowKind
from apps.core.database.clock import db_now
from apps.core.objects.store import read_object
from apps.datasets.intake.revisions import NewerVersion, NotRepairable, remap_version, repair_version
from apps.datasets.intake.versions import StorageFull
from apps.datasets.models import DatasetVersion
from apps.datasets.queries import read_rows, storage_used_bytes
from apps.datasets.validation.formats import Format, Mapping
from apps.datasets.validation.leases import validate_version
from apps.datasets.validation.repair import RepairMode, repair_line
from apps.datasets.validation.row_checks import check_line
from apps.datasets.validation.template_fit import RenderableRows
from apps.finetuning.usage.quotas import set_quota
from tests.factories.catalog import make_base_model
from tests.factories.datasets import chat_row, jsonl, make_ready_version

USER, ANSWER = chat_row("Hi", "Hello")["messages"]


def repaired(data: bytes) -> object:
    line = Line(1, data)
    problem = check_line(line, RowKind.CHAT)
    assert problem is not None
    found = repair_line(line, problem, RowKind.CHAT)
    return found if found is None else json.loads(found)


@pytest.mark.parametrize(
    "row",
    [
        chat_row("Hi", "Hello") | {"id": 4},
        {"messages": [USER | {"weight": 1}, ANSWER]},
        {"messages": [USER, ANSWER | {"weight": "1", "x": 1}]},
        {"messages": [{"role": "Human", "content": "Hi"}, {"role": "gpt", "content": "Hello"}]},
        {"messages": [USER, ANSWER, USER]},
    ],
)
def test_what_can_be_repaired_without_guessing_is(row: dict) -> None:
    found = repaired(json.dumps(row).encode())

    assert isinstance(found, dict)
    assert [message["content"] for message in found["messages"]] == ["Hi", "Hello"]
    assert set(found) == {"messages"}


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (json.dumps(chat_row("A\x00B", "Hello")).encode(), "AB"),
        (b'{"messages": [{"role": "user", "content": "A\\ud800"}, {"role": "assistant", "content": "x"}]}', "A\ufffd"),
        (json.dumps(chat_row("Caf\xe9"), ensure_ascii=False).encode("cp1252"), "Caf\xe9"),
        (json.dumps(chat_row("Hi")).replace('"role": "user"', '"role": "user", "role": "user"').encode(), "Hi"),
        (json.dumps({"messages": [{"role": "user", "content": 7}, ANSWER]}).encode(), "7"),
        (json.dumps(chat_row("Hi")).encode() + b",", "Hi"),
    ],
)
def test_damaged_text_is_repaired(data: bytes, text: str) -> None:
    found = repaired(data)

    assert isinstance(found, dict) and found["messages"][0]["content"] == text


@pytest.mark.parametrize(
    "data",
    [
        b'{"messages": [',
        json.dumps({"messages": [USER]}).encode(),
        json.dumps({"messages": [USER, ANSWER | {"weight": 0.5}]}).encode(),
        json.dumps({"messages": [USER, ANSWER | {"content": " "}]}).encode(),
        json.dumps(chat_row("Hi")).replace('"role": "user"', '"role": "user", "role": "system"').encode(),
        json.dumps({"messages": [USER, ANSWER]}).replace("}]", ', "weight": 1, "weight": true}]').encode(),
        json.dumps(chat_row("M\xfcller"), ensure_ascii=False).encode() + b" \x92",  # UTF-8 but for one byte
        b"[1]",
    ],
)
def test_what_would_take_a_guess_is_left_out(data: bytes) -> None:
    assert repaired(data) is None


def test_a_deep_row_is_repaired_in_time_that_grows_with_it() -> None:
    row = b'{"messages": ' + b'{"a": ' * 800 + b'{"x": 1, "x": 1, "y": "' + b"z" * 300_000 + b'"}' + b"}" * 801
    began = time.process_time()

    repaired(row)

    assert time.process_time() - began < 5  # 0.003 s; a copy of the text at each level took half a minute


BAD = [json.dumps(chat_row() | {"id": 1}).encode() + b"\n", b"{broken\n"]


@pytest.fixture
def bad(organization: Organization) -> DatasetVersion:
    return make_ready_version(organization, BAD[0] + jsonl() + BAD[1], filename="cards.jsonl")


@pytest.mark.django_db
class TestRepair:
    @pytest.mark.parametrize(
        ("mode", "rows", "repaired", "dropped"), [(RepairMode.DROP, 12, 0, 2), (RepairMode.REPAIR, 13, 1, 1)]
    )
    def test_makes_a_new_version_and_leaves_the_old(self, bad, mode, rows, repaired, dropped) -> None:
        made = repair_version(version=bad, mode=mode, by="user_1", now=db_now())
        assert (made.status, made.number, made.derived_from_id) == ("uploaded", 2, bad.pk)

        done = validate_version(version_id=made.pk, now=db_now())

        assert done and (done.status, done.rows, done.error_count) == ("ready", rows, 0)
        assert (done.layout.repaired, done.layout.dropped) == (repaired, dropped)
        assert jsonl() in read_object(done.data_key), "good rows are not touched"
        bad.refresh_from_db()
        assert (bad.status, bad.rows) == ("invalid", 14)

    def test_of_a_table_writes_our_rows(self, organization: Organization) -> None:
        table = b"prompt,completion\n" + b"Hi,Hello\n" * 12 + b"Hi,\n"
        version = make_ready_version(organization, table, filename="a.csv")

        made = repair_version(version=version, mode=RepairMode.DROP, by="user_1", now=db_now())
        done = validate_version(version_id=made.pk, now=db_now())

        assert done and (done.status, done.rows, done.filename) == ("ready", 12, "a.jsonl")

    def test_of_a_version_that_was_not_seen_is_refused(self, bad) -> None:
        """As for a form that is sent twice."""
        repair_version(version=bad, mode=RepairMode.DROP, newest=1, by="user_1", now=db_now())

        with pytest.raises(NewerVersion):
            repair_version(version=bad, mode=RepairMode.DROP, newest=1, by="user_1", now=db_now())
        assert DatasetVersion.objects.count() == 2

    def test_needs_bad_rows_and_room(self, organization: Organization, bad: DatasetVersion) -> None:
        good, unreadable = make_ready_version(organization), make_ready_version(organization, b"%PDF-1.7")

        for version in (good, unreadable):
            with pytest.raises(NotRepairable):
                repair_version(version=version, mode=RepairMode.DROP, by="user_1", now=db_now())
        set_quota(organization=organization, by="system", now=db_now(), storage_bytes=10)
        with pytest.raises(StorageFull):
            repair_version(version=bad, mode=RepairMode.DROP, by="user_1", now=db_now())


TABLE = b"utterance,label\n" + b"Hi,greeting\n" * 12
MAPPING = Mapping(format=Format.PROMPT_COMPLETION, columns={"prompt": "utterance", "completion": "label"})


@pytest.mark.django_db
class TestColumns:
    def test_a_file_nobody_could_read_is_read_as_told(self, organization: Organization) -> None:
        version = make_ready_version(organization, TABLE, filename="a.csv")
        assert (version.status, version.errors[0]["code"]) == ("invalid", "unknown_columns")

        again = remap_version(version=version, mapping=MAPPING, by="user_1", now=db_now())
        done = validate_version(version_id=again.pk, now=db_now())

        assert done and (done.pk, done.status, done.kind) == (version.pk, "ready", "chat")
        row = read_rows(version=done)[0].row
        assert row and row.messages[1].content == "greeting"
        assert storage_used_bytes(organizations=[organization.pk]).total() == len(TABLE) + done.rows_bytes

    def test_a_ready_file_becomes_another_version(self, organization: Organization) -> None:
        version = make_ready_version(
            organization, TABLE.replace(b"utterance,label", b"prompt,answer"), filename="a.csv"
        )
        assert version.status == "ready"
        swapped = Mapping(format=Format.PROMPT_COMPLETION, columns={"prompt": "answer", "completion": "prompt"})

        made = remap_version(version=version, mapping=swapped, by="user_1", now=db_now())
        done = validate_version(version_id=made.pk, now=db_now())

        assert done and (done.number, done.derived_from_id, done.sha256) == (2, version.pk, version.sha256)
        row = read_rows(version=done)[0].row
        assert row and row.messages[1].content == "Hi"


@pytest.mark.django_db
def test_long_rows_are_fitted_with_little_memory() -> None:
    row = json.dumps(chat_row("x" * 500_000)).encode() + b"\n"
    renderer = chat_renderer(base_model=make_base_model())
    list(RenderableRows([row], kind=RowKind.CHAT, renderer=renderer))

    tracemalloc.start()
    kept = sum(len(piece) for piece in RenderableRows([row] * 60, kind=RowKind.CHAT, renderer=renderer))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert kept == 60 * len(row)
    assert peak_bytes < 24 * 1024 * 1024
