"""The gateway's side of its recorder: sends metered usage, and receives the number of shipped records.

The recorder waits only for the disk. Requests that end during one write and sync are written together in the next.
"""

import asyncio
import logging
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from apps.batches.completions.records import CompletionRecord
from apps.billing.usage.metering import UsageRecord
from apps.interfaces.gateway.metering.recorder_protocol import FrameKind, Frames, frame
from apps.interfaces.gateway.metering.spool import Completion, End, Start, claim_folder, encode

logger = logging.getLogger(__name__)

MIN_FREE_BYTES = 256 * 1024 * 1024
MAX_WAITING = 100_000  # limit for a long database outage: usage beyond it is not served on credit
_COMMAND = (sys.executable, "-m", "apps.interfaces.gateway.metering.recorder_process")
_CHECK_SECONDS = 1.0
_START_SECONDS = 0.01  # a start is written when it is once to twice this old, unless its request has ended by then


@dataclass(slots=True)
class _Batch:
    """Entries that arrived during the last write; they are written and synced together."""

    contents: list[bytes] = field(default_factory=list)
    ends: list[UsageRecord] = field(default_factory=list)
    waiters: "list[asyncio.Future[bool]]" = field(default_factory=list)
    completions: list[CompletionRecord] = field(default_factory=list)


