import datetime
import hashlib
import math
import os
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest
from django.conf import settings
from django.db import connection
from django.test import Client, override_settings
from moto.server import ThreadedMotoServer

from apps.accounts.models import Organization
from apps.core.database.clock import db_now
from apps.core.errors import InvalidValue, NotFound, QuotaExceeded
from apps.core.models import OutboxMessage
from apps.core.objects.s3 import SMALLEST_PART_BYTES, S3Store
from apps.core.objects.store import DirectoryStore, PrefixClosed, open_store, read_object, store
from apps.datasets.intake import uploads
from apps.datasets.intake.orphans import sweep_orphans
from apps.datasets.intake.uploads import (
    UploadClosed,
    add_part,
    cancel_upload,
    complete_upload,
    delete_parts,
    expire_uploads,
    get_upload,
    list_present,
    part_size,
    sign_parts,
)
from apps.datasets.intake.versions import FileTooLarge, StorageFull
from apps.datasets.models import DatasetVersion, Upload
from apps.datasets.queries import storage_used_bytes
from apps.finetuning.usage.quotas import set_quota
from tests.factories.datasets import jsonl, make_ready_version, make_upload

pytestmark = pytest.mark.django_db
CONTENT = jsonl(40)
PART = 1_000


@pytest.fixture(scope="module")
def s3_url() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    credentials = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
    boto3.client("s3", endpoint_url=f"http://{host}:{port}", **credentials).create_bucket(Bucket="uploads")
    yield f"s3://uploads?endpoint=http://{host}:{port}"
    server.stop()


