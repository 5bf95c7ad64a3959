"""The agent's end of the process that forks children (gpu_workers/train/fork_server.py)."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import IO

from gpu_workers.common.config import REPOSITORY, child_environment

MODULE = "gpu_workers.train.fork_server"
MESSAGE_BYTES = 1 << 20
_IMPORT_SECONDS = 300.0
_POLL_SECONDS = 0.02


class ServerGone(OSError):
    """The server died, or did not finish its imports in time."""


class ForkServer:
    """The agent's end of the socket. Threads may share it."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(_IMPORT_SECONDS)
        self._lock = threading.Lock()
        self._codes: dict[int, int] = {}
        self._is_ready = False
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, str(theirs.fileno())],
                cwd=REPOSITORY,
                env=child_environment(threads=1, extra={"PYTHONFAULTHANDLER": "1"}),
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a signal to the agent's group is the agent's to pass on
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def fork(
        self, module: str, arguments: list[str], *, log: int, environment: dict[str, str], has_network: bool = True
    ) -> "Forked":
        """Run `python -m module arguments` in a fork; its standard input is a pipe, its output goes to the file `log`.

        The first call waits for the imports. Raises ServerGone.
        """
        read, write = os.pipe()
        stdin = os.fdopen(write, "wb")
        request = {"module": module, "arguments": arguments, "environment": environment, "has_network": has_network}
        try:
            with self._lock:
                if not self._is_ready:
                    self._receive()
                    self._is_ready = True
                socket.send_fds(self._socket, [json.dumps(request).encode()], [read, log])
                while (pid := self._receive().get("pid")) is None:
                    pass
        except OSError as error:
            stdin.close()
            raise ServerGone(str(error)) from error
        finally:
            os.close(read)
        return Forked(self, pid, stdin)

    def exit_code(self, pid: int) -> int | None:
        """Return the exit code of a child, negative for a signal, or None while it runs."""
        with self._lock, contextlib.suppress(BlockingIOError):
            self._socket.setblocking(False)
            try:
                while pid not in self._codes:
                    self._receive()
            except ServerGone:
                self._codes.setdefault(pid, -signal.SIGKILL)  # its children died with it
            finally:
                self._socket.settimeout(_IMPORT_SECONDS)
        return self._codes.get(pid)

    def close(self) -> None:
        """End the server and its children."""
        self._socket.close()
        self._process.wait()

    def _receive(self) -> dict[str, int]:
        """Return the next message, and keep the exit code that it may report."""
        try:
            data = self._socket.recv(MESSAGE_BYTES)
        except ConnectionResetError:
            data = b""
        if not data:
            raise ServerGone("The process that forks the children has ended.")
        message: dict[str, int] = json.loads(data)
        if "ended" in message:
            self._codes[message["ended"]] = message["code"]
        return message


class Forked:
    """A forked child, with the methods of `subprocess.Popen` that its users need."""

    def __init__(self, server: ForkServer, pid: int, stdin: IO[bytes]) -> None:
        self.pid = pid
        self.stdin = stdin
        self._server = server

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while it runs."""
        return self._server.exit_code(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code once it has ended; raises subprocess.TimeoutExpired."""
        ends = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if ends is not None and time.monotonic() > ends:
                raise subprocess.TimeoutExpired("forked child", timeout or 0.0)
            time.sleep(_POLL_SECONDS)
        return code
