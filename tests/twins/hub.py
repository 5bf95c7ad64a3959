"""A hub of models on loopback: the calls huggingface_hub makes for one repository, and its refusals.

`HfApi.model_info` and `hf_hub_download` of huggingface_hub 2.4.0 ran against it; weights are files of Git LFS there.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "4c8d3b2a" * 5


class Hub:
    """One repository, `acme/tiny`. Attributes may be changed while clients talk to it."""

    def __init__(self, folder: Path) -> None:
        self.files = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
        self.token: str | None = None  # set: gated, and opened by this token
        self.is_down = False
        self.fetched: list[str] = []
        self.url = ""

    def answer(self, method: str, target: str, token: str) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body."""
        if self.is_down:
            return 503, {}, b""
        path = unquote(urlsplit(target).path)
        if not path.removeprefix("/api/models").startswith("/acme/tiny/"):
            return 401, {"X-Error-Code": "RepoNotFound"}, b"{}"
        if COMMIT not in path:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        if self.token and token != self.token:
            return 403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted."}, b"{}"
        if path.startswith("/api/"):
            return 200, {"Content-Type": "application/json"}, self._listing(path)
        return self._file(method, path.rsplit("/", 1)[1])

    def _listing(self, path: str) -> bytes:
        if "/tree/" in path:
            return json.dumps([_tree_entry(name, content) for name, content in self.files.items()]).encode()
        siblings = [_sibling(name, content) for name, content in self.files.items()]
        return json.dumps({"id": "acme/tiny", "modelId": "acme/tiny", "sha": COMMIT, "siblings": siblings}).encode()

    def _file(self, method: str, name: str) -> tuple[int, dict[str, str], bytes]:
        if name not in self.files:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        if method == "GET":
            self.fetched.append(name)
        content = self.files[name]
        headers = {"ETag": f'"{_sha256(content)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "none"}
        return 200, headers, content


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

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _handle(self) -> None:
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            status, headers, body = hub.answer(self.command, self.path, token)
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_HEAD = _handle  # noqa: N815

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