@pytest.fixture(params=["directory", "s3"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    url = f"file://{tmp_path}/objects" if request.param == "directory" else request.getfixturevalue("s3_url")
    open_store.cache_clear()
    with override_settings(OBJECT_STORE=url):
        yield request.param
    open_store.cache_clear()


def pieces() -> list[bytes]:
    return [CONTENT[at : at + PART] for at in range(0, len(CONTENT), PART)]


def send(upload: Upload) -> list[str]:
    """Send the parts last one first, and return their ids in the order of the file."""
    ids = [add_part(upload=upload, chunks=[piece], now=db_now()).pk for piece in reversed(pieces())]
    return ids[::-1]


def complete(upload: Upload, **arguments: object) -> Upload:
    return complete_upload(upload=upload, now=db_now(), by="user_1", **arguments)  # type: ignore[arg-type]


def cancel(upload: Upload) -> Upload:
    return cancel_upload(upload=upload, by="user_1")


def expire(upload: Upload) -> int:
    Upload.objects.filter(pk=upload.pk).update(expires_at=db_now() - datetime.timedelta(seconds=1))
    return expire_uploads(now=db_now())


def put(url: str, content: bytes) -> bool:
    """Send a part as a browser does, to whichever store signed the URL; return whether it was taken."""
    if isinstance(store(), DirectoryStore):
        parts = urlsplit(url)
        return Client().generic("PUT", f"{parts.path}?{parts.query}", content).status_code == 200
    request = urllib.request.Request(url, content, {"Content-Type": "application/octet-stream"}, method="PUT")
    with urllib.request.urlopen(request, timeout=120) as response:
        return bool(response.status == 200)


def limit_storage(organization: Organization, byte_count: int) -> None:
    set_quota(organization=organization, by="system", now=db_now(), storage_bytes=byte_count)


class TestParts:
    def test_become_a_file_in_the_order_named(self, organization: Organization, any_store: str) -> None:
        upload = make_upload(organization, bytes=len(CONTENT), filename="big.jsonl")
        part_ids = send(upload)

        done = complete(upload, part_ids=part_ids, md5=hashlib.md5(CONTENT).hexdigest().upper())

        assert done.status == "completed" and done.version
        assert (done.version.status, done.version.dataset.name) == ("uploaded", "big")
        assert read_object(done.version.object_key) == CONTENT
        assert done.version.sha256 == hashlib.sha256(CONTENT).hexdigest()
        assert complete(upload, part_ids=part_ids).version == done.version, "a retried call changes nothing"
        assert DatasetVersion.objects.count() == 1
        delete_parts(**OutboxMessage.objects.get(topic="upload.closed").payload)
        assert list(store().list_objects(f"org/{organization.pk}/uploads")) == []

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
        foreign = add_part(upload=other, chunks=[pieces()[0]], now=db_now()).pk
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
            add_part(upload=upload, chunks=[b"x" * 11], now=db_now())
        monkeypatch.setattr(uploads, "MAX_PART_BYTES", 5)
        with pytest.raises(FileTooLarge):
            add_part(upload=upload, chunks=[b"xxx", b"xxx"], now=db_now())

        assert list(store().list_objects(f"org/{organization.pk}/uploads")) == []

    def test_are_not_taken_once_the_upload_is_closed(self, organization: Organization) -> None:
        done, cancelled, old = (make_upload(organization, bytes=len(CONTENT)) for _ in range(3))
        complete(done, part_ids=send(done))
        cancel_upload(upload=cancelled, by="user_1")
        late = db_now() + datetime.timedelta(hours=2)

        for upload, now in ((done, db_now()), (cancelled, db_now()), (old, late)):
            with pytest.raises(UploadClosed):
                add_part(upload=get_upload(organization=organization, id=upload.pk), chunks=[b"x"], now=now)
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
        sizes = [part_size(upload, number) for number in range(1, uploads.count_parts(upload) + 1)]

        assert sizes == [len(piece) for piece in pieces()]

    def test_is_filled_through_presigned_addresses_and_knows_what_is_here(
        self, organization: Organization, s3_url: str, upload: Upload, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        open_store.cache_clear()
        with override_settings(OBJECT_STORE=s3_url):
            count = uploads.count_parts(upload)
            urls = sign_parts(upload=upload, numbers=range(1, count + 1), now=db_now())
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
            for number, url in sign_parts(upload=upload, numbers=(1, 2, 3), now=db_now()).items():
                put(url, content[(number - 1) * SMALLEST_PART_BYTES : number * SMALLEST_PART_BYTES])
            done = complete(upload)

            assert done.version and done.version.sha256 == hashlib.sha256(content).hexdigest()
            assert read_object(done.version.object_key) == content
        open_store.cache_clear()

    def test_signs_only_its_own_parts_while_it_is_open(self, upload: Upload) -> None:
        for numbers in ([0], [uploads.count_parts(upload) + 1], list(range(1, 5)) * 20):
            with pytest.raises(InvalidValue):
                sign_parts(upload=upload, numbers=numbers, now=db_now())
        with pytest.raises(UploadClosed):
            sign_parts(upload=upload, numbers=[1], now=db_now() + datetime.timedelta(days=4))

    def test_of_a_large_file_has_a_bounded_number_of_parts(self, organization: Organization) -> None:
        limit_storage(organization, settings.MAX_UPLOAD_BYTES)
        upload = make_upload(organization, bytes=settings.MAX_UPLOAD_BYTES, is_planned=True)

        assert uploads.count_parts(upload) <= uploads.MAX_BROWSER_PARTS
        assert math.prod([upload.part_bytes or 0]) <= uploads.MAX_PART_BYTES


class TestLimits:
    @pytest.mark.parametrize(
        ("wrong", "error"),
        [
            ({"bytes": 0}, InvalidValue),
            ({"bytes": 8 * 1024**3 + 1}, FileTooLarge),
            ({"purpose": "vision"}, InvalidValue),
            ({"expires_after_seconds": 5}, InvalidValue),
            ({"bytes": 1_000_001}, StorageFull),
        ],
    )
    def test_an_upload_we_would_not_take_is_refused_at_once(self, organization, wrong: dict, error: type) -> None:
        limit_storage(organization, 1_000_000)

        with pytest.raises(error):
            make_upload(organization, **wrong)

    @override_settings(MAX_UPLOAD_BYTES=1_000)
    def test_the_longest_file_is_the_operators_to_set_and_the_refusal_says_what_to_do(self, organization) -> None:
        make_upload(organization, bytes=1_000)

        with pytest.raises(
            FileTooLarge, match=r"1,001 bytes; one file may have up to 1,000 .* Send it as gzip"
        ) as refused:
            make_upload(organization, bytes=1_001)

        assert refused.value.param == "bytes"

    def test_an_upload_under_way_counts_as_stored_and_once(self, organization: Organization) -> None:
        upload = make_upload(organization, bytes=len(CONTENT))
        assert storage_used_bytes(organizations=[organization.pk]).total() == len(CONTENT)
        limit_storage(organization, len(CONTENT) + 5)
        with pytest.raises(StorageFull):
            make_upload(organization, bytes=len(CONTENT))

        limit_storage(organization, len(CONTENT))
        complete(upload, part_ids=send(upload))

        assert storage_used_bytes(organizations=[organization.pk]).total() == len(CONTENT)

    def test_parts_sent_beyond_what_was_announced_count_too(self, organization: Organization) -> None:
        upload = make_upload(organization, bytes=PART)
        limit_storage(organization, PART + 500)

        add_part(upload=upload, chunks=[b"x" * PART], now=db_now())
        with pytest.raises(StorageFull):
            add_part(upload=upload, chunks=[b"x" * PART], now=db_now())
        add_part(upload=upload, chunks=[b"x" * 400], now=db_now())

        assert storage_used_bytes(organizations=[organization.pk]).total() == PART + 400

    def test_parts_wait_for_other_uploads_of_the_organization_before_they_are_counted(
        self, organization: Organization
    ) -> None:
        """Otherwise two parts at a time could each take the last free bytes."""
        upload = make_upload(organization, bytes=PART)
        seen: list[str] = []

        def note(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
            seen.extend(f"{word} {params}" for word in ("advisory", "uploadpart") if word in sql)
            return execute(sql, params, many, context)

        with connection.execute_wrapper(note):
            add_part(upload=upload, chunks=[b"x"], now=db_now())

        assert seen[0].startswith("advisory") and f"uploads:{organization.founded_by_id or organization.pk}" in seen[0]

    def test_uploads_and_their_parts_are_counted_too(
        self, organization: Organization, rival: Organization, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Empty parts and announced bytes take no storage, but each has an object or a row."""
        monkeypatch.setattr(uploads, "MAX_PARTS", 2)
        monkeypatch.setattr(uploads, "MAX_OPEN", 2)
        upload, other = make_upload(organization), make_upload(organization)
        for _ in range(2):
            add_part(upload=upload, chunks=[], now=db_now())

        with pytest.raises(InvalidValue, match="at most 2 parts"):
            add_part(upload=upload, chunks=[], now=db_now())
        with pytest.raises(QuotaExceeded, match="2 uploads open"):
            make_upload(organization)
        assert make_upload(rival)
        cancel(other)

        assert make_upload(organization)

    def test_a_large_planned_upload_fits_its_own_quota(self, organization: Organization, any_store: str) -> None:
        limit_storage(organization, len(CONTENT))
        upload = make_upload(organization, bytes=len(CONTENT), is_planned=True)
        put(sign_parts(upload=upload, numbers=[1], now=db_now())[1], CONTENT)

        assert complete(upload).status == "completed"


class TestSignedUrls:
    """Somebody who holds a URL of an upload that was given up, completed, or has expired."""

    @pytest.mark.parametrize("end", [cancel, complete, expire])
    def test_store_nothing_that_is_not_counted(
        self, organization: Organization, any_store: str, end: Callable[[Upload], object]
    ) -> None:
        upload = make_upload(organization, bytes=len(CONTENT), is_planned=True)
        [url] = sign_parts(upload=upload, numbers=[1], now=db_now()).values()
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
        later = db_now() + datetime.timedelta(seconds=uploads.SIGNED_SECONDS + 120)
        expire_uploads(now=later + uploads._SLOWEST_PUT)
        assert list(store().list_objects(f"org/{organization.pk}/uploads")) == []
        assert storage_used_bytes(organizations=[organization.pk]).total() == kept

    def test_stored_by_a_slow_request_after_the_end_are_deleted_too(
        self, organization: Organization, any_store: str
    ) -> None:
        """A bucket checks a signature when a request begins."""
        upload = make_upload(organization, bytes=len(CONTENT), is_planned=True)
        sign_parts(upload=upload, numbers=[1], now=db_now())
        cancel(upload)
        signed_until = db_now() + datetime.timedelta(seconds=uploads.SIGNED_SECONDS + 120)

        for minutes in (0, 30, 61):
            store().put_stream(uploads._planned_key(upload, 1), [CONTENT])
            expire_uploads(now=signed_until + datetime.timedelta(minutes=minutes))
            assert list(store().list_objects(f"org/{organization.pk}/uploads")) == []

        upload.refresh_from_db()
        assert upload.signed_until is None

    @pytest.mark.parametrize("any_store", ["directory"], indirect=True)
    def test_used_while_the_upload_is_closed_leave_nothing(self, organization: Organization, any_store) -> None:
        upload = make_upload(organization, bytes=len(CONTENT), is_planned=True)
        directory, key = store(), uploads._planned_key(upload, 1)
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
            sign_parts(upload=upload, numbers=[1], now=db_now())

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
        add_part(upload=upload, chunks=[b"x"], now=db_now())
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
