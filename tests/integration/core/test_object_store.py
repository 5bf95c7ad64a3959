import base64
import hashlib
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
import uvicorn
from django.test import override_settings
from django.urls import include, path

from apps.core.http.asgi import DjangoApplication
from apps.core.objects import store as object_store
from apps.core.objects.store import (
    CHECKSUM_HEADER,
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
from tests.twins.s3 import serve_s3

urlpatterns = [
    path("objects/", include("apps.core.objects.urls"))
]  # this module is the ROOT_URLCONF of the server below
KEY = object_key("org_01", "datasets", "file-01", "data.jsonl")
CONTENT = b"".join(b"%08d\n" % number for number in range(100_000))  # 900 kB: several chunks


@pytest.fixture(scope="module")
def web_url() -> Iterator[str]:
    """The signed-object door, as the web and internal processes serve it, in a real ASGI server."""
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with override_settings(ROOT_URLCONF=__name__, MIDDLEWARE=[], INTERNAL_URL=url, PUBLIC_URL=url):
        server = uvicorn.Server(uvicorn.Config(DjangoApplication(), log_level="error", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        yield url
        server.should_exit = True
        thread.join(timeout=10)


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


@pytest.fixture
def directory(tmp_path: Path, web_url: str) -> Iterator[DirectoryStore]:
    open_store.cache_clear()
    with override_settings(OBJECT_STORE=f"file://{tmp_path}/objects"):
        opened = object_store.store()
        assert isinstance(opened, DirectoryStore)
        yield opened


def fetch(url: str, *, method: str = "GET", body: bytes | None = None, **headers: str) -> tuple[int, bytes, Message]:
    # Without a type urllib announces a form, which moto would then try to read as one.
    named = {"Content-Type": "application/octet-stream"} | headers
    request = urllib.request.Request(url, data=body, method=method, headers=named)
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, response.read(), response.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(), error.headers


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


class TestTheDoorOfADirectory:
    def test_nothing_of_a_url_can_be_changed(self, directory: DirectoryStore) -> None:
        directory.put_stream(KEY, [CONTENT])
        directory.put_stream(KEY.replace("org_01", "org_02"), [CONTENT])
        url = directory.signed_url(KEY, expires_seconds=60, filename="a.jsonl")

        assert fetch(url)[0] == 200
        assert fetch(url.replace("org_01", "org_02"))[0] == 403
        assert fetch(url.replace("a.jsonl&", "b.html&"))[0] == 403
        assert fetch(url.replace("expires=", "expires=9"))[0] == 403
        assert fetch(url[:-1] + ("A" if url[-1] != "A" else "B"))[0] == 403
        assert fetch(url.split("?")[0])[0] == 403
        assert fetch(url, method="PUT", body=b"x")[0] == 403
        assert fetch(url, method="DELETE")[0] == 405

    def test_a_url_expires(self, directory: DirectoryStore) -> None:
        directory.put_stream(KEY, [CONTENT])

        status, body, _ = fetch(directory.signed_url(KEY, expires_seconds=-1))

        assert status == 403
        assert b"invalid_signature" in body

    def test_a_url_signed_with_another_secret_is_refused(self, directory: DirectoryStore) -> None:
        directory.put_stream(KEY, [CONTENT])
        with override_settings(SIGNING_KEY="another"):
            url = directory.signed_url(KEY, expires_seconds=60)

        assert fetch(url)[0] == 403

    @pytest.mark.parametrize("key", ["../secret", "org/../../x", "org//a", "/etc/passwd", ".drafts/x", "a\n", "a b"])
    def test_no_key_leads_out_of_the_directory(self, directory: DirectoryStore, key: str) -> None:
        (directory.root.parent / "secret").write_text("canary")

        with pytest.raises(InvalidKey):
            directory.open_stream(key)
        with pytest.raises(InvalidKey):
            directory.signed_url(key, expires_seconds=60)

    @pytest.mark.parametrize("climb", ["..", "%2e%2e", "..%2f.."])
    def test_no_url_leads_out_of_the_directory(self, directory: DirectoryStore, web_url: str, climb: str) -> None:
        (directory.root.parent / "secret").write_text("canary")
        grant = object_store.Grant("GET", "../secret", int(time.time()) + 60)

        query = f"?method=GET&expires={grant.expires}&signature={grant.digest()}"
        status, body, _ = fetch(f"{web_url}/objects/{climb}/secret{query}")

        assert status in (403, 404)
        assert b"canary" not in body

    def test_a_link_in_the_directory_is_not_followed(self, directory: DirectoryStore) -> None:
        (directory.root / "org").mkdir()
        (directory.root / "org/link").symlink_to("/etc/passwd")

        with pytest.raises(OSError):
            directory.open_stream("org/link")

    def test_a_download_cannot_run_in_the_browser(self, directory: DirectoryStore) -> None:
        directory.put_stream(KEY, [b"<script>"])

        _, _, headers = fetch(directory.signed_url(KEY, expires_seconds=60, filename="x.html"))

        assert headers["Content-Type"] == "application/octet-stream"
        assert headers["Content-Disposition"].startswith("attachment;")
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "private, no-store"

    @pytest.mark.parametrize("body", [CONTENT[:-1], CONTENT + b"x"])
    def test_a_put_of_another_length_keeps_nothing(self, directory: DirectoryStore, body: bytes) -> None:
        url = directory.signed_url(KEY, "PUT", expires_seconds=60, content_bytes=len(CONTENT))

        status, answer, _ = fetch(url, method="PUT", body=body)

        assert status == 400
        assert b"wrong_content" in answer
        with pytest.raises(ObjectMissing):
            directory.stat(KEY)
        assert not list((directory.root / ".drafts").iterdir())

    def test_a_put_without_an_announced_length_is_small(self, directory: DirectoryStore) -> None:
        url = directory.signed_url(KEY, "PUT", expires_seconds=60)

        assert fetch(url, method="PUT", body=b"x" * (1024 * 1024 + 1))[0] == 400
        assert fetch(url, method="PUT", body=b"{}")[0] == 200

    def test_an_object_is_written_once(self, directory: DirectoryStore) -> None:
        url = directory.signed_url(KEY, "PUT", expires_seconds=60, content_bytes=3)

        assert fetch(url, method="PUT", body=b"one")[0] == 200
        assert fetch(url, method="PUT", body=b"one")[0] == 200, "a repeated upload is no error"
        assert fetch(url, method="PUT", body=b"two")[0] == 400
        assert hash_object(KEY).sha256 == hashlib.sha256(b"one").hexdigest()

    def test_an_announced_hash_is_checked(self, directory: DirectoryStore) -> None:
        url = directory.signed_url(KEY, "PUT", expires_seconds=60, content_bytes=3)
        right = base64.b64encode(hashlib.sha256(b"one").digest()).decode()

        assert fetch(url, method="PUT", body=b"two", **{CHECKSUM_HEADER: right})[0] == 400
        assert fetch(url, method="PUT", body=b"one", **{CHECKSUM_HEADER: right})[0] == 200

    def test_drafts_of_killed_writers_are_removed(self, directory: DirectoryStore) -> None:
        old, young = directory.root / ".drafts/old", directory.root / ".drafts/young"
        old.touch()
        young.touch()
        os.utime(old, (1, 1))

        DirectoryStore(directory.root)

        assert (old.exists(), young.exists()) == (False, True)

    def test_an_unknown_object_is_404(self, directory: DirectoryStore) -> None:
        status, body, _ = fetch(directory.signed_url(KEY, expires_seconds=60))

        assert status == 404
        assert b"object_missing" in body


def test_a_url_of_either_base_names_its_own_origin(directory: DirectoryStore) -> None:
    with override_settings(PUBLIC_URL="https://anneal.example", INTERNAL_URL="http://internal:8001"):
        public = directory.signed_url(KEY, expires_seconds=60, base="public")
        internal = directory.signed_url(KEY, expires_seconds=60)

    assert urlsplit(public)[:3] == ("https", "anneal.example", f"/objects/{KEY}")
    assert urlsplit(internal)[:2] == ("http", "internal:8001")
