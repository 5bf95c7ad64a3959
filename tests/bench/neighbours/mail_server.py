"""A mail server that takes everything."""

import asyncio
from contextlib import suppress


class MailServer:
    """Takes mail on a loopback port, each in a moment, and tells who waits for it. Runs in the bench's event loop."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._expected: dict[str, asyncio.Future[None]] = {}

    def expect(self, name: str) -> "asyncio.Future[None]":
        """Return what is done when mail to `name`@… has come."""
        self._expected[name] = asyncio.get_running_loop().create_future()
        return self._expected[name]

    async def start(self) -> asyncio.Server:
        return await asyncio.start_server(self._talk, "127.0.0.1", self.port)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            writer.write(b"220 ready\r\n")
            name = ""
            while line := (await reader.readuntil(b"\r\n")).strip():
                match line[:4].upper():
                    case b"RCPT":
                        name = line.partition(b"<")[2].partition(b"@")[0].decode()
                        writer.write(b"250 ok\r\n")
                    case b"DATA":
                        writer.write(b"354 go on\r\n")
                        await reader.readuntil(b"\r\n.\r\n")
                        await asyncio.sleep(0.02)
                        writer.write(b"250 taken\r\n")
                        self._tell(name)
                    case b"QUIT":
                        break
                    case _:
                        writer.write(b"250 ok\r\n")
        writer.close()

    def _tell(self, name: str) -> None:
        if (waiting := self._expected.pop(name, None)) is not None and not waiting.done():
            waiting.set_result(None)