class Recorder(asyncio.Protocol):
    """Writes usage through the recorder process. Use inside one event loop."""

    def __init__(
        self,
        root: Path,
        *,
        name: str,
        settled: Callable[[str, int], None],
        stored: Callable[[str, int], None] = lambda organization_id, count: None,
    ) -> None:
        """Create the recorder.

        `settled` is called with a slice's id and the number of its requests that are now in the database or never will
        be. `stored` is called with an organization's id and the bytes of such completions.
        """
        self.folder = root / name
        self.waiting = 0  # requests on the disk that the database does not have yet
        self.keeping = 0  # bytes of completions on the disk that the database does not have yet
        self._settled, self._stored = settled, stored
        self._batch, self._sent = _Batch(), _Batch()
        self._is_writing = self._is_ageing = False
        self._young: dict[str, Start] = {}  # started recently, by id
        self._older: dict[str, Start] = {}
        self._frames = Frames()
        self._is_well = self._is_roomy = True
        self._checked_at = -math.inf
        self._is_closing = False

    async def open(self) -> None:
        """Claim the folder and start the process that writes to it. Raises ConnectionError if it does not start."""
        self._loop = asyncio.get_running_loop()
        self._gone, self._news = self._loop.create_future(), asyncio.Event()
        self._lock = claim_folder(self.folder.parent, self.folder.name)
        ours, its = socket.socketpair()
        with its:
            descriptors = (its.fileno(), self._lock)
            command = [*_COMMAND, str(self.folder), *map(str, descriptors)]
            self._process = subprocess.Popen(command, pass_fds=descriptors)
        self._is_well = False  # until the process reports it
        self._transport, _ = await self._loop.create_connection(lambda: self, sock=ours)
        await self._heard(lambda: self._is_well)

    def has_room(self) -> bool:
        """Return whether requests can be metered. If not, none may be admitted."""
        now = time.monotonic()
        if now - self._checked_at > _CHECK_SECONDS:
            self._checked_at = now
            self._is_roomy = shutil.disk_usage(self.folder).free >= MIN_FREE_BYTES
        return self._is_roomy and self._is_well and self.waiting <= MAX_WAITING

    def start(self, entry: Start) -> None:
        """Write that a request begins. If the request ends soon enough, only its end is written.

        The entry reaches the disk with the next end. Losing it costs a count, not a charge.
        """
        self._young[entry.id] = entry
        if not self._is_ageing:
            self._is_ageing = True
            self._loop.call_later(_START_SECONDS, self._age)

    def _age(self) -> None:
        """Write the starts that are old enough."""
        self._batch.contents.extend(map(encode, self._older.values()))
        self._older, self._young = self._young, {}
        self._is_ageing = bool(self._older)
        if self._is_ageing:
            self._loop.call_later(_START_SECONDS, self._age)
        self._hand_over()

    def end(
        self, record: UsageRecord, *, start_id: str = "", completion: CompletionRecord | None = None
    ) -> "asyncio.Future[bool]":
        """Write the usage of a request, and the completion to store if it has one, even if the future is cancelled.

        `start_id` is the id of its start; the default is the same id. The future's result is whether the record is on
        the disk.
        """
        start_id = start_id or record.id
        if self._young.pop(start_id, None) is None:
            self._older.pop(start_id, None)
        batch = self._batch
        batch.contents.append(encode(End(record, start_id if start_id != record.id else "")))
        if completion is not None:
            batch.contents.append(encode(Completion(completion)))
            batch.completions.append(completion)
        if not batch.ends and not self._is_writing:
            self._hand_over_soon()
        batch.ends.append(record)
        waiter: asyncio.Future[bool] = self._loop.create_future()
        batch.waiters.append(waiter)
        return waiter

    def _hand_over_soon(self) -> None:
        """Send after everything else that ends in this event-loop iteration.

        A sync costs the same for one record or many.
        """
        self._loop.call_soon(self._loop.call_soon, self._hand_over)

    def _hand_over(self) -> None:
        """Send the collected entries, unless the last batch is still being written."""
        if self._is_writing or not self._batch.contents:
            return
        self._is_writing = True
        self._sent, self._batch = self._batch, _Batch()
        if self._gone.done():
            self._handle_written(is_written=False)
        else:
            kind = FrameKind.ENDS if self._sent.ends else FrameKind.STARTS
            self._transport.write(frame(kind, b"".join(self._sent.contents)))

    async def flush(self) -> None:
        """Ship everything before stopping. Raises ConnectionError if the recorder dies first."""
        self._transport.write(frame(FrameKind.FLUSH))
        await self._heard(lambda: not (self.waiting or self.keeping or self._is_writing or self._batch.contents))

    async def _heard(self, is_so: Callable[[], bool]) -> None:
        """Wait until messages from the process make the condition true. Raises ConnectionError."""
        while not is_so():
            if self._gone.done():
                raise ConnectionError("the recorder is gone")
            self._news.clear()
            await self._news.wait()

    async def close(self) -> None:
        """Let the process end. It removes the folder if nothing is left to ship."""
        self._is_closing = True
        if not self._gone.done():
            self._transport.write_eof()
            await self._gone
        await asyncio.to_thread(self._process.wait)
        os.close(self._lock)

    # --- Messages from the process.

    def data_received(self, data: bytes) -> None:
        for kind, content in self._frames.feed(data):
            if kind is FrameKind.WRITTEN:
                self._handle_written(is_written=content == b"\1")
            elif kind is FrameKind.SHIPPED:
                for slice_id, count in msgspec.json.decode(content, type=dict[str, int]).items():
                    self.waiting -= count
                    self._settled(slice_id, count)
            elif kind is FrameKind.STORED:
                for organization_id, count in msgspec.json.decode(content, type=dict[str, int]).items():
                    self.keeping -= count
                    self._stored(organization_id, count)
            elif kind is FrameKind.WELL:
                self._is_well = True
        self._news.set()

    def _handle_written(self, *, is_written: bool) -> None:
        sent = self._sent
        self._is_writing = False
        if is_written:
            self.waiting += len(sent.ends)
            self.keeping += sum(completion.bytes for completion in sent.completions)
        else:
            self._is_well = False
            for record in sent.ends:
                logger.error(
                    "the end of %s is not known to be written: %d tokens may stay unpaid",
                    record.id,
                    record.output_tokens,
                )
                self._settled(record.slice_id, 1)
            for completion in sent.completions:
                self._stored(completion.organization_id, completion.bytes)
        for waiter in sent.waiters:
            if not waiter.done():
                waiter.set_result(is_written)
        self._hand_over_soon()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the gateway if its recorder died. The supervisor starts a new one, which ships what is left."""
        self._gone.set_result(None)
        self._news.set()
        if not self._is_closing:
            logger.critical("the recorder is gone: %r", exc)
            os.kill(os.getpid(), signal.SIGTERM)
        if self._is_writing:
            self._handle_written(is_written=False)
