"""Writing at the end of a turn of the event loop."""

import asyncio
from typing import Any


class CoalescingTransport(asyncio.Transport):
    """A transport whose writes are held until all that came in one turn of the loop was answered.

    A write wakes whoever reads it, and on a busy machine the reader takes the processor at once: written one after the
    other, they do so once for all of a turn and not once for each. Reading and aborting are not held up.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport = transport
        self._call_soon = loop.call_soon
        self._is_closing = False

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def write(self, data: Any) -> None:
        self._call_soon(self._write, data)

    def _write(self, data: Any) -> None:
        if not self._transport.is_closing():  # or the other side left meanwhile
            self._transport.write(data)

    def close(self) -> None:
        """Close behind what was written; nothing can be written any more."""
        self._is_closing = True
        self._call_soon(self._transport.close)

    def abort(self) -> None:
        """Close at once; what is held is dropped."""
        self._is_closing = True
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._is_closing or self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)
