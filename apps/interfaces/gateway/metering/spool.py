"""The spool: usage on disk.

It is written before the customer gets the end of the answer, and kept until the database has it. Each gateway writes
into its own folder. A segment `HOME/spool/<name>/<number>.open` is renamed to `.seg` when full or old, and deleted when
the database holds all of it. A record is its length, its CRC-32 and JSON. An incomplete last record was never confirmed
and is ignored. Records overwrite zeros that were synced before, so syncing a record changes only the file's content.
That halves the disk's work, and the disk cannot be full at that point. The folder's lock is held while its gateway or
that gateway's recorder lives, so another gateway can detect that both died and ship what they left.
"""

import fcntl
import logging
import os
import shutil
import struct
import time
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from apps.batches.completions.records import MAX_COMPLETION_BYTES, CompletionRecord
from apps.billing.usage.metering import UsageRecord

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 8 * 1024 * 1024
SEGMENT_SECONDS = 10.0
_PREPARED_BYTES = 1024 * 1024  # how much of a segment is prepared at a time
_LOW_BYTES = 64 * 1024  # with less left, more is prepared in advance
_HEADER = struct.Struct("<II")
_MAX_RECORD_BYTES = MAX_COMPLETION_BYTES + 64 * 1024


class Start(msgspec.Struct, frozen=True, tag="start", kw_only=True, omit_defaults=True):
    """A request was admitted. Without an `End`, its gateway died before it could be metered.

    If `charged_id` is set and the request is charged, its end has that id. Otherwise it has this one.
    """

    id: str
    organization_id: str
    key_id: str
    model_name: str
    slice_id: str
    worst_case_nano: int
    at: float
    charged_id: str = ""


class End(msgspec.Struct, frozen=True, tag="end", omit_defaults=True):
    """The metered usage of a request. `start_id` is the id of its start, if it differs."""

    record: UsageRecord
    start_id: str = ""

    @property
    def id(self) -> str:
        return self.record.id


class Completion(msgspec.Struct, frozen=True, tag="completion"):
    """A completion to store. It is written together with its `End`."""

    record: CompletionRecord

    @property
    def id(self) -> str:
        return self.record.id


Entry = Start | End | Completion
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Entry)


def encode(entry: Entry) -> bytes:
    body = _encoder.encode(entry)
    return _HEADER.pack(len(body), zlib.crc32(body)) + body


def read_entries(path: Path) -> Iterator[Entry]:
    """Yield the entries of a segment up to its end or its first incomplete one."""
    content = path.read_bytes()
    place = 0
    for entry, end in _parse(content):
        yield entry
        place = end
    if any(content[place : place + _HEADER.size]):
        logger.warning("%s ends in a torn record at byte %d", path, place)


def parse_entries(content: bytes) -> list[Entry]:
    """Return the entries of bytes that contain only whole entries."""
    return [entry for entry, _ in _parse(content)]


def _parse(content: bytes) -> Iterator[tuple[Entry, int]]:
    """Yield each complete entry and its end offset. Space that is prepared but not yet written has length zero."""
    place = 0
    while place + _HEADER.size <= len(content):
        length, checksum = _HEADER.unpack_from(content, place)
        body = content[place + _HEADER.size : place + _HEADER.size + length]
        if not length or length > _MAX_RECORD_BYTES or len(body) < length or zlib.crc32(body) != checksum:
            return
        place += _HEADER.size + length
        yield _decoder.decode(body), place


# --- Writing ----------------------------------------------------------------------------------------------------------


@dataclass
class _Segment:
    path: Path
    descriptor: int
    opened_at: float
    size_bytes: int = 0
    prepared_bytes: int = 0  # end of the zeros on the disk
    needed: set[str] = field(default_factory=set)  # requests whose record here is not in the database yet
    is_full: bool = False


