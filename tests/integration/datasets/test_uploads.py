"""A file comes in parts: sent through us, or put at signed addresses by a plan."""

import datetime
import hashlib
import math

import pytest
from django.conf import settings
from django.test import override_settings

from apps.accounts.models import Organization
from apps.core.database.clock import db_now
from apps.core.errors import InvalidValue
from apps.core.models import OutboxMessage
from apps.core.objects.s3 import SMALLEST_PART_BYTES, S3Store
from apps.core.objects.store import open_store, read_object, store
from apps.datasets.intake import uploads
from apps.datasets.intake.parts import UploadClosed, count_parts, list_present, part_size, sign_parts
from apps.datasets.intake.uploads import add_part, cancel_upload, delete_parts, get_upload
from apps.datasets.intake.versions import FileTooLarge
from apps.datasets.models import DatasetVersion, Upload, UploadPart
from tests.factories.datasets import make_upload
from tests.integration.datasets.upload_calls import CONTENT, PART, complete, limit_storage, pieces, put, send

pytestmark = pytest.mark.django_db


class TestParts:
    def test_become_a_file_in_the_order_named(self, organization: Organization, any_store: str) -> None:
        upload = make_upload(organization, bytes=len(CONTENT), filename="big.jsonl")
        part_ids = send(upload)

        done = complete(upload, part_ids=part_ids, md5=hashlib.md5(CONTENT).hexdigest().upper())

        assert done.status == "completed" and done.version
        assert (done.version.status, done.version.dataset.name) == ("uploaded", "big")
        assert read_object(done.version.object_key) == CONTENT
        assert done.version.sha256 == hashlib.sha256(CONTENT).hexdigest()
        delete_parts(**OutboxMessage.objects.get(topic="upload.closed").payload)
        assert complete(upload, part_ids=part_ids).version == done.version, "a retried call changes nothing"
        assert DatasetVersion.objects.count() == 1
        assert list(store().list_objects(f"org/{organization.pk}/uploads")) == []
        assert not UploadPart.objects.exists()

    def test_with_another_checksum_leave_the_upload_open(self, organization: Organization, any_store: str) -> None:
        upload = make_upload(organization, bytes=len(CONTENT))
        part_ids = send(upload)

        with pytest.raises(InvalidValue, match="MD5"):
            complete(upload, part_ids=part_ids, md5="0" * 32)

        assert not DatasetVersion.objects.exists()
        assert list(store().list_objects(f"org/{organization.pk}/datasets")) == []
        assert complete(upload, part_ids=part_ids, md5=hashlib.md5(CONTENT).hexdigest()).status == "completed"

    @pytest.mark.parametrize("wrong", ["missing", "twice", "unknown", "foreign"])
    def test_must_be_those_announced(self, organization: Organization, wrong: str) -> None:
        upload, other = make_upload(organization, bytes=len(CONTENT)), make_upload(organization, bytes=PART)
        ids = send(upload)
        foreign = add_part(upload=other, chunks=[pieces()[0]], by="user_1", now=db_now()).pk
        given = {
            "missing": ids[1:],
            "twice": [ids[0], *ids],
            "unknown": ["part_x", *ids[1:]],
            "foreign": [foreign, *ids[1:]],
        }

        with pytest.raises(InvalidValue) as refused:
            complete(upload, part_ids=given[wrong])

        assert refused.value.param == "part_ids"

    def test_are_not_longer_than_announced(self, organization: Organization, monkeypatch: pytest.MonkeyPatch) -> None:
        upload = make_upload(organization, bytes=10)
        with pytest.raises(InvalidValue, match="announced"):
            add_part(upload=upload, chunks=[b"x" * 11], by="user_1", now=db_now())
        monkeypatch.setattr(uploads, "MAX_PART_BYTES", 5)
        with pytest.raises(FileTooLarge):
            add_part(upload=upload, chunks=[b"xxx", b"xxx"], by="user_1", now=db_now())

        assert list(store().list_objects(f"org/{organization.pk}/uploads")) == []

    def test_are_not_taken_once_the_upload_is_closed(self, organization: Organization) -> None:
        done, cancelled, old = (make_upload(organization, bytes=len(CONTENT)) for _ in range(3))
        complete(done, part_ids=send(done))
        cancel_upload(upload=cancelled, by="user_1")
        late = db_now() + datetime.timedelta(hours=2)

        for upload, now in ((done, db_now()), (cancelled, db_now()), (old, late)):
            with pytest.raises(UploadClosed):
                add_part(
                    upload=get_upload(organization=organization, id=upload.pk), chunks=[b"x"], by="user_1", now=now
                )
        with pytest.raises(UploadClosed):
            complete(cancelled, part_ids=[])
        with pytest.raises(UploadClosed):
            cancel_upload(upload=get_upload(organization=organization, id=done.pk), by="user_1")


