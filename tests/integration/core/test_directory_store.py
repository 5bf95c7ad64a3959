"""A directory as object store: its addresses open what was signed, and nothing else."""

import base64
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from django.test import override_settings

from apps.core.objects import store as object_store
from apps.core.objects.store import (
    CHECKSUM_HEADER,
    DirectoryStore,
    InvalidKey,
    ObjectMissing,
    hash_object,
    open_store,
)
from tests.integration.core.object_calls import CONTENT, KEY, fetch


@pytest.fixture
def directory(tmp_path: Path, web_url: str) -> Iterator[DirectoryStore]:
    open_store.cache_clear()
    with override_settings(OBJECT_STORE=f"file://{tmp_path}/objects"):
        opened = object_store.store()
        assert isinstance(opened, DirectoryStore)
        yield opened


def test_nothing_of_a_url_can_be_changed(directory: DirectoryStore) -> None:
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


def test_a_url_expires(directory: DirectoryStore) -> None:
    directory.put_stream(KEY, [CONTENT])

    status, body, _ = fetch(directory.signed_url(KEY, expires_seconds=-1))

    assert status == 403
    assert b"invalid_signature" in body


def test_a_url_signed_with_another_secret_is_refused(directory: DirectoryStore) -> None:
    directory.put_stream(KEY, [CONTENT])
    with override_settings(SIGNING_KEY="another"):
        url = directory.signed_url(KEY, expires_seconds=60)

    assert fetch(url)[0] == 403


@pytest.mark.parametrize("key", ["../secret", "org/../../x", "org//a", "/etc/passwd", ".drafts/x", "a\n", "a b"])
def test_no_key_leads_out_of_the_directory(directory: DirectoryStore, key: str) -> None:
    (directory.root.parent / "secret").write_text("canary")

    with pytest.raises(InvalidKey):
        directory.open_stream(key)
    with pytest.raises(InvalidKey):
        directory.signed_url(key, expires_seconds=60)


@pytest.mark.parametrize("climb", ["..", "%2e%2e", "..%2f.."])
def test_no_url_leads_out_of_the_directory(directory: DirectoryStore, web_url: str, climb: str) -> None:
    (directory.root.parent / "secret").write_text("canary")
    grant = object_store.Grant("GET", "../secret", int(time.time()) + 60)

    query = f"?method=GET&expires={grant.expires}&signature={grant.digest()}"
    status, body, _ = fetch(f"{web_url}/objects/{climb}/secret{query}")

    assert status in (403, 404)
    assert b"canary" not in body


def test_a_link_in_the_directory_is_not_followed(directory: DirectoryStore) -> None:
    (directory.root / "org").mkdir()
    (directory.root / "org/link").symlink_to("/etc/passwd")

    with pytest.raises(OSError):
        directory.open_stream("org/link")


def test_a_download_cannot_run_in_the_browser(directory: DirectoryStore) -> None:
    directory.put_stream(KEY, [b"<script>"])

    _, _, headers = fetch(directory.signed_url(KEY, expires_seconds=60, filename="x.html"))

    assert headers["Content-Type"] == "application/octet-stream"
    assert headers["Content-Disposition"].startswith("attachment;")
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "private, no-store"


@pytest.mark.parametrize("body", [CONTENT[:-1], CONTENT + b"x"])
def test_a_put_of_another_length_keeps_nothing(directory: DirectoryStore, body: bytes) -> None:
    url = directory.signed_url(KEY, "PUT", expires_seconds=60, content_bytes=len(CONTENT))

    status, answer, _ = fetch(url, method="PUT", body=body)

    assert status == 400
    assert b"wrong_content" in answer
    with pytest.raises(ObjectMissing):
        directory.stat(KEY)
    assert not list((directory.root / ".drafts").iterdir())


def test_a_put_without_an_announced_length_is_small(directory: DirectoryStore) -> None:
    url = directory.signed_url(KEY, "PUT", expires_seconds=60)

    assert fetch(url, method="PUT", body=b"x" * (1024 * 1024 + 1))[0] == 400
    assert fetch(url, method="PUT", body=b"{}")[0] == 200


def test_an_object_is_written_once(directory: DirectoryStore) -> None:
    url = directory.signed_url(KEY, "PUT", expires_seconds=60, content_bytes=3)

    assert fetch(url, method="PUT", body=b"one")[0] == 200
    assert fetch(url, method="PUT", body=b"one")[0] == 200, "a repeated upload is no error"
    assert fetch(url, method="PUT", body=b"two")[0] == 400
    assert hash_object(KEY).sha256 == hashlib.sha256(b"one").hexdigest()


def test_an_announced_hash_is_checked(directory: DirectoryStore) -> None:
    url = directory.signed_url(KEY, "PUT", expires_seconds=60, content_bytes=3)
    right = base64.b64encode(hashlib.sha256(b"one").digest()).decode()

    assert fetch(url, method="PUT", body=b"two", **{CHECKSUM_HEADER: right})[0] == 400
    assert fetch(url, method="PUT", body=b"one", **{CHECKSUM_HEADER: right})[0] == 200


def test_drafts_of_killed_writers_are_removed(directory: DirectoryStore) -> None:
    old, young = directory.root / ".drafts/old", directory.root / ".drafts/young"
    old.touch()
    young.touch()
    os.utime(old, (1, 1))

    DirectoryStore(directory.root)

    assert (old.exists(), young.exists()) == (False, True)


def test_an_unknown_object_is_404(directory: DirectoryStore) -> None:
    status, body, _ = fetch(directory.signed_url(KEY, expires_seconds=60))

    assert status == 404
    assert b"object_missing" in body


def test_a_url_of_either_base_names_its_own_origin(directory: DirectoryStore) -> None:
    with override_settings(PUBLIC_URL="https://anneal.example", INTERNAL_URL="http://internal:8001"):
        public = directory.signed_url(KEY, expires_seconds=60, base="public")
        internal = directory.signed_url(KEY, expires_seconds=60)

    assert urlsplit(public)[:3] == ("https", "anneal.example", f"/objects/{KEY}")
    assert urlsplit(internal)[:2] == ("http", "internal:8001")
