"""A hub of models on loopback: the calls huggingface_hub makes for one repository, and its refusals.

`HfApi.model_info` and `hf_hub_download` of huggingface_hub 2.4.0 ran against it; weights are files of Git LFS there.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.twins.http_server import Answer, Request, serve_http

COMMIT = "4c8d3b2a" * 5


class Hub:
    """One repository, `acme/tiny`. Attributes may be changed while clients talk to it."""

    def __init__(self, folder: Path) -> None:
        self.files = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
        self.token: str | None = None  # set: gated, and opened by this token
        self.is_down = False
        self.fetched: list[str] = []
        self.url = ""

    def answer(self, request: Request) -> Answer:
        if self.is_down:
            return Answer(503)
        path = unquote(urlsplit(request.path).path)
        if not path.removeprefix("/api/models").startswith("/acme/tiny/"):
            return Answer(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        if COMMIT not in path:
            return Answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        if self.token and request.bearer != self.token:
            return Answer(403, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted."})
        if path.startswith("/api/"):
            return Answer(200, self._listing(path), {"Content-Type": "application/json"})
        name = path.rsplit("/", 1)[1]
        if name not in self.files:
            return Answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        if request.method == "GET":
            self.fetched.append(name)
        content = self.files[name]
        headers = {"ETag": f'"{_sha256(content)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "none"}
        return Answer(200, content, headers)

    def _listing(self, path: str) -> bytes:
        if "/tree/" in path:
            return json.dumps([_tree_entry(name, content) for name, content in self.files.items()]).encode()
        siblings = [_sibling(name, content) for name, content in self.files.items()]
        return json.dumps({"id": "acme/tiny", "modelId": "acme/tiny", "sha": COMMIT, "siblings": siblings}).encode()


def _sibling(name: str, content: bytes) -> dict[str, Any]:
    lfs = {"lfs": {"sha256": _sha256(content), "size": len(content), "pointerSize": 134}} if _is_lfs(name) else {}
    return {"rfilename": name, "size": len(content), "blobId": _blob_id(content)} | lfs


def _tree_entry(name: str, content: bytes) -> dict[str, Any]:
    lfs = {"lfs": {"oid": _sha256(content), "size": len(content), "pointerSize": 134}} if _is_lfs(name) else {}
    return {"type": "file", "path": name, "size": len(content), "oid": _blob_id(content)} | lfs


def _is_lfs(name: str) -> bool:
    return name.endswith(".safetensors")


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def serve_hub(folder: Path) -> Iterator[Hub]:
    """Run a hub that holds the files of `folder`, on a free loopback port."""
    hub = Hub(folder)
    with serve_http(hub.answer) as hub.url:
        yield hub
