"""The part of the hub on loopback that takes commits: repositories made, files sent by LFS or inline, and a commit.

A file that goes through LFS is sent to the second origin, as to the hub's store, and is refused there if its bytes have
another hash. A commit that names a file which was not sent is refused.
"""

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from tests.twins.http_server import Answer, Request

if TYPE_CHECKING:
    from tests.twins.hub import Hub

WRITES = re.compile(r"/api/(?:repos/create|validate-yaml|models/([^/]+/[^/]+)/(?:preupload|commit)/main)")
_BATCH = re.compile(r"/([^/]+/[^/]+)\.git/info/lfs/objects/(batch|verify)")


class Commits:
    """What clients write to a hub. Each writer is a token with the namespaces that it may write to."""

    def __init__(self, hub: "Hub") -> None:
        self._hub = hub
        self.writers: dict[str, set[str]] = {}
        self.sent: dict[str, bytes] = {}  # by SHA-256
        self.private: set[str] = set()  # repositories that were made so

    def answer(self, request: Request) -> Answer | None:
        """Return the answer to a call that writes; None for any other call."""
        path = unquote(urlsplit(request.path).path)
        found = WRITES.fullmatch(path) or _BATCH.fullmatch(path)
        if request.method != "POST" or found is None:
            return None
        if path == "/api/validate-yaml":
            return _json({"errors": [], "warnings": []})
        spaces = self.writers.get(request.bearer)
        if spaces is None:
            return _refused(401, "Invalid username or password.")
        asked = [json.loads(line) for line in request.body.splitlines() if line]
        made = path == "/api/repos/create"
        repo = f"{asked[0]['organization']}/{asked[0]['name']}" if made else found[1]
        if repo.split("/")[0] not in spaces:
            return _refused(403, "You don't have the rights to write to this namespace")
        if made:
            return self._create(repo, asked[0])
        if repo not in self._hub.repositories:
            return _refused(404, "Repository not found", code="RepoNotFound")
        if path.endswith("/preupload/main"):
            return _json({"files": [_mode(file["path"]) for file in asked[0]["files"]]})
        if path.endswith("/batch"):
            return _json({"transfer": "basic", "objects": [self._place(repo, each) for each in asked[0]["objects"]]})
        if path.endswith("/verify"):
            return Answer(200 if asked[0]["oid"] in self.sent else 404, b"{}")
        return self._commit(repo, asked)

    def store(self, request: Request) -> Answer:
        """Take the bytes of one LFS file. The address is the permission: a token does not belong here."""
        if request.bearer:
            self._hub.blob_bearers.add(request.bearer)
            return Answer(400)
        oid = urlsplit(request.path).path.rsplit("/", 1)[1]
        if hashlib.sha256(request.body).hexdigest() != oid:
            return Answer(400, b"BadDigest")
        self.sent[oid] = request.body
        return Answer(200)

    def _create(self, repo: str, asked: Mapping[str, Any]) -> Answer:
        url = f"{self._hub.url}/{repo}"
        if repo in self._hub.repositories:
            return Answer(409, json.dumps({"url": url, "error": "You already created this model repo"}).encode())
        if asked.get("visibility") == "private":
            self.private.add(repo)
        self._hub.publish(repo, {".gitattributes": b""})
        return _json({"url": url})

    def _place(self, repo: str, wanted: Mapping[str, Any]) -> dict[str, Any]:
        oid = wanted["oid"]
        known = {"oid": oid, "size": wanted["size"]}
        if oid in self.sent:
            return known
        upload = {"href": f"{self._hub.blob_url_override or self._hub.blob_url}/uploads/{oid}"}
        verify = {"href": f"{self._hub.url}/{repo}.git/info/lfs/objects/verify"}
        return known | {"actions": {"upload": upload, "verify": verify}}

    def _commit(self, repo: str, lines: list[dict[str, Any]]) -> Answer:
        files = dict(self._hub.repositories[repo].files)
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.sent:
                    return _refused(400, f"{value['path']} was not uploaded")
                files[value["path"]] = self.sent[value["oid"]]
        commit = self._hub.publish(repo, files).head
        return _json({"success": True, "commitOid": commit, "commitUrl": f"{self._hub.url}/{repo}/commit/{commit}"})


def _mode(path: str) -> dict[str, Any]:
    mode = "lfs" if path.endswith((".safetensors", ".gguf", "tokenizer.json")) else "regular"
    return {"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": None}


def _json(found: object) -> Answer:
    return Answer(200, json.dumps(found).encode(), {"Content-Type": "application/json"})


def _refused(status: int, message: str, *, code: str = "") -> Answer:
    headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
    return Answer(status, json.dumps({"error": message}).encode(), headers)
