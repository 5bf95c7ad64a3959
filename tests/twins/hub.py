"""A hub of models on loopback: the HTTP surface that huggingface_hub uses, with revisions, gates and faults.

`serve_hub(FOLDER, repo="acme/tiny", commit=COMMIT)` serves a local folder as one repository; `hub.publish(...)` adds
repositories and revisions. Set `HF_ENDPOINT` (or `settings.HUB_URL`) to `hub.url`. The real client (huggingface_hub 2.4
and transformers' `from_pretrained`) runs against it in tests/integration/catalog/test_hub_twin.py and
tests/engines/training/model/test_hub.py. Weights are LFS files: `resolve` redirects to a second origin, as the hub does
to its CDN; other files are redirected within the hub. The Xet protocol is not spoken, so clients download by HTTP.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from tests.twins.http_server import Answer, Request, serve_http
from tests.twins.hub_commits import Commits

COMMIT = "4c8d3b2a" * 5
_API = re.compile(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree|refs|commits)(?:/([^/]+)(?:/(.*))?)?)?")
_RESOLVE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_RESOLVE_CACHE = re.compile(r"/api/resolve-cache/models/([^/]+/[^/]+)/([^/]+)/(.+)")
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")

_STATUSES = {"refused": 401, "forbidden": 403, "conflict": 409}

Files = dict[str, bytes]


@dataclass
class Repository:
    """Revisions by commit, oldest first: the last one is `main`. With a `token`, only that token opens the files."""

    name: str
    revisions: dict[str, Files] = field(default_factory=dict)
    token: str | None = None
    card: dict[str, Any] = field(default_factory=lambda: {"license": "apache-2.0"})

    @property
    def head(self) -> str:
        return next(reversed(self.revisions))

    @property
    def files(self) -> Files:
        return self.revisions[self.head]


class Fault(NamedTuple):
    """What happens instead of, or to, the next `times` answers whose path contains `path`."""

    kind: Literal["down", "limited", "cut", "flipped", "refused", "forbidden", "conflict"]
    path: str = ""
    times: int = 1


class Hub:
    """Attributes may be changed while clients talk to it."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.revoked_tokens: set[str] = set()
        self.faults: list[Fault] = []
        self.fetched: list[str] = []  # names of files that were downloaded
        self.requests: list[str] = []  # method and path, of the hub and of its blobs
        self.blob_bearers: set[str] = set()  # tokens that clients sent where none belongs
        self.commits = Commits(self)
        self.is_down = False
        self.blob_url_override = ""
        self.url = self.blob_url = ""

    def publish(
        self, repo: str, source: Path | Mapping[str, bytes], *, commit: str | None = None, token: str | None = None
    ) -> Repository:
        """Add a revision of the repository from a folder or from files, and make it the head of `main`."""
        files = dict(source) if isinstance(source, Mapping) else _read_folder(source)
        repository = self.repositories.setdefault(repo, Repository(repo))
        key = "".join(f"{name}\0{_sha256(content)}\n" for name, content in sorted(files.items()))
        repository.revisions[commit or hashlib.sha1(key.encode()).hexdigest()] = files
        repository.token = token or repository.token
        return repository

    @property
    def only(self) -> Repository:
        """The repository that was published first."""
        return next(iter(self.repositories.values()))

    @property
    def files(self) -> Files:
        return self.only.files

    # --- answers ---------------------------------------------------------------------------------------------------

    def answer(self, request: Request) -> Answer:
        return self._with_faults(request, self._answer)

    def answer_blob(self, request: Request) -> Answer:
        return self._with_faults(request, self._blob)

    def _with_faults(self, request: Request, answer: Any) -> Answer:
        self.requests.append(f"{request.method} {request.path}")
        fault = self._take_fault(request)
        if self.is_down or (fault and fault.kind == "down"):
            return Answer(503)
        if fault and fault.kind in _STATUSES:
            return _refusal(_STATUSES[fault.kind], "", fault.kind)
        if fault and fault.kind == "limited":
            return Answer(429, b"", {"Retry-After": "0", "RateLimit": '"resolvers";r=0;t=0'})
        given: Answer = answer(request)
        if fault and fault.kind == "flipped" and given.content:
            middle = len(given.content) // 2
            flipped = bytes([given.content[middle] ^ 1])
            return given._replace(content=given.content[:middle] + flipped + given.content[middle + 1 :])
        if fault and fault.kind == "cut":
            return given._replace(cut_after=len(given.content) // 2)
        return given

    def _take_fault(self, request: Request) -> Fault | None:
        for index, fault in enumerate(self.faults):
            is_body = fault.kind in ("cut", "flipped")
            if fault.path in request.path and not (is_body and request.method == "HEAD"):
                self.faults[index : index + 1] = [fault._replace(times=fault.times - 1)] if fault.times > 1 else []
                return fault
        return None

    def _answer(self, request: Request) -> Answer:
        if request.bearer in self.revoked_tokens:
            return _refusal(401, "", "Invalid credentials in Authorization header")
        if (written := self.commits.answer(request)) is not None:
            return written
        path = unquote(urlsplit(request.path).path)
        if found := _RESOLVE_CACHE.fullmatch(path):
            return self._file(request, *found.groups(), is_cache=True)
        if found := _API.fullmatch(path):
            return self._api(request, *found.groups())
        if found := _RESOLVE.fullmatch(path):
            return self._file(request, *found.groups(), is_cache=False)
        return _refusal(404, "EntryNotFound", "Not found")

    def _api(self, request: Request, repo: str, call: str | None, revision: str | None, under: str | None) -> Answer:
        repository = self.repositories.get(repo)
        if repository is None:
            return _refusal(401, "RepoNotFound", "Repository not found")
        if call == "refs":
            heads = [{"name": "main", "ref": "refs/heads/main", "targetCommit": repository.head}]
            return _json({"branches": heads, "tags": [], "converts": []})
        commit = _commit_of(repository, revision)
        if commit is None:
            return _refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        files = repository.revisions[commit]
        if call == "commits":
            return _json(_history(repository, commit))
        if call == "tree":
            entries = [_tree_entry(name, content) for name, content in files.items() if name.startswith(under or "")]
            return _json(entries) if entries else _refusal(404, "EntryNotFound", f"{under} does not exist")
        has_blobs = "blobs" in parse_qs(urlsplit(request.path).query)
        return _json(_model_info(repository, commit, has_blobs=has_blobs))

    def _file(self, request: Request, repo: str, revision: str, name: str, *, is_cache: bool) -> Answer:
        repository = self.repositories.get(repo)
        if repository is None:
            return _refusal(401, "RepoNotFound", "Repository not found")
        if repository.token and request.bearer != repository.token:
            words = f"Access to model {repo} is restricted"
            return _refusal(403 if request.bearer else 401, "GatedRepo", words)
        commit = _commit_of(repository, revision)
        if commit is None:
            return _refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        content = repository.revisions[commit].get(name)
        if content is None:
            refused = _refusal(404, "EntryNotFound", "Entry not found")
            return refused._replace(headers={**refused.headers, "X-Repo-Commit": commit})
        sha256, known = _sha256(content), {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if is_lfs(name):
            place = f"{self.blob_url_override or self.blob_url}/blobs/{sha256}?name={name}&signature=twin"
            linked = {"X-Linked-Size": str(len(content)), "X-Linked-Etag": f'"{sha256}"'}
            return Answer(302, b"", {**known, **linked, "Location": place})
        tag = {"ETag": f'"{_blob_id(content)}"'}
        if not is_cache:
            return Answer(307, b"", {**known, **tag, "Location": f"/api/resolve-cache/models/{repo}/{commit}/{name}"})
        return self._content(request, name, content, {**known, **tag})

    def _blob(self, request: Request) -> Answer:
        if request.method == "PUT":
            return self.commits.store(request)
        if request.bearer:
            self.blob_bearers.add(request.bearer)
            return Answer(400, b"Only one auth mechanism allowed")
        address = urlsplit(request.path)
        sha256, name = address.path.rsplit("/", 1)[1], parse_qs(address.query).get("name", [""])[0]
        every = (files for repository in self.repositories.values() for files in repository.revisions.values())
        found = next((content for files in every for content in files.values() if _sha256(content) == sha256), None)
        if found is None:
            return Answer(404)
        return self._content(request, name, found, {"ETag": f'"{sha256}"', "Accept-Ranges": "bytes"})

    def _content(self, request: Request, name: str, content: bytes, headers: dict[str, str]) -> Answer:
        if request.method == "GET":
            self.fetched.append(name)
        if not (wanted := _RANGE.fullmatch(request.headers.get("Range") or "")):
            return Answer(200, content, headers)
        start, end = int(wanted[1]), min(int(wanted[2] or len(content)), len(content) - 1)
        if start >= len(content):
            return Answer(416, b"", {**headers, "Content-Range": f"bytes */{len(content)}"})
        span = {"Content-Range": f"bytes {start}-{end}/{len(content)}"}
        return Answer(206, content[start : end + 1], {**headers, **span})


def is_lfs(name: str) -> bool:
    return name.endswith((".safetensors", ".bin", "tokenizer.json", "tokenizer.model"))


def _read_folder(folder: Path) -> Files:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def _commit_of(repository: Repository, revision: str | None) -> str | None:
    if revision in (None, "main"):
        return repository.head
    return revision if revision in repository.revisions else None


def _history(repository: Repository, commit: str) -> list[dict[str, Any]]:
    commits = list(repository.revisions)
    known = commits[: commits.index(commit) + 1]
    return [
        {"id": one, "title": "Upload", "message": "", "date": "2026-11-01T00:00:00.000Z", "authors": [{"user": "acme"}]}
        for one in reversed(known)
    ]


def _model_info(repository: Repository, commit: str, *, has_blobs: bool) -> dict[str, Any]:
    files, name = repository.revisions[commit], repository.name
    return {
        "id": name,
        "modelId": name,
        "author": name.split("/")[0],
        "sha": commit,
        "lastModified": "2026-11-01T00:00:00.000Z",
        "private": False,
        "gated": "manual" if repository.token else False,
        "disabled": False,
        "pipeline_tag": "text-generation",
        "library_name": "transformers",
        "tags": ["safetensors", f"license:{repository.card.get('license')}"],
        "cardData": repository.card,
        "siblings": [
            _sibling(file, content) if has_blobs else {"rfilename": file} for file, content in files.items()
        ],
    }  # fmt: skip


def _sibling(name: str, content: bytes) -> dict[str, Any]:
    lfs = {"lfs": {"sha256": _sha256(content), "size": len(content), "pointerSize": 134}} if is_lfs(name) else {}
    return {"rfilename": name, "size": len(content), "blobId": _blob_id(content)} | lfs


def _tree_entry(name: str, content: bytes) -> dict[str, Any]:
    lfs = {"lfs": {"oid": _sha256(content), "size": len(content), "pointerSize": 134}} if is_lfs(name) else {}
    return {"type": "file", "path": name, "size": len(content), "oid": _blob_id(content)} | lfs


def _json(found: object) -> Answer:
    return Answer(200, json.dumps(found).encode(), {"Content-Type": "application/json"})


def _refusal(status: int, code: str, message: str) -> Answer:
    headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
    return Answer(status, b"{}", headers)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def serve_hub(folder: Path | None = None, *, repo: str = "acme/tiny", commit: str = COMMIT) -> Iterator[Hub]:
    """Run a hub on free loopback ports; with a folder, it holds the folder's files as `repo` at `commit`."""
    hub = Hub()
    if folder is not None:
        hub.publish(repo, folder, commit=commit)
    with serve_http(hub.answer) as hub.url, serve_http(hub.answer_blob) as hub.blob_url:
        yield hub
