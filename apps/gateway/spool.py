"""What was metered, on disk before the customer has the end of the answer, until the database has it.

A process writes into a folder of its own: `HOME/spool/<name>/<number>.open`, renamed to `.seg` when full or old, and
deleted when the database holds all of it. A record is its length, its CRC-32 and JSON; a torn tail was never confirmed
to anybody and is ignored. The folder's lock is held while its process lives, so that any other gateway can tell that it
died and ship what it left.
"""

import asyncio
import fcntl
import logging
import math
import os
import queue
import shutil
import struct
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from apps.billing.usage import UsageRecord

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 8 * 1024 * 1024
SEGMENT_SECONDS = 10.0
LEAST_FREE_BYTES = 256 * 1024 * 1024
_LOOK_SECONDS = 1.0
_START_SECONDS = 0.01  # how long a beginning waits for company
_HEADER = struct.Struct("<II")
_LARGEST_RECORD_BYTES = 64 * 1024


class Start(msgspec.Struct, frozen=True, tag="start", kw_only=True):
    """A request was admitted; without an `End` its gateway died before it could be metered."""

    id: str
    organization_id: str
    key_id: str
    model_name: str
    slice_id: str
    worst_case_nano: int
    at: float


class End(msgspec.Struct, frozen=True, tag="end"):
    """What a request used."""

    record: UsageRecord

    @property
    def id(self) -> str:
        return self.record.id


Entry = Start | End
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Entry)


def encode(entry: Entry) -> bytes:
    body = _encoder.encode(entry)
    return _HEADER.pack(len(body), zlib.crc32(body)) + body


def read_entries(path: Path) -> Iterator[Entry]:
    """Yield the entries of a segment up to its end or to the first one that is not whole."""
    content = path.read_bytes()
    place = 0
    while place + _HEADER.size <= len(content):
        length, checksum = _HEADER.unpack_from(content, place)
        body = content[place + _HEADER.size : place + _HEADER.size + length]
        if length > _LARGEST_RECORD_BYTES or len(body) < length or zlib.crc32(body) != checksum:
            logger.warning("%s ends in a torn record at byte %d", path, place)
            return
        yield _decoder.decode(body)
        place += _HEADER.size + length


# --- Writing ----------------------------------------------------------------------------------------------------------


@dataclass
class _Segment:
    path: Path
    descriptor: int
    opened_at: float
    size_bytes: int = 0
    needed: set[str] = field(default_factory=set)  # requests whose record here is not in the database yet
    is_full: bool = False


@dataclass(slots=True)
class _Batch:
    """What came in while the last batch was synced; written and synced together."""

    contents: list[bytes] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    durable: "asyncio.Future[None] | None" = None


@dataclass(frozen=True)
class _Shipped:
    ids: Sequence[str]


