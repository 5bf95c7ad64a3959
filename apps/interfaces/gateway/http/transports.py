"""Writes batched at the end of an event-loop iteration."""

import asyncio

_Data = bytes | bytearray | memoryview


class CoalescingTransport(asyncio.Transport):
    """A transport that holds writes until the end of the current event-loop iteration.

    Each write wakes its reader, which takes the processor at once on a busy machine. Batched writes cost one such
    switch per iteration instead of one per write. Reading and aborting are not delayed.
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

    def write(self, data: _Data) -> None:
        self._call_soon(self._write, data)

    def _write(self, data: _Data) -> None:
        if not self._transport.is_closing():  # the other side may have left meanwhile
            self._transport.write(data)

    def close(self) -> None:
        """Close after the pending writes. Nothing more can be written."""
        self._is_closing = True
        self._call_soon(self._transport.close)

    def abort(self) -> None:
        """Close at once and drop pending writes."""
        self._is_closing = True
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._is_closing or self._transport.is_closing()

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self._transport.get_extra_info(name, default)
