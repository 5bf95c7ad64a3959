"""The process beside each gateway that writes metered usage to disk and ships it to the database.

    python -m apps.interfaces.gateway.metering.recorder_process FOLDER SOCKET LOCK

SOCKET and LOCK are inherited descriptors: one end of a socket pair whose other end the gateway has, and the held lock
of the folder. Syncing files and filling COPYs in the gateway itself would block every request on Python's global lock.

The gateway sends frames of entries, one at a time, and gets a reply when they are written. When the gateway is gone,
the written entries stay for another gateway to ship. Only that gateway knows that the money set aside here is no longer
in use.
"""

import gc
import logging
import os
import signal
import socket
import struct
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import django
import msgspec

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "apps.config.settings.dev")  # noqa: TID251 - Django's own entry point
django.setup()

from apps.batches.completions.records import CompletionRecord  # noqa: E402 - needs the settings
from apps.billing.usage.metering import UsageRecord  # noqa: E402
from apps.contracts.struct import prepare_types  # noqa: E402
from apps.interfaces.gateway.metering.recorder_protocol import FrameKind, Frames, frame  # noqa: E402
from apps.interfaces.gateway.metering.shipper import Shipper  # noqa: E402
from apps.interfaces.gateway.metering.spool import Completion, End, Entry, Segments, parse_entries  # noqa: E402

logger = logging.getLogger(__name__)

_RECEIVE_BYTES = 256 * 1024
_TEND_INTERVAL = struct.pack("ll", 1, 0)  # seconds and microseconds
_SWITCH_SECONDS = 0.0005  # a finished sync must not wait long for the thread that ships


class RecorderProcess:
    """One thread writes what arrives on the connection; the other ships it."""

    def __init__(self, folder: Path, connection: socket.socket) -> None:
        # The kernel's own timeout: Python's would poll the socket before each read.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TEND_INTERVAL)
        self._connection = connection
        self._segments = Segments(folder)
        self._segments_lock = threading.Lock()
        self._sending = threading.Lock()
        self._shipper = Shipper(self._handle_shipped, self._handle_stored)
        self._has_failed = self._is_stopping = False

    def run(self) -> None:
        """Serve until the gateway closes the connection."""
        prepare_types()
        threading.Thread(target=self._ship, name="shipper", daemon=True).start()
        self._send(FrameKind.WELL)
        frames = Frames()
        while (data := self._receive()) != b"":
            for kind, content in frames.feed(data or b""):
                self._handle(kind, content)
            with self._segments_lock:
                with suppress(OSError):  # the next write meets the error too and reports it
                    self._segments.prepare()
                self._segments.rotate()
                if self._has_failed and self._is_well():
                    self._has_failed = False
                    self._send(FrameKind.WELL)
        if self._is_stopping:
            with self._segments_lock:
                self._segments.close()

    def _receive(self) -> bytes | None:
        """Return the bytes received; return None if none came for a while, and b"" at the end."""
        try:
            return self._connection.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            return b""

    def _ship(self) -> None:
        try:
            self._shipper.run()
        except BaseException:
            logger.critical("the shipper failed", exc_info=True)
            os._exit(1)  # this ends the gateway, and its supervisor starts a new one

    def _handle(self, kind: FrameKind, content: bytes) -> None:
        if kind is FrameKind.FLUSH:
            self._is_stopping = True
            self._shipper.flush_now()
            return
        is_written = self._write(content, is_synced=kind is FrameKind.ENDS)
        self._send(FrameKind.WRITTEN, b"\1" if is_written else b"\0")
        if is_written:
            self._keep(parse_entries(content))

    def _write(self, content: bytes, *, is_synced: bool) -> bool:
        try:
            with self._segments_lock:
                self._segments.append(content, is_synced=is_synced)
        except OSError as error:
            logger.error("the spool cannot be written: %s", error)
            self._has_failed = True
            return False
        return True

    def _keep(self, entries: Sequence[Entry]) -> None:
        with self._segments_lock:
            self._segments.keep(entry.id for entry in entries)
            # No record with the start's id will be shipped: from here on the end alone keeps what is needed.
            self._segments.forget(entry.start_id for entry in entries if isinstance(entry, End) and entry.start_id)
        if ends := [entry.record for entry in entries if isinstance(entry, End)]:
            self._shipper.add(ends)
        if completions := [entry.record for entry in entries if isinstance(entry, Completion)]:
            self._shipper.add_completions(completions)

    def _is_well(self) -> bool:
        """Return whether the disk can be written again.

        No request can find this out, because none is admitted meanwhile.
        """
        try:
            self._segments.probe()
        except OSError:
            return False
        return True

    def _handle_shipped(self, batch: Sequence[UsageRecord], recorded_ids: Sequence[str]) -> None:
        with self._segments_lock:
            self._segments.forget(recorded_ids)
        slices: dict[str, int] = {}
        for record in batch:
            slices[record.slice_id] = slices.get(record.slice_id, 0) + 1
        self._send(FrameKind.SHIPPED, msgspec.json.encode(slices))

    def _handle_stored(self, batch: Sequence[CompletionRecord], stored_ids: Sequence[str]) -> None:
        with self._segments_lock:
            self._segments.forget(stored_ids)
        sizes: dict[str, int] = {}
        for record in batch:
            sizes[record.organization_id] = sizes.get(record.organization_id, 0) + record.bytes
        self._send(FrameKind.STORED, msgspec.json.encode(sizes))

    def _send(self, kind: FrameKind, content: bytes = b"") -> None:
        try:
            with self._sending:
                self._connection.sendall(frame(kind, content))
        except (BrokenPipeError, ConnectionResetError):
            pass  # the gateway is gone; the other thread notices too


def main(arguments: Sequence[str]) -> None:
    folder, descriptor, _lock = arguments
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the gateway, which closes the connection when it is done
    sys.setswitchinterval(_SWITCH_SECONDS)
    gc.freeze()  # Django and its models live as long as the process, so skip them in every collection
    RecorderProcess(Path(folder), socket.socket(fileno=int(descriptor))).run()
    os._exit(0)  # the thread that ships may be waiting for the database


if __name__ == "__main__":
    main(sys.argv[1:])
