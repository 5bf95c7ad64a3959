"""A second process for the views of heavy users.

Views share the interpreter of their process. A view that computes delays all others there, so heavy users get a
separate interpreter.
"""

import asyncio
import contextlib
import logging
import signal
import subprocess
import tempfile
from collections.abc import Sequence

from apps.core.errors import Unavailable
from apps.core.http.asgi import Receive, Scope, Send
from apps.interfaces.web.edge.passing import PassThrough

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.2
_REST_SECONDS = 2.0  # between two starts
_STOP_SECONDS = 5.0  # for the requests that it answers


class BusyProcess:
    """An ASGI application that passes requests to a second process, which it starts and restarts.

    `command` gets the path of the Unix socket to listen on as its last argument. The process must end when its standard
    input ends, so that it never outlives this one.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._folder = tempfile.TemporaryDirectory(prefix="anneal-web-")  # readable by this user alone
        self._socket = f"{self._folder.name}/views.sock"
        self._pass = PassThrough(
            f"unix://{self._socket}",
            unavailable=Unavailable("The server is restarting. Try again in a moment."),
            works_on=True,
        )
        self._keeping: asyncio.Task[None] | None = None
        self.is_ready = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._pass(scope, receive, send)

    async def start(self) -> None:
        """Start the process without waiting for it. `is_ready` becomes true when it answers."""
        self._keeping = asyncio.create_task(self._keep())

    async def end(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        await self._pass.close()
        self._folder.cleanup()

    async def _keep(self) -> None:
        while True:
            process = await asyncio.create_subprocess_exec(*self._command, self._socket, stdin=subprocess.PIPE)
            try:
                looking = asyncio.create_task(self._look())
                ended = await process.wait()
                looking.cancel()
                logger.error("the process of busy callers ended with %d and starts again", ended)
            finally:
                self.is_ready = False
                await _stop(process)
            await asyncio.sleep(_REST_SECONDS)

    async def _look(self) -> None:
        """Wait until the process accepts connections, however long it takes to start, and record it."""
        while not self.is_ready:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_unix_connection(self._socket)
                writer.close()
                self.is_ready = True
                return
            await asyncio.sleep(_LOOK_SECONDS)


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(_STOP_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
