"""Uploads in parts and downloads that continue where they stopped, with progress."""

import hashlib
import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from anneal.api import Api
from anneal.failures import ConnectionLost, ExitCode, Failure
from anneal.output import console, plain
from anneal.session import Session

PART_BYTES = 8 * 1024**2
_MOST_PARTS = 10_000
_KEPT_SECONDS = 24 * 3600  # of an upload that was begun; the server forgets it after an hour
_CLOSED = ("upload_closed", "upload_not_found")


@dataclass
class Progressing:
    """The progress of one file; nothing is shown where the output is no terminal."""

    bar: Progress
    task: Any

    def advance(self, count: int) -> None:
        self.bar.advance(self.task, count)


@contextmanager
def progress(text: str, total: int) -> Iterator[Progressing]:
    shown = console(is_error=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=shown, disable=not shown.is_terminal) as bar:
        yield Progressing(bar, bar.add_task(plain(text), total=total))


# --- upload -----------------------------------------------------------------------------------------------------------


@dataclass
class Begun:
    """An upload of one file that may have been interrupted, kept in a file of its own until it is complete."""

    kept_in: Path
    upload_id: str = ""
    part_bytes: int = PART_BYTES
    part_ids: list[str] = field(default_factory=list)

    @classmethod
    def find(cls, session: Session, path: Path, body: dict[str, Any]) -> "Begun":
        """Return what was begun for the same content, purpose and service, else a new beginning."""
        facts = path.stat()
        same = [session.base_url, str(path.resolve()), facts.st_size, facts.st_mtime_ns, body]
        name = hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()[:32]
        begun = cls(session.folder / "uploads" / f"{name}.json")
        begun.part_bytes = max(PART_BYTES, math.ceil(facts.st_size / _MOST_PARTS))
        try:
            kept = json.loads(begun.kept_in.read_text())
            begun.upload_id, begun.part_bytes = str(kept["upload_id"]), int(kept["part_bytes"])
            begun.part_ids = [str(each) for each in kept["part_ids"]]
        except (OSError, ValueError, KeyError, TypeError):
            pass
        return begun

    def keep(self) -> None:
        """Write the file, from which a later call continues. Where it cannot be written, none continues."""
        with suppress(OSError):
            self._keep()

    def _keep(self) -> None:
        self.kept_in.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        content = {"upload_id": self.upload_id, "part_bytes": self.part_bytes, "part_ids": self.part_ids}
        self.kept_in.write_text(json.dumps(content))
        for other in self.kept_in.parent.iterdir():
            with suppress(FileNotFoundError):  # another upload has ended, and deleted its file
                if other.stat().st_mtime < time.time() - _KEPT_SECONDS:
                    other.unlink()

    def forget(self) -> None:
        with suppress(OSError):
            self.kept_in.unlink(missing_ok=True)
        self.upload_id, self.part_ids = "", []


def upload(session: Session, path: Path, *, purpose: str, mapping: object | None) -> dict[str, Any]:
    """Send a file in parts and return its object. An interrupted upload continues with its next part."""
    body = {"bytes": path.stat().st_size, "filename": path.name, "purpose": purpose}
    body |= {} if mapping is None else {"mapping": mapping}
    begun = Begun.find(session, path, body)
    was_begun = bool(begun.upload_id)
    try:
        return _send(session.api, path, body, begun)
    except Failure as failure:
        if not was_begun or failure.code not in _CLOSED:
            raise
        begun.forget()  # it expired after an hour, or belongs to another organization
        return _send(session.api, path, body, begun)


def _send(api: Api, path: Path, body: dict[str, Any], begun: Begun) -> dict[str, Any]:
    if not begun.upload_id:
        begun.upload_id = api.post_once("/v1/uploads", body)["id"]
        begun.keep()
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file, progress(path.name, body["bytes"]) as shown:
        for number, part in enumerate(iter(lambda: file.read(begun.part_bytes), b"")):
            digest.update(part)
            if number >= len(begun.part_ids):
                # Without a key, of which a day has few: a part that is stored twice is named once at the end.
                sent = api.post(f"/v1/uploads/{begun.upload_id}/parts", files={"data": ("part", part)})
                begun.part_ids.append(sent["id"])
                begun.keep()
            shown.advance(len(part))
    wanted = {"part_ids": begun.part_ids, "md5": digest.hexdigest()}
    try:
        completed = api.post_once(f"/v1/uploads/{begun.upload_id}/complete", wanted)
    except Failure as failure:
        if failure.code == "invalid_checksum":
            begun.forget()
        raise
    begun.forget()
    found: dict[str, Any] = completed["file"]
    return found


def upload_whole(session: Session, path: Path, *, purpose: str) -> dict[str, Any]:
    """Send a file in one request, as files of requests and of items are sent, and return its object."""
    with path.open("rb") as file, progress(path.name, path.stat().st_size) as shown:
        content = shown.bar.wrap_file(file, task_id=shown.task)
        files, fields = {"file": (path.name, content)}, {"purpose": purpose}
        found: dict[str, Any] = session.api.post_once("/v1/files", files=files, data=fields)
    return found


# --- download ---------------------------------------------------------------------------------------------------------


def download(
    api: Api, address: str, target: Path, *, size: int, sha256: str | None = None, params: dict[str, str] | None = None
) -> bool:
    """Write a file whose size and hash are right, and return whether any of it was fetched.

    What an earlier call left is kept if the hash is known, because only that tells what file it is of. Raises Failure
    if the content is another one.
    """
    if sha256 is not None and target.exists() and _is_right(target, size, sha256):
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.part")
    if sha256 is None:
        part.unlink(missing_ok=True)
    had_part = part.exists()
    with progress(target.name, size) as shown:
        for attempt in range(1, api.attempts + 1):
            try:
                _fetch(api, address, part, size, params or {}, shown)
                break
            except ConnectionLost:  # what arrived is kept
                if attempt == api.attempts:
                    raise
    if _is_right(part, size, sha256):
        part.replace(target)
        return True
    part.unlink()
    if had_part:  # it was of another file
        return download(api, address, target, size=size, sha256=sha256, params=params)
    text = f"{target.name} arrived damaged: its size or SHA-256 is not what Anneal lists. Run the command again."
    raise Failure(text, ExitCode.UNREACHABLE)


def _is_right(path: Path, size: int, sha256: str | None) -> bool:
    return path.stat().st_size == size and (sha256 is None or hash_of(path) == sha256)


def _fetch(api: Api, address: str, part: Path, size: int, params: dict[str, str], shown: Progressing) -> None:
    """Append what is missing. Raises ConnectionLost where the connection ends."""
    there = part.stat().st_size if part.exists() else 0
    if there >= size > 0:
        return
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={there}-"} if there else {})
    with api.stream("GET", address, params=params, headers=headers) as response:
        is_rest = response.status_code == 206
        shown.bar.update(shown.task, completed=there if is_rest else 0)
        with part.open("ab" if is_rest else "wb") as file:
            for chunk in response.iter_bytes():
                file.write(chunk)
                shown.advance(len(chunk))


def hash_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