class Spool:
    """One thread writes for all requests: whatever came in while it synced is synced together next."""

    def __init__(self, root: Path, *, name: str) -> None:
        self.folder = root / name
        self._commands: queue.SimpleQueue[_Batch | _Shipped | None] = queue.SimpleQueue()
        self._batch = _Batch()
        self._is_due = self._is_writing = False
        self._segments: list[_Segment] = []
        self._holders: dict[str, list[_Segment]] = defaultdict(list)
        self._number = 0
        self._has_failed = False
        self._is_roomy = True
        self._looked_at = -math.inf

    def open(self) -> None:
        """Claim the folder and begin to write, for requests of the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._lock = _claim_new(self.folder.parent, self.folder.name)
        self._thread = threading.Thread(target=self._run, name="spool", daemon=True)
        self._thread.start()

    def start(self, entry: Start) -> None:
        """Write that a request begins. Reaches the disk with the next end: losing it costs a count, not a charge."""
        self._batch.ids.append(entry.id)
        self._batch.contents.append(encode(entry))
        if not self._is_due:
            self._is_due = True
            self._loop.call_later(_START_SECONDS, self._hand_over)

    def end(self, record: UsageRecord) -> "asyncio.Future[None]":
        """Write what a request used; the future is done when it is on the disk, and raises OSError when it is not.

        Those that are written together share one future.
        """
        batch = self._batch
        batch.ids.append(record.id)
        batch.contents.append(encode(End(record)))
        if batch.durable is None:
            batch.durable = self._loop.create_future()
            if not self._is_writing:
                self._loop.call_soon(self._hand_over)  # with what else ends in this turn of the loop
        return batch.durable

    def _hand_over(self) -> None:
        """Give the writer what came in, unless it is still at the last batch."""
        if not self._is_writing and self._batch.ids:
            self._is_writing, self._is_due = True, False
            batch, self._batch = self._batch, _Batch()
            self._commands.put(batch)

    def _note_written(self, durable: "asyncio.Future[None] | None", failure: OSError | None) -> None:
        self._is_writing = False
        if durable is not None and not durable.done():
            if failure is None:
                durable.set_result(None)
            else:
                durable.set_exception(failure)
        self._hand_over()

    def forget(self, ids: Sequence[str]) -> None:
        """Drop requests that the database has."""
        self._commands.put(_Shipped(ids))

    def has_room(self) -> bool:
        """Tell whether requests can be metered: without it none may be admitted."""
        now = time.monotonic()
        if now - self._looked_at > _LOOK_SECONDS:
            self._looked_at = now
            self._is_roomy = shutil.disk_usage(self.folder).free >= LEAST_FREE_BYTES
        return self._is_roomy and not self._has_failed

    def close(self) -> None:
        """Write what is waiting and let go of the folder; remove it when nothing is left to ship."""
        if self._batch.ids:
            self._commands.put(self._batch)
            self._batch = _Batch()
        self._commands.put(None)
        self._thread.join()
        if not any(segment.needed for segment in self._segments):
            shutil.rmtree(self.folder)
        os.close(self._lock)

    # The writer's thread, which alone touches what is below.

    def _run(self) -> None:
        while True:
            commands = self._take()
            for command in commands:
                if isinstance(command, _Batch):
                    self._write(command)
                elif isinstance(command, _Shipped):
                    self._let_go(command.ids)
            self._rotate()
            if self._has_failed:
                self._probe()
            if None in commands:
                self._close_segments()
                return

    def _take(self) -> list[_Batch | _Shipped | None]:
        """Return everything that waits, after a second at most."""
        commands: list[_Batch | _Shipped | None] = []
        try:
            commands.append(self._commands.get(timeout=1))
            while True:
                commands.append(self._commands.get_nowait())
        except queue.Empty:
            return commands

    def _write(self, batch: _Batch) -> None:
        failure: OSError | None = None
        try:
            self._append(batch)
        except OSError as error:
            logger.error("the spool cannot be written: %s", error)
            self._has_failed, failure = True, error
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._note_written, batch.durable, failure)

    def _probe(self) -> None:
        """See whether the disk can be written again: nobody else would, while no request is admitted."""
        try:
            os.fdatasync(self._current().descriptor)
        except OSError:
            return
        self._has_failed = False

    def _append(self, batch: _Batch) -> None:
        segment = self._current()
        content = b"".join(batch.contents)
        try:
            _write_all(segment.descriptor, content)
            if batch.durable is not None:
                os.fdatasync(segment.descriptor)
        except OSError:
            segment.is_full = True  # nothing can be read behind a torn record
            raise
        segment.size_bytes += len(content)
        segment.needed.update(batch.ids)
        for request_id in batch.ids:
            self._holders[request_id].append(segment)

    def _current(self) -> _Segment:
        if not self._segments or self._segments[-1].is_full:
            self._number += 1
            path = self.folder / f"{self._number:08}.open"
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
            _sync_folder(self.folder)
            self._segments.append(_Segment(path, descriptor, time.monotonic()))
        return self._segments[-1]

    def _let_go(self, ids: Iterable[str]) -> None:
        for request_id in ids:
            for segment in self._holders.pop(request_id, ()):
                segment.needed.discard(request_id)

    def _rotate(self) -> None:
        for segment in list(self._segments):
            is_old = time.monotonic() - segment.opened_at > SEGMENT_SECONDS
            if not segment.is_full and (is_old or segment.size_bytes >= SEGMENT_BYTES):
                segment.is_full = True
                segment.path = segment.path.rename(segment.path.with_suffix(".seg"))
                _sync_folder(self.folder)
            if segment.is_full and not segment.needed:
                os.close(segment.descriptor)
                segment.path.unlink()
                self._segments.remove(segment)

    def _close_segments(self) -> None:
        for segment in self._segments:
            os.close(segment.descriptor)


def _write_all(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- Folders and their locks ------------------------------------------------------------------------------------------

_HIDDEN = ".new-"


def _claim_new(root: Path, name: str) -> int:
    """Make the folder and hold its lock before it has the name under which others look for dead ones."""
    hidden = root / f"{_HIDDEN}{name}"
    hidden.mkdir(parents=True, mode=0o700)
    lock = _lock(hidden)
    if lock is None:
        raise FileExistsError(hidden)
    hidden.rename(root / name)
    _sync_folder(root)
    return lock


def _lock(folder: Path) -> int | None:
    """Return the held lock of a folder, or None while another process lives that holds it."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


@dataclass(frozen=True)
class Orphan:
    """What a dead gateway left. `ends` are to be recorded; `starts` have no end here: lost, or shipped before."""

    folder: Path
    lock: int
    ends: tuple[UsageRecord, ...]
    starts: tuple[Start, ...]

    def remove(self) -> None:
        """Delete it, once the database has all of it."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self.lock)

    def leave(self) -> None:
        """Leave it for another time."""
        os.close(self.lock)


def adopt_orphans(root: Path) -> Iterator[Orphan]:
    """Yield the folders whose process is dead, held so that no other gateway takes them too."""
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        if folder.name.startswith(_HIDDEN) or not folder.is_dir():
            continue
        try:
            lock = _lock(folder)
        except FileNotFoundError:
            continue  # another gateway was faster
        if lock is not None:
            yield _read_orphan(folder, lock)


def _read_orphan(folder: Path, lock: int) -> Orphan:
    entries = [entry for path in sorted(folder.glob("*.[os]*")) for entry in read_entries(path)]
    ends = [entry.record for entry in entries if isinstance(entry, End)]
    ended = {record.id for record in ends}
    starts = [entry for entry in entries if isinstance(entry, Start) and entry.id not in ended]
    return Orphan(folder, lock, tuple(ends), tuple(starts))
