"""The messages between a gateway and its recorder."""

import struct
from collections.abc import Iterator
from enum import IntEnum

_FRAME = struct.Struct("<BI")


class FrameKind(IntEnum):
    """The kind of a frame. The first three go to the recorder; the others come from it."""

    STARTS = 1  # entries to write to the disk with the next ends
    ENDS = 2  # entries to write to the disk now
    FLUSH = 3  # ship without gathering, because the gateway stops
    WRITTEN = 4  # the reply to each STARTS and ENDS; its content is 1 if they were written as requested, else 0
    SHIPPED = 5  # JSON: how many more requests of each slice the database has
    STORED = 7  # JSON: how many more bytes of each organization's completions the database has
    WELL = 6  # entries can be written, for the first time or again


def frame(kind: FrameKind, content: bytes = b"") -> bytes:
    return _FRAME.pack(kind, len(content)) + content


class Frames:
    """Assembles frames from the bytes received."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[tuple[FrameKind, bytes]]:
        """Yield the complete frames."""
        self._rest += data
        place = 0
        while place + _FRAME.size <= len(self._rest):
            kind, length = _FRAME.unpack_from(self._rest, place)
            end = place + _FRAME.size + length
            if end > len(self._rest):
                break
            yield FrameKind(kind), self._rest[place + _FRAME.size : end]
            place = end
        self._rest = self._rest[place:]