class TestPlan:
    @pytest.fixture
    def upload(self, organization: Organization, monkeypatch: pytest.MonkeyPatch) -> Upload:
        monkeypatch.setattr(uploads, "BROWSER_PART_BYTES", PART)
        return make_upload(organization, bytes=len(CONTENT), is_planned=True, dataset_name="Big")

    def test_covers_the_file_exactly(self, upload: Upload) -> None:
        sizes = [part_size(upload, number) for number in range(1, count_parts(upload) + 1)]

        assert sizes == [len(piece) for piece in pieces()]

    def test_is_filled_through_presigned_addresses_and_knows_what_is_here(
        self, organization: Organization, s3_url: str, upload: Upload, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        open_store.cache_clear()
        with override_settings(OBJECT_STORE=s3_url):
            count = count_parts(upload)
            urls = sign_parts(upload=upload, numbers=range(1, count + 1), by="user_1", now=db_now())
            assert all("X-Amz-Signature" in url for url in urls.values())
            for number in (3, 1):
                put(urls[number], pieces()[number - 1])

            assert list_present(upload=upload) == [1, 3]
            with pytest.raises(InvalidValue, match="missing"):
                complete(upload)
            for number in range(1, count + 1):
                put(urls[number], pieces()[number - 1])
            done = complete(upload)

            assert done.version and read_object(done.version.object_key) == CONTENT
            assert done.version.dataset.name == "Big"
        open_store.cache_clear()

    def test_parts_of_usual_size_are_joined_inside_the_bucket(
        self, organization: Organization, s3_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        monkeypatch.setattr(uploads, "BROWSER_PART_BYTES", SMALLEST_PART_BYTES)
        monkeypatch.delattr(S3Store, "put_stream")  # their bytes are read for the hash, and not sent again
        content = CONTENT * (2 * SMALLEST_PART_BYTES // len(CONTENT) + 1)
        upload = make_upload(organization, bytes=len(content), is_planned=True)
        open_store.cache_clear()
        with override_settings(OBJECT_STORE=s3_url):
            for number, url in sign_parts(upload=upload, numbers=(1, 2, 3), by="user_1", now=db_now()).items():
                put(url, content[(number - 1) * SMALLEST_PART_BYTES : number * SMALLEST_PART_BYTES])
            done = complete(upload)

            assert done.version and done.version.sha256 == hashlib.sha256(content).hexdigest()
            assert read_object(done.version.object_key) == content
        open_store.cache_clear()

    def test_signs_only_its_own_parts_while_it_is_open(self, upload: Upload) -> None:
        for numbers in ([0], [count_parts(upload) + 1], list(range(1, 5)) * 20):
            with pytest.raises(InvalidValue):
                sign_parts(upload=upload, numbers=numbers, by="user_1", now=db_now())
        with pytest.raises(UploadClosed):
            sign_parts(upload=upload, numbers=[1], by="user_1", now=db_now() + datetime.timedelta(days=4))

    def test_of_a_large_file_has_a_bounded_number_of_parts(self, organization: Organization) -> None:
        limit_storage(organization, settings.MAX_UPLOAD_BYTES)
        upload = make_upload(organization, bytes=settings.MAX_UPLOAD_BYTES, is_planned=True)

        assert count_parts(upload) <= uploads.MAX_BROWSER_PARTS
        assert math.prod([upload.part_bytes or 0]) <= uploads.MAX_PART_BYTES
