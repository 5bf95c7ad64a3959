import datetime
import functools
import itertools
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from django.utils import timezone

from apps.accounts.models import Organization, default_project_id
from apps.core.database.clock import db_now
from apps.core.database.tenancy import tenant
from apps.core.errors import InvalidState, InvalidValue
from apps.core.messages.outbox import deliver_due
from apps.core.models import AuditEntry, OutboxMessage
from apps.core.objects.store import DirectoryStore, ObjectMissing, store
from apps.datasets.intake import lanes, versions
from apps.datasets.intake.lanes import ReadingTime
from apps.datasets.intake.revisions import fit_version, remap_version
from apps.datasets.intake.versions import FileTooLarge, StorageFull, clean_name
from apps.datasets.models import Dataset, DatasetVersion
from apps.datasets.operations import delete_expired, delete_version
from apps.datasets.queries import UnknownFile, get_version, list_versions, read_rows, storage_used_bytes
from apps.datasets.stream import LINES_PER_OFFSET
from apps.datasets.tasks import validate
from apps.datasets.validation import leases
from apps.datasets.validation.formats import Format, Mapping
from apps.datasets.validation.leases import validate_version
from apps.finetuning.usage.quotas import set_quota
from tests.factories.catalog import make_base_model
from tests.factories.datasets import jsonl, make_ready_version, make_version

pytestmark = pytest.mark.django_db


def objects_of(organization: Organization) -> list[str]:
    directory = store()
    assert isinstance(directory, DirectoryStore)
    return [str(path) for path in (directory.root / f"org/{organization.pk}").rglob("*") if path.is_file()]


