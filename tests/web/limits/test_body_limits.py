"""No stranger fills the disk: large bodies are judged before they are read."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest
from django.conf import settings
from django.test import override_settings

from apps.accounts.login.api_keys import LIVE_PREFIX, new_secret
from apps.accounts.login.key_operations import IssuedKey
from apps.accounts.models import User
from apps.core.http.asgi import DEFAULT_BODY_BYTES, MIB
from apps.core.http.body_limits import LimitBodies
from apps.core.objects.store import DirectoryStore, object_key, open_store
from apps.core.objects.views import OBJECT_LIMIT
from apps.interfaces.web.edge.request_limits import BODY_LIMITS

KEY = object_key("org_01", "datasets", "file-01", "data.jsonl")


class Exchange:
    """One request over plain ASGI: what was read of its body, and what was answered."""

    def __init__(self, application: Any, method: str, url: str, size: int, headers: dict[str, str], declared: bool):
        self.read_bytes, self._left = 0, size
        self.status, self.body = 0, b""
        length = [(b"content-length", b"%d" % size)] if declared else []
        scope = {
            "type": "http",
            "method": method,
            "path": urlsplit(url).path,
            "query_string": urlsplit(url).query.encode(),
            "headers": [*((name.encode(), value.encode()) for name, value in headers.items()), *length],
        }
        asyncio.run(application(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        part = min(self._left, MIB)
        self._left -= part
        self.read_bytes += part
        return {"type": "http.request", "body": b"x" * part, "more_body": self._left > 0}

    async def _send(self, message: dict[str, Any]) -> None:
        self.status = message.get("status", self.status)
        self.body += message.get("body", b"")


async def read_all(scope: Any, receive: Any, send: Any) -> None:
    """Stands where Django stands: reads the body to its end before it answers."""
    while (message := await receive())["type"] == "http.request" and message["more_body"]:
        pass
    if message["type"] == "http.request":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


def ask(method: str, url: str, size: int, *, declared: bool = True, limits: Any = BODY_LIMITS, **headers: str):
    return Exchange(LimitBodies(read_all, limits), method, url, size, headers, declared)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[DirectoryStore]:
    open_store.cache_clear()
    with override_settings(OBJECT_STORE=f"file://{tmp_path}/objects"):
        yield open_store(settings.OBJECT_STORE)
    open_store.cache_clear()


def _altered(url: str, **changes: str) -> str:
    query = {name: values[0] for name, values in parse_qs(urlsplit(url).query).items()} | changes
    return f"{urlsplit(url).path}?{urlencode(query)}"


@pytest.mark.parametrize("limits", [BODY_LIMITS, [OBJECT_LIMIT]], ids=["public", "private"])
@pytest.mark.parametrize("forge", ["unsigned", "altered", "expired", "for reading"])
def test_an_object_nobody_signed_for_is_refused_unread(directory: DirectoryStore, forge: str, limits: Any) -> None:
    urls = {
        "unsigned": "/objects/x",
        "altered": _altered(directory.signed_url(KEY, "PUT", expires_seconds=60, content_bytes=5), bytes="9999999"),
        "expired": directory.signed_url(KEY, "PUT", expires_seconds=-1, content_bytes=MIB),
        "for reading": directory.signed_url(KEY, "GET", expires_seconds=60),
    }

    for declared in (True, False):
        answer = ask("PUT", urls[forge], MIB, declared=declared, limits=limits)
        assert (answer.status, answer.read_bytes) == (403, 0)
        assert json.loads(answer.body)["error"]["code"] == "invalid_signature"


def test_a_signed_object_may_be_as_large_as_signed_and_no_larger(directory: DirectoryStore) -> None:
    url = directory.signed_url(KEY, "PUT", expires_seconds=60, content_bytes=8 * MIB)

    assert ask("PUT", url, 8 * MIB).status == 200
    assert ask("PUT", url, 9 * MIB).read_bytes == 0
    undeclared = ask("PUT", url, 100 * MIB, declared=False)
    assert (undeclared.status, undeclared.read_bytes) == (413, 9 * MIB)


def test_a_url_for_an_empty_object_is_none_without_a_size(directory: DirectoryStore) -> None:
    url = directory.signed_url(KEY, "PUT", expires_seconds=60, content_bytes=0)

    assert ask("PUT", url, 1).status == 413
    assert ask("PUT", url.replace("&bytes=0", ""), 1).status == 403


@override_settings(OBJECT_STORE="s3://bucket?endpoint=http://127.0.0.1:1")
def test_without_a_directory_no_object_is_taken() -> None:
    open_store.cache_clear()
    assert ask("PUT", "/objects/x", MIB).status == 403
    open_store.cache_clear()


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("path", ["/v1/files", "/datasets"])
def test_a_large_upload_from_nobody_is_refused_early(path: str) -> None:
    forged = {"authorization": f"Bearer {new_secret(LIVE_PREFIX)}", "cookie": "sessionid=" + "a" * 32}

    for headers in ({}, forged):
        declared = ask("POST", path, 100 * MIB, **headers)
        counted = ask("POST", path, 100 * MIB, declared=False, **headers)
        assert (declared.status, declared.read_bytes) == (401, 0)
        assert (counted.status, counted.read_bytes) == (401, DEFAULT_BODY_BYTES + MIB)
        assert ask("POST", path, MIB, **headers).status == 200  # the view says what is wrong


@pytest.mark.django_db(transaction=True)
def test_a_large_upload_from_a_key_or_a_session_is_taken(key: IssuedKey, alice: User, client_for: Any) -> None:
    cookie = f"{settings.SESSION_COOKIE_NAME}={client_for(alice).cookies[settings.SESSION_COOKIE_NAME].value}"

    assert ask("POST", "/v1/files", 20 * MIB, authorization=f"Bearer {key.secret}").status == 200
    assert ask("POST", "/datasets", 20 * MIB, cookie=cookie).status == 200
    assert ask("POST", "/v1/files", 600 * MIB, authorization=f"Bearer {key.secret}").status == 413
