"""What every kind of object store does."""

import hashlib
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import boto3
import msgspec
import pytest
from django.core.management import call_command
from django.test import override_settings

from apps.contracts.runs import Manifest
from apps.core.errors import DomainError
from apps.core.objects import s3
from apps.core.objects.copies import Copied, copy_objects
from apps.core.objects.s3 import S3Store
from apps.core.objects.store import (
    ONCE,
    DirectoryStore,
    InvalidKey,
    ObjectMissing,
    ObjectStore,
    attachment,
    hash_object,
    object_key,
    open_store,
    read_chunks,
)
from apps.core.objects.types import NotDeleted
from apps.finetuning.models import RunUpload
from apps.finetuning.runs import uploads
from apps.interfaces.staff.management.commands import copyobjects
from gpu_workers.common.artifacts import read_manifest, seal_folder
from gpu_workers.common.transfers import Transfers
from tests.integration.core.object_calls import CONTENT, KEY, fetch
from tests.twins.s3 import serve_s3


@pytest.fixture(scope="module")
def moto_url() -> Iterator[str]:
    with serve_s3("anneal-test", "/some/prefix") as url:
        yield url


# A real bucket is tried where ANNEAL_TEST_S3 names one: s3://bucket?endpoint=…
@pytest.fixture(params=["directory", "moto", *(["bucket"] if "ANNEAL_TEST_S3" in os.environ else [])])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """Every kind of store."""
    if request.param == "directory":
        url = f"file://{tmp_path}/objects"
        request.getfixturevalue("web_url")
    elif request.param == "moto":
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        url = request.getfixturevalue("moto_url")
    else:
        url = os.environ["ANNEAL_TEST_S3"]
    open_store.cache_clear()
    with override_settings(OBJECT_STORE=url):
        opened = open_store(url)
        yield opened
        opened.delete_prefix("org/org_01/datasets")
    open_store.cache_clear()


@pytest.mark.parametrize(("keys", "key_id"), [(None, "own"), (("other", "secret"), "other")])
def test_the_bucket_of_a_backup_may_have_keys_of_its_own(
    keys: tuple[str, str] | None, key_id: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "own")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)  # which keeps the keys that it read first
    targets: list[ObjectStore] = []
    monkeypatch.setattr(copyobjects, "copy_objects", lambda source, target: targets.append(target) or Copied(0, 0))

    with override_settings(OBJECT_STORE=f"file://{tmp_path}", BACKUP_KEYS=keys):
        call_command("copyobjects", "--to", "s3://backup?endpoint=http://127.0.0.1:9", stdout=io.StringIO())

    [target] = targets
    assert f"X-Amz-Credential={key_id}%2F" in target.signed_url(KEY, expires_seconds=60)
    open_store.cache_clear()


def signed_headers(url: str) -> list[str]:
    return parse_qs(urlsplit(url).query)["X-Amz-SignedHeaders"][0].split(";")


