"""What is left of an upload that was given up, completed, or has expired."""

import datetime
import os
from collections.abc import Callable, Iterator

import pytest

from apps.accounts.models import Organization
from apps.core.database.clock import db_now
from apps.core.errors import NotFound
from apps.core.models import OutboxMessage
from apps.core.objects.store import DirectoryStore, PrefixClosed, store
from apps.datasets.intake import uploads
from apps.datasets.intake.orphans import sweep_orphans
from apps.datasets.intake.parts import SIGNED_SECONDS, UploadClosed, planned_key, sign_parts
from apps.datasets.intake.uploads import add_part, delete_parts, expire_uploads, get_upload
from apps.datasets.models import Upload
from apps.datasets.queries import storage_used_bytes
from tests.factories.datasets import make_ready_version, make_upload
from tests.integration.datasets.upload_calls import CONTENT, cancel, complete, expire, put, send

pytestmark = pytest.mark.django_db


class TestSignedUrls:
    """A client with a URL of an upload that was abandoned or completed, or has expired."""

    @pytest.mark.parametrize("end", [cancel, complete, expire])
    def test_store_nothing_that_is_not_counted(
        self, organization: Organization, any_store: str, end: Callable[[Upload], object]
    ) -> None:
        upload = make_upload(organization, bytes=len(CONTENT), is_planned=True)
        [url] = sign_parts(upload=upload, numbers=[1], by="user_1", now=db_now()).values()
        put(url, CONTENT)

        end(upload)
        kept = len(CONTENT) if end is complete else 0
        assert storage_used_bytes(organizations=[organization.pk]).total() == kept + len(CONTENT), (
            "until its parts are deleted"
        )
        delete_parts(**OutboxMessage.objects.get(topic="upload.closed").payload)
        is_refused = not put(url, CONTENT)

        left = sum(info.bytes for _, info in store().list_objects(f"org/{organization.pk}/uploads"))
        assert is_refused == (any_store == "directory")
        assert storage_used_bytes(organizations=[organization.pk]).total() == kept + left
        later = db_now() + datetime.timedelta(seconds=SIGNED_SECONDS + 120)
        expire_uploads(now=later + uploads._SLOWEST_PUT)
        assert list(store().list_objects(f"org/{organization.pk}/uploads")) == []
        assert storage_used_bytes(organizations=[organization.pk]).total() == kept

    def test_stored_by_a_slow_request_after_the_end_are_deleted_too(
        self, organization: Organization, any_store: str
    ) -> None:
        """A bucket checks a signature when a request begins."""
        upload = make_upload(organization, bytes=len(CONTENT), is_planned=True)
        sign_parts(upload=upload, numbers=[1], by="user_1", now=db_now())
        cancel(upload)
        signed_until = db_now() + datetime.timedelta(seconds=SIGNED_SECONDS + 120)

        for minutes in (0, 30, 61):
            store().put_stream(planned_key(upload, 1), [CONTENT])
            expire_uploads(now=signed_until + datetime.timedelta(minutes=minutes))
            assert list(store().list_objects(f"org/{organization.pk}/uploads")) == []

        upload.refresh_from_db()
        assert upload.signed_until is None

    @pytest.mark.parametrize("any_store", ["directory"], indirect=True)
    def test_used_while_the_upload_is_closed_leave_nothing(self, organization: Organization, any_store) -> None:
        upload = make_upload(organization, bytes=len(CONTENT), is_planned=True)
        directory, key = store(), planned_key(upload, 1)
        assert isinstance(directory, DirectoryStore)

        def chunks() -> Iterator[bytes]:
            yield CONTENT[:-1]
            cancel(upload)
            delete_parts(**OutboxMessage.objects.get(topic="upload.closed").payload)
            yield CONTENT[-1:]

        with pytest.raises(PrefixClosed):
            directory.put_once(key, chunks(), limit_bytes=len(CONTENT), exact=True)

        assert list(directory.list_objects(f"org/{organization.pk}/uploads")) == []

    def test_are_not_made_for_an_upload_that_was_closed_meanwhile(self, organization: Organization) -> None:
        upload = make_upload(organization, bytes=len(CONTENT), is_planned=True)
        cancel(Upload.objects.get(pk=upload.pk))

        with pytest.raises(UploadClosed):
            sign_parts(upload=upload, numbers=[1], by="user_1", now=db_now())

    def test_a_foreign_upload_is_unknown(self, organization: Organization, rival: Organization) -> None:
        with pytest.raises(NotFound):
            get_upload(organization=organization, id=make_upload(rival).pk)


class TestSweeping:
    def test_an_upload_nobody_finished_expires_with_its_parts(self, organization: Organization) -> None:
        upload = make_upload(organization, bytes=len(CONTENT))
        send(upload)

        assert expire_uploads(now=db_now()) == 0
        assert expire_uploads(now=db_now() + datetime.timedelta(hours=2)) == 1

        upload.refresh_from_db()
        assert upload.status == "expired"
        assert OutboxMessage.objects.get(topic="upload.closed").payload == {"upload_id": upload.pk}

    @pytest.mark.parametrize("any_store", ["directory"], indirect=True)
    def test_objects_in_no_row_go_after_a_day_and_no_others(self, organization: Organization, any_store: str) -> None:
        directory = store()
        assert isinstance(directory, DirectoryStore)
        kept, upload = make_ready_version(organization), make_upload(organization)
        add_part(upload=upload, chunks=[b"x"], by="user_1", now=db_now())
        orphans = [f"org/{organization.pk}/datasets/file-gone/data.jsonl", f"org/{organization.pk}/uploads/up/p1"]
        foreign = f"org/{organization.pk}/adapters/adpv_x/adapter.safetensors"
        for key in (*orphans, foreign):
            directory.put_stream(key, [b"x"])

        assert sweep_orphans(now=db_now()) == 0, "they may belong to a request that is still going on"
        for path in (directory.root / "org" / organization.pk).rglob("*"):
            os.utime(path, (1, 1))
        swept = sweep_orphans(now=db_now())

        left = {key for key, _ in directory.list_objects(f"org/{organization.pk}")}
        assert swept == 2 and left.isdisjoint(orphans)
        assert {kept.object_key, foreign} <= left and len(left) == 3