class Segments:
    """The segments of one folder, written one after the other. Not thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._segments: list[_Segment] = []
        self._holders: dict[str, list[_Segment]] = defaultdict(list)
        self._number = 0

    def append(self, content: bytes, *, is_synced: bool) -> None:
        """Write entries. With `is_synced`, they and all earlier entries are on the disk. Raises OSError."""
        segment = self._current()
        try:
            if segment.size_bytes + len(content) > segment.prepared_bytes:
                _prepare(segment, len(content))
            _write_all(segment.descriptor, content, at=segment.size_bytes)
            if is_synced:
                os.fdatasync(segment.descriptor)
        except OSError:
            segment.is_full = True  # nothing behind a torn record can be read
            raise
        segment.size_bytes += len(content)

    def keep(self, ids: Iterable[str]) -> None:
        """Keep the last appended entries until these requests are forgotten."""
        segment = self._segments[-1]
        for request_id in ids:
            segment.needed.add(request_id)
            self._holders[request_id].append(segment)

    def prepare(self) -> None:
        """Prepare space in advance, while no write waits. Raises OSError."""
        segment = self._segments[-1] if self._segments else None
        if segment and not segment.is_full and segment.prepared_bytes - segment.size_bytes < _LOW_BYTES:
            _prepare(segment, 0)

    def probe(self) -> None:
        """Check that the disk can be written. Raises OSError if it cannot."""
        os.fdatasync(self._current().descriptor)

    def _current(self) -> _Segment:
        if not self._segments or self._segments[-1].is_full:
            self._number += 1
            path = self._folder / f"{self._number:08}.open"
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            _sync_folder(self._folder)
            self._segments.append(_Segment(path, descriptor, time.monotonic()))
        return self._segments[-1]

    def forget(self, ids: Iterable[str]) -> None:
        """Drop requests that are in the database."""
        for request_id in ids:
            for segment in self._holders.pop(request_id, ()):
                segment.needed.discard(request_id)

    def rotate(self) -> None:
        """Close segments that are full or old, and delete those that are wholly in the database."""
        for segment in list(self._segments):
            is_old = time.monotonic() - segment.opened_at > SEGMENT_SECONDS
            if not segment.is_full and (is_old or segment.size_bytes >= SEGMENT_BYTES):
                segment.is_full = True
                segment.path = segment.path.rename(segment.path.with_suffix(".seg"))
                _sync_folder(self._folder)
            if segment.is_full and not segment.needed:
                os.close(segment.descriptor)
                segment.path.unlink()
                self._segments.remove(segment)

    def close(self) -> None:
        """Release the folder; remove it if nothing is left to ship."""
        for segment in self._segments:
            os.close(segment.descriptor)
        if not any(segment.needed for segment in self._segments):
            shutil.rmtree(self._folder)


def _prepare(segment: _Segment, at_least_bytes: int) -> None:
    """Extend the segment by zeros and sync them before anything overwrites them."""
    count = max(_PREPARED_BYTES, at_least_bytes)
    _write_all(segment.descriptor, bytes(count), at=segment.prepared_bytes)
    os.fsync(segment.descriptor)
    segment.prepared_bytes += count


def _write_all(descriptor: int, content: bytes, *, at: int) -> None:
    view = memoryview(content)
    while view:
        written = os.pwrite(descriptor, view, at)
        view, at = view[written:], at + written


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- Folders and their locks ------------------------------------------------------------------------------------------

_HIDDEN = ".new-"


def claim_folder(root: Path, name: str) -> int:
    """Create the folder; return its lock.

    The lock is held before the folder gets the name under which gateways look for dead ones.
    """
    hidden = root / f"{_HIDDEN}{name}"
    hidden.mkdir(parents=True, mode=0o700)
    lock = _lock(hidden)
    if lock is None:
        raise FileExistsError(hidden)
    hidden.rename(root / name)
    _sync_folder(root)
    return lock


def _lock(folder: Path) -> int | None:
    """Return the held lock of a folder, or None if another live process holds it."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


@dataclass(frozen=True)
class Orphan:
    """The leftovers of a dead gateway.

    `ends` must be recorded and `completions` stored. `starts` have no end here: it was lost, or shipped before.
    """

    folder: Path
    lock: int
    ends: tuple[UsageRecord, ...]
    starts: tuple[Start, ...]
    completions: tuple[CompletionRecord, ...]

    def remove(self) -> None:
        """Delete the folder once the database has all of it."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self.lock)

    def leave(self) -> None:
        """Leave the folder for a later run."""
        os.close(self.lock)


def adopt_orphans(root: Path) -> Iterator[Orphan]:
    """Yield the folders of dead processes, locked so that no other gateway takes them too."""
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        if folder.name.startswith(_HIDDEN) or not folder.is_dir():
            continue
        try:
            lock = _lock(folder)
        except FileNotFoundError:
            continue  # another gateway took it first
        if lock is not None:
            entries = [entry for path in sorted(folder.glob("*.[os]*")) for entry in read_entries(path)]
            ends = [entry.record for entry in entries if isinstance(entry, End)]
            ended = {record.id for record in ends}
            starts = [one for one in entries if isinstance(one, Start) and not ended & {one.id, one.charged_id}]
            completions = tuple(one.record for one in entries if isinstance(one, Completion))
            yield Orphan(folder, lock, tuple(ends), tuple(starts), completions)