class TestEveryStore:
    def test_a_stream_comes_back_whole_with_its_size_and_hash(self, store: ObjectStore) -> None:
        stored = store.put_stream(KEY, (CONTENT[start : start + 7_919] for start in range(0, len(CONTENT), 7_919)))

        with store.open_stream(KEY) as stream:
            assert b"".join(read_chunks(stream)) == CONTENT
        assert (stored.bytes, stored.sha256) == (len(CONTENT), hashlib.sha256(CONTENT).hexdigest())
        assert hash_object(KEY) == stored
        assert store.stat(KEY).bytes == len(CONTENT)

    def test_reading_may_begin_anywhere(self, store: ObjectStore) -> None:
        store.put_stream(KEY, [CONTENT])

        with store.open_stream(KEY, offset=900) as stream:
            assert stream.read(9) == b"00000100\n"

    def test_a_stream_that_fails_leaves_nothing(self, store: ObjectStore) -> None:
        def breaks() -> Iterator[bytes]:
            yield b"x" * 20_000_000
            raise ConnectionError("the client went away")

        with pytest.raises(ConnectionError):
            store.put_stream(KEY, breaks())

        with pytest.raises(ObjectMissing):
            store.stat(KEY)

    @pytest.mark.parametrize("first_bytes", [7, 6 * 1024 * 1024])
    def test_objects_are_composed_in_the_order_given(self, store: ObjectStore, first_bytes: int) -> None:
        parts = [object_key("org_01", "datasets", "up", name) for name in ("b", "a")]
        store.put_stream(parts[0], [b"1" * first_bytes])
        store.put_stream(parts[1], [b"2" * 9])
        seen = bytearray()

        stored = store.compose(KEY, parts, on_chunk=seen.extend)

        whole = b"1" * first_bytes + b"2" * 9
        with store.open_stream(KEY) as stream:
            assert stream.read() == whole == seen
        assert stored.sha256 == hashlib.sha256(whole).hexdigest()
        listed = dict(store.list_objects("org/org_01/datasets"))
        assert {key: info.bytes for key, info in listed.items()} == {
            KEY: first_bytes + 9,
            parts[0]: first_bytes,
            parts[1]: 9,
        }

    def test_parts_are_joined_once(self, store: ObjectStore) -> None:
        parts = [object_key("org_01", "datasets", "up", name) for name in ("b", "a")]
        contents = [b"1" * 5 * 2**20, b"2" * 9]
        with pytest.raises(ObjectMissing):
            store.join_parts(KEY, parts)
        for part, content in zip(parts, contents, strict=True):
            store.put_stream(part, [content])

        store.join_parts(KEY, parts)
        store.join_parts(KEY, parts)

        assert hash_object(KEY).sha256 == hashlib.sha256(b"".join(contents)).hexdigest()
        store.put_stream(parts[1], [b"3" * 9])
        with suppress(DomainError):
            store.join_parts(KEY, parts)
        assert hash_object(KEY).sha256 == hashlib.sha256(b"".join(contents)).hexdigest(), "it was replaced"
        if isinstance(store, S3Store):
            assert "Uploads" not in store._client.list_multipart_uploads(Bucket=store._bucket)

    def test_a_large_object_is_copied_in_parts(self, store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(s3, "COPIED_BYTES", 5 * 2**20)
        source, content = object_key("org_01", "datasets", "up", "a"), os.urandom(11 * 2**20)
        store.put_stream(source, [content])

        assert store.compose(KEY, [source]).sha256 == hash_object(KEY).sha256 == hashlib.sha256(content).hexdigest()
        if isinstance(store, S3Store):
            found = store._client.head_object(Bucket=store._bucket, Key=store._name(KEY), PartNumber=1)
            assert found["PartsCount"] == 3

    def test_a_copy_has_what_is_new_or_changed_and_leads_back(self, store: ObjectStore, tmp_path: Path) -> None:
        other, backup = object_key("org_01", "datasets", "up", "b"), DirectoryStore(tmp_path / "backup")
        store.put_stream(KEY, [CONTENT])
        store.put_stream(other, [b"first"])
        assert copy_objects(source=store, target=backup) == Copied(2, len(CONTENT) + 5)

        store.put_stream(other, [b"later version"])
        store.delete(KEY)
        assert copy_objects(source=store, target=backup) == Copied(1, 13)

        copy_objects(source=backup, target=store)
        with store.open_stream(KEY) as stream:
            assert stream.read() == CONTENT

    def test_composing_a_missing_part_leaves_nothing(self, store: ObjectStore) -> None:
        with pytest.raises(ObjectMissing):
            store.compose(KEY, [object_key("org_01", "datasets", "up", "gone")])

        with pytest.raises(ObjectMissing):
            store.stat(KEY)

    def test_deleting_a_prefix_spares_its_neighbours(self, store: ObjectStore) -> None:
        neighbour = object_key("org_01", "datasets", "file-010", "data.jsonl")
        store.put_stream(KEY, [b"one"])
        store.put_stream(neighbour, [b"two"])

        store.delete_prefix("org/org_01/datasets/file-01")

        assert store.stat(neighbour).bytes == 3
        with pytest.raises(ObjectMissing), store.open_stream(KEY):
            pass

    def test_objects_that_a_bucket_keeps_do_not_count_as_deleted(
        self, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if not isinstance(store, S3Store):
            pytest.skip("a directory refuses with an exception")
        store.put_stream(KEY, [b"one"])
        kept = {"Errors": [{"Key": KEY, "Code": "SlowDown", "Message": "Reduce your request rate."}]}

        with monkeypatch.context() as busy, pytest.raises(NotDeleted, match=r"1 of 1 .* Reduce your request rate"):
            busy.setattr(store._client, "delete_objects", lambda **_: kept)
            store.delete_prefix("org/org_01/datasets/file-01")

        assert store.stat(KEY).bytes == 3

    def test_deleting_twice_is_no_error(self, store: ObjectStore) -> None:
        store.put_stream(KEY, [b"one"])

        store.delete(KEY)
        store.delete(KEY)

        with pytest.raises(ObjectMissing):
            store.stat(KEY)

    def test_a_whole_organization_is_never_a_prefix(self, store: ObjectStore) -> None:
        with pytest.raises(InvalidKey):
            store.delete_prefix("org/org_01")

    def test_a_signed_get_serves_a_safe_download(self, store: ObjectStore) -> None:
        store.put_stream(KEY, [CONTENT])

        url = store.signed_url(KEY, expires_seconds=60, base="public", filename='été";x=\r\n.jsonl')
        status, body, headers = fetch(url)

        assert (status, body) == (200, CONTENT)
        assert headers["Content-Disposition"] == attachment('été";x=\r\n.jsonl')
        assert "\r" not in headers["Content-Disposition"]

    def test_a_signed_get_serves_ranges(self, store: ObjectStore) -> None:
        store.put_stream(KEY, [CONTENT])
        url = store.signed_url(KEY, expires_seconds=60)

        assert fetch(url, Range="bytes=9-17")[:2] == (206, b"00000001\n")
        assert fetch(url, Range="bytes=-9")[:2] == (206, b"00099999\n")
        assert fetch(url, Range="bytes=899991-")[:2] == (206, b"00099999\n")
        assert fetch(url, Range="bytes=900000-")[0] == 416

    def test_a_signed_put_stores_what_was_announced(self, store: ObjectStore) -> None:
        url = store.signed_url(KEY, "PUT", expires_seconds=60, content_bytes=len(CONTENT))

        status, _, _ = fetch(url, method="PUT", body=CONTENT)

        assert status == 200
        assert hash_object(KEY).sha256 == hashlib.sha256(CONTENT).hexdigest()

    def test_a_signed_put_of_nothing_takes_nothing(self, store: ObjectStore) -> None:
        url = store.signed_url(KEY, "PUT", expires_seconds=60, content_bytes=0)

        if isinstance(store, DirectoryStore):
            assert fetch(url, method="PUT", body=b"x")[0] >= 400
            with pytest.raises(ObjectMissing):
                store.stat(KEY)
        else:
            assert "content-length" in signed_headers(url)  # of which the server asks the value that was signed
        assert fetch(url, method="PUT", body=b"")[0] == 200
        assert store.stat(KEY).bytes == 0

    def test_a_signed_put_that_may_write_once_replaces_nothing(self, store: ObjectStore) -> None:
        url = store.signed_url(KEY, "PUT", expires_seconds=60, content_bytes=3, is_once=True)

        assert fetch(url, method="PUT", body=b"one", **ONCE)[0] == 200
        assert fetch(url, method="PUT", body=b"two", **ONCE)[0] in (400, 412)
        assert hash_object(KEY).sha256 == hashlib.sha256(b"one").hexdigest()
        if not isinstance(store, DirectoryStore):
            assert "if-none-match" in signed_headers(url)  # so it cannot be left out

    def test_a_worker_stores_a_large_file_in_parts(
        self, store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(uploads, "PART_BYTES", 5 * 2**20)
        prefix, content = object_key("org_01", "datasets", "up"), os.urandom(11 * 2**20)
        (tmp_path / "draft").mkdir()
        (tmp_path / "draft" / "model.gguf").write_bytes(content)
        digest = seal_folder(
            tmp_path / "draft",
            tmp_path / "sealed",
            lambda files: Manifest(kind="model", run_id="run_1", attempt=1, step=1, files=files),
        )
        manifest = read_manifest(tmp_path / "sealed")
        upload = RunUpload(
            pk="up_1",
            kind="model",
            manifest=msgspec.to_builtins(manifest),
            manifest_sha256=digest,
            object_prefix=prefix,
        )

        with closing(Transfers()) as transfers:
            for _ in range(2):  # the second finds every part there
                transfers.upload_folder(tmp_path / "sealed", lambda: uploads.sign_places(upload, manifest))
        uploads.require_contents(upload=upload, manifest_sha256=digest, owner="worker_1")

        assert hash_object(f"{prefix}/model.gguf").sha256 == hashlib.sha256(content).hexdigest()
        assert len(list(store.list_objects(f"{prefix}/parts"))) == 3

    def test_a_process_without_access_can_use_the_urls_and_nothing_else(self, store: ObjectStore) -> None:
        store.put_stream(KEY, [CONTENT])
        other = KEY.replace("data", "copy")
        get = store.signed_url(KEY, expires_seconds=60)
        put = store.signed_url(other, "PUT", expires_seconds=60, content_bytes=len(CONTENT))
        folder = store.root if isinstance(store, DirectoryStore) else Path("/nonexistent")

        done = subprocess.run(
            [os.path.realpath(sys.executable), "-I", "-c", OUTSIDER, get, put, str(folder)],
            env={}, cwd="/", capture_output=True, text=True, timeout=240,
        )  # fmt: skip

        assert done.returncode == 0, done.stderr
        assert ("readable" in done.stdout) is (os.getuid() != 0 and folder.exists())
        assert hash_object(other).sha256 == hashlib.sha256(CONTENT).hexdigest()


OUTSIDER = """
import os, sys, urllib.request, urllib.response, http.client, encodings.idna
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
get, put, folder = sys.argv[1:]
try:
    os.listdir(folder)
    print("readable")
except OSError:
    print("closed")
content = urllib.request.urlopen(get, timeout=120).read()
headers = {"Content-Type": "application/octet-stream"}
urllib.request.urlopen(urllib.request.Request(put, data=content, headers=headers, method="PUT"), timeout=120).read()
"""