class TestUpload:
    def test_keeps_the_bytes_and_asks_for_validation(self, organization: Organization) -> None:
        version = make_version(organization, filename="cards.jsonl")

        assert (version.status, version.number, version.dataset.name) == ("uploaded", 1, "cards")
        assert version.bytes == len(jsonl())
        assert OutboxMessage.objects.get(topic="dataset.validate").payload == {"version_id": version.pk}
        assert AuditEntry.objects.get(action="dataset.uploaded").target == version.pk

    def test_of_the_same_name_is_the_next_version(self, organization: Organization, rival: Organization) -> None:
        first = make_version(organization)

        second, foreign = make_version(organization, jsonl(20)), make_version(rival)

        assert (second.dataset_id, second.number) == (first.dataset_id, 2)
        assert foreign.dataset_id != first.dataset_id

    def test_works_under_row_level_security(self, organization: Organization, alice: Any) -> None:
        with tenant(organization=organization, user=alice):
            version = make_version(organization)

            assert get_version(organization=organization, id=version.pk) == version

    def test_that_breaks_off_leaves_nothing(self, organization: Organization) -> None:
        def chunks() -> Iterator[bytes]:
            yield jsonl()
            raise ConnectionError

        with pytest.raises(ConnectionError):
            make_version(organization, chunks=chunks())

        assert objects_of(organization) == []
        assert not DatasetVersion.objects.exists()

    def test_whose_row_cannot_be_written_leaves_no_object(
        self, organization: Organization, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(**_: object) -> None:
            raise RuntimeError("no audit, no change")

        monkeypatch.setattr(versions.audit, "record", refuse)

        with pytest.raises(RuntimeError):
            make_version(organization)

        assert objects_of(organization) == []

    def test_longer_than_a_file_may_be_is_refused(
        self, organization: Organization, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(versions, "MAX_FILE_BYTES", 1000)

        with pytest.raises(FileTooLarge):
            make_version(organization, chunks=iter([b"x" * 600, b"x" * 600]))

        assert objects_of(organization) == []

    def test_beyond_the_storage_limit_is_refused(self, organization: Organization) -> None:
        make_version(organization)
        limit = int(1.5 * len(jsonl()))

        set_quota(organization=organization, by="system", now=db_now(), storage_bytes=limit)
        with pytest.raises(StorageFull, match="bytes of storage left"):
            make_version(organization)

        assert storage_used_bytes(organizations=[organization.pk]).total() == len(jsonl())

    @pytest.mark.parametrize(
        "wrong", [{"purpose": "assistants"}, {"expires_after_seconds": 10}, {"expires_after_seconds": 10**9}]
    )
    def test_with_a_value_we_do_not_take_is_refused(self, organization: Organization, wrong: dict[str, Any]) -> None:
        with pytest.raises(InvalidValue):
            make_version(organization, **wrong)

    @pytest.mark.parametrize(
        ("name", "clean"),
        [
            ("../../etc/passwd", "passwd"),
            ("C:\\data\\train.jsonl", "train.jsonl"),
            ("a\x00b\u202ec\n", "abc"),
            ("   ", ""),
            ("Cafe\u0301", "Café"),
        ],
    )
    def test_names_are_made_harmless(self, name: str, clean: str) -> None:
        assert clean_name(name, limit=50) == clean


class TestValidation:
    def test_marks_a_good_file_ready(self, organization: Organization) -> None:
        version = make_ready_version(organization)

        assert (version.status, version.rows, version.error_count) == ("ready", 12, 0)
        assert version.validated_at and version.validation_lease_expires_at is None

    def test_stores_what_is_wrong_with_a_bad_one(self, organization: Organization) -> None:
        version = make_ready_version(organization, jsonl() + b'{"messages": [{"role": "robot"}]}\n')

        assert (version.status, version.rows, version.error_count) == ("invalid", 13, 1)
        assert version.errors[0]["line"] == 13
        assert set(version.errors[0]) == {"line", "code", "message", "param", "fix"}

    def test_happens_once_however_often_it_is_asked_for(self, organization: Organization) -> None:
        version = make_ready_version(organization)

        assert validate_version(version_id=version.pk, now=db_now()) is None
        assert AuditEntry.objects.filter(action="dataset.validated").count() == 1

    def test_is_not_done_twice_at_a_time(self, organization: Organization) -> None:
        version = make_version(organization)
        lease = leases._Lease(version, db_now())
        assert lease.take()

        assert validate_version(version_id=version.pk, now=db_now()) is None

    def test_of_a_worker_that_died_is_taken_over(self, organization: Organization) -> None:
        version = make_version(organization)
        dead = leases._Lease(version, db_now() - datetime.timedelta(hours=1))
        dead.take()

        taken_over = validate_version(version_id=version.pk, now=db_now())

        assert taken_over and taken_over.status == "ready"

    def test_of_a_worker_that_was_only_slow_changes_nothing_any_more(self, organization: Organization) -> None:
        version = make_version(organization)
        slow = leases._Lease(version, db_now() - datetime.timedelta(hours=1))
        slow.take()
        validate_version(version_id=version.pk, now=db_now())

        assert leases._record_report(version, leases._unreadable("not_read", "Gone.", "Again."), slow) is None
        assert DatasetVersion.objects.get().status == "ready"

    def test_held_by_another_is_asked_for_again(self, organization: Organization) -> None:
        version = make_version(organization)
        leases._Lease(version, db_now()).take()

        with pytest.raises(leases.HeldByAnother):
            validate(version.pk)

    def test_that_ends_with_its_worker_again_and_again_is_given_up(self, organization: Organization) -> None:
        version = make_version(organization)
        for _ in range(leases.MAX_ATTEMPTS):
            version.refresh_from_db()
            leases.release_expired_leases(version, db_now())
            assert leases._Lease(version, db_now() - datetime.timedelta(hours=1)).take()

        given_up = validate_version(version_id=version.pk, now=db_now())

        assert given_up and (given_up.status, given_up.errors[0]["code"]) == ("invalid", "not_read")
        mapping = Mapping(format=Format.CHAT, columns={"messages": "messages"})
        again = remap_version(version=given_up, mapping=mapping, by="user_1", now=db_now())
        done = validate_version(version_id=again.pk, now=db_now())
        assert done and done.status == "ready"

    def test_writes_no_more_rows_than_may_be_stored(self, organization: Organization) -> None:
        table = b"prompt,completion\n" + b"Hi,Hello\n" * 500
        version = make_version(organization, table, filename="a.csv")
        set_quota(organization=organization, by="system", now=db_now(), storage_bytes=len(table) + 1_000)

        done = validate_version(version_id=version.pk, now=db_now())

        assert done and (done.status, done.errors[0]["code"]) == ("invalid", "storage_full")
        assert [key for key in objects_of(organization) if key.endswith("rows.jsonl")] == []

    def test_takes_no_longer_than_the_file_is_large(self, organization: Organization, monkeypatch: Any) -> None:
        ticks = iter(range(0, 10_000, 100))
        slow = functools.partial(ReadingTime, clock=lambda: next(ticks))
        monkeypatch.setattr(leases, "ReadingTime", slow)

        done = validate_version(version_id=make_version(organization).pk, now=db_now())

        assert done and (done.status, done.errors[0]["code"]) == ("invalid", "too_slow")
        assert done.layout.is_rejected

    def test_of_rows_that_fit_a_model_has_the_same_limit(self, organization: Organization, monkeypatch: Any) -> None:
        version = make_ready_version(organization)
        fitted = fit_version(version=version, base_model=make_base_model(), by="user_1", now=db_now())
        ticks = iter(range(0, 10_000, 100))
        monkeypatch.setattr(leases, "ReadingTime", functools.partial(ReadingTime, clock=lambda: next(ticks)))

        done = validate_version(version_id=fitted.pk, now=db_now())

        assert done and (done.status, done.errors[0]["code"]) == ("invalid", "too_slow")
        assert not [key for key in objects_of(organization) if key.endswith(fitted.object_key)]

    def test_notices_a_file_that_was_changed_or_lost(self, organization: Organization) -> None:
        changed, lost = make_version(organization), make_version(organization)
        store().put_stream(changed.object_key, [jsonl(15)])
        store().delete(lost.object_key)

        for version in (changed, lost):
            validated = validate_version(version_id=version.pk, now=db_now())

            assert validated and validated.status == "invalid"
            assert validated.errors[0]["code"] == "content_changed"

    def test_of_a_small_file_waits_for_no_large_one_and_of_each_organization_in_turn(
        self, organization: Organization, rival: Organization, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(lanes, "SMALL_BYTES", len(jsonl()))
        monkeypatch.setattr(lanes, "MIDDLE_BYTES", len(jsonl(20)))
        large = [make_version(organization, jsonl(40)) for _ in range(3)]
        small, middle, other = make_version(rival), make_version(rival, jsonl(20)), make_version(rival, jsonl(50))

        deliver_due(lane="data-small", limit=1)
        deliver_due(lane="data-middle", limit=1)
        deliver_due(lane="data", limit=2)

        waiting = DatasetVersion.objects.filter(status="uploaded")
        assert {version.pk for version in waiting} == {version.pk for version in large[1:]}
        assert {small.pk, middle.pk, other.pk}.isdisjoint(waiting.values_list("pk", flat=True))

    def test_a_small_file_that_takes_long_leaves_the_lane_of_small_ones(
        self, organization: Organization, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The files of other tenants wait for it there."""
        monkeypatch.setattr("apps.datasets.validation.leases.SMALL_SECONDS", -1.0)
        version = make_version(organization)

        deliver_due(lane="data-small", limit=1)

        version.refresh_from_db()
        assert (version.status, version.validation_attempts) == ("uploaded", 0)
        assert not OutboxMessage.objects.filter(lane="data-small", sent_at=None).exists()
        deliver_due(lane="data-middle", limit=1)
        version.refresh_from_db()
        assert version.status == "ready"

    def test_a_small_file_on_a_busy_machine_stays_in_its_lane(
        self, organization: Organization, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Only its own processor time counts."""
        clock = SimpleNamespace(monotonic=itertools.count(0, 5).__next__, thread_time=time.thread_time)
        monkeypatch.setattr("apps.datasets.validation.leases.time", clock)
        version = make_version(organization)

        deliver_due(lane="data-small", limit=1)

        version.refresh_from_db()
        assert version.status == "ready"


class TestReading:
    def test_rows_are_found_far_into_a_file(self, organization: Organization) -> None:
        version = make_ready_version(organization, jsonl(2 * LINES_PER_OFFSET + 40))

        previews = read_rows(version=version, first_line=2 * LINES_PER_OFFSET + 3, limit=2)

        assert [preview.line for preview in previews] == [2 * LINES_PER_OFFSET + 3, 2 * LINES_PER_OFFSET + 4]
        assert previews[0].row and previews[0].row.messages[0].content == f"Where is card {2 * LINES_PER_OFFSET + 2}?"
        assert read_rows(version=version, first_line=10_000) == []

    def test_a_bad_row_is_shown_with_its_error(self, organization: Organization) -> None:
        version = make_ready_version(organization, jsonl(3) + b'{"messages": 7}\n')

        preview = read_rows(version=version, first_line=4)[0]

        assert (preview.raw, preview.row) == ('{"messages": 7}', None)
        assert preview.error and preview.error.code == "invalid_messages"

    def test_foreign_and_unknown_ids_give_the_same_answer(
        self, organization: Organization, rival: Organization
    ) -> None:
        foreign = make_version(rival)
        unknown = "file-" + "0" * 26

        answers = []
        for identifier in (foreign.pk, unknown):
            with pytest.raises(UnknownFile) as raised:
                get_version(organization=organization, id=identifier)
            answers.append(str(raised.value.as_openai()).replace(identifier, "ID"))

        assert answers[0] == answers[1]


class TestDeletion:
    def test_hides_the_file_at_once_and_asks_for_its_bytes_to_go(self, organization: Organization) -> None:
        version = make_ready_version(organization)

        delete_version(version=version, by="user_1", now=timezone.now())

        assert not list_versions(organization=organization).exists()
        assert not Dataset.objects.filter(deleted_at=None).exists()
        message = OutboxMessage.objects.get(topic="objects.delete")
        store().delete_prefix(message.payload["prefix"])
        with pytest.raises(ObjectMissing), store().open_stream(version.object_key):
            pass
        assert AuditEntry.objects.get(action="dataset.deleted").target == version.pk

    def test_frees_the_name_and_the_storage(self, organization: Organization) -> None:
        delete_version(version=make_ready_version(organization), by="user_1", now=timezone.now())

        assert storage_used_bytes(organizations=[organization.pk]).total() == 0
        assert make_version(organization).number == 1

    def test_waits_for_the_job_that_uses_the_file(self, organization: Organization) -> None:
        version = make_ready_version(organization)
        make_job(organization, version)

        with pytest.raises(InvalidState, match="still uses this file"):
            delete_version(version=version, by="user_1", now=timezone.now())

    def test_is_refused_while_somebody_reads_the_file(self, organization: Organization) -> None:
        version = make_version(organization)
        leases._Lease(version, db_now()).take()

        with pytest.raises(InvalidState, match="in a moment"):
            delete_version(version=version, by="user_1", now=db_now())

    def test_comes_as_long_after_the_creation_as_was_asked_however_slow_the_upload(self, organization) -> None:
        begun = db_now() - datetime.timedelta(minutes=5)
        version = make_version(organization, expires_after_seconds=3600, now=begun)

        assert version.expires_at - version.created_at == datetime.timedelta(hours=1)

    def test_happens_by_itself_when_the_file_expires(self, organization: Organization) -> None:
        expiring = make_ready_version(organization, expires_after_seconds=3600)
        lasting = make_ready_version(organization)

        assert delete_expired(now=db_now()) == 0
        assert delete_expired(now=db_now() + datetime.timedelta(hours=2)) == 1

        expiring.refresh_from_db()
        assert expiring.status == "deleted"
        assert list(list_versions(organization=organization)) == [lasting]


def make_job(organization: Organization, version: DatasetVersion) -> None:
    from apps.finetuning.models import FineTuningJob

    FineTuningJob.objects.create(
        organization=organization,
        project_id=default_project_id(organization),
        base_model=make_base_model(),
        training_file=version,
        method="lora",
        hyperparameters={},
        seed=1,
        created_by="user_1",
    )
