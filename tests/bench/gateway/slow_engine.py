"""An engine that writes its first token at once and then one every half second, to any number of streams.

python -m tests.bench.gateway.slow_engine PORT
"""

import asyncio
import sys

import httptools
import uvloop

from tests.bench.gateway.stage import event, token_event

SECONDS_BETWEEN_TOKENS = 0.5
TOKENS = 12
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_FIRST = event([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}], 0)


def _chunk(text: str) -> bytes:
    return b"%x\r\n%s\r\n" % (len(text), text.encode())


_EVENTS = [
    *(_chunk(token_event(" word", count)) for count in range(2, TOKENS + 1)),
    _chunk(token_event("", TOKENS, finish="stop") + event([], TOKENS) + "data: [DONE]\n\n") + b"0\r\n\r\n",
]
_OPENING = _HEAD + _chunk(_FIRST + token_event(" word", 1))


class Stream(asyncio.Protocol):
    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        self._transport.write(_OPENING)
        self._write(0)

    def _write(self, place: int) -> None:
        if place and not self._transport.is_closing():
            self._transport.write(_EVENTS[place - 1])
        if place < len(_EVENTS):
            asyncio.get_running_loop().call_later(SECONDS_BETWEEN_TOKENS, self._write, place + 1)


async def serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Stream, "127.0.0.1", port, backlog=2048)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
