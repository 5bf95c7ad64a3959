"""A process that imports the training libraries once and forks the children of all runs: `python -m
gpu_workers.trainer.fork_server FD`.

The imports are most of what a child does before it loads its model: seconds of CPU time, which a machine that also
serves the platform has to share. The process computes nothing: a fork would lack the threads of its parent. It is for
machines without a GPU only, because a process cannot use CUDA after a fork from one that has initialized it.

It answers requests on the socket FD (unix(7), SOCK_SEQPACKET, one JSON object a message), and ends with all its
children when the other end closes.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import IO, Any

from gpu_workers.common.config import REPOSITORY, child_environment, replace_environment
from gpu_workers.trainer.confinement import confine

_MODULES = ("gpu_workers.train.process", "gpu_workers.train.after.examination", "gpu_workers.train.after.merge")
_MESSAGE_BYTES = 1 << 20
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
                [sys.executable, "-m", __name__, str(theirs.fileno())],
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
            data = self._socket.recv(_MESSAGE_BYTES)
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


def serve(channel: socket.socket) -> dict[str, Any] | None:
    """Fork for each request and report each end; return the request in the fork, and None once the other end closes."""
    channel.send(b"{}")
    alive: dict[int, int] = {}  # by pidfd
    ready = selectors.DefaultSelector()
    ready.register(channel, selectors.EVENT_READ)
    while True:
        for key, _ in ready.select():
            if pid := alive.pop(key.fd, None):
                ready.unregister(key.fd)
                os.close(key.fd)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                channel.send(json.dumps({"ended": pid, "code": code}).encode())
                continue
            request, files, _, _ = socket.recv_fds(channel, _MESSAGE_BYTES, 2)
            if not request:
                for pid in alive.values():
                    os.killpg(pid, signal.SIGKILL)
                return None
            server = os.getpid()
            pid = os.fork()
            if not pid:
                ready.close()
                for descriptor in alive:
                    os.close(descriptor)
                return _prepare(json.loads(request), channel, files, server)
            for descriptor in files:
                os.close(descriptor)
            pidfd = os.pidfd_open(pid)
            alive[pidfd] = pid
            ready.register(pidfd, selectors.EVENT_READ)


def _prepare(request: dict[str, Any], channel: socket.socket, files: list[int], server: int) -> dict[str, Any]:
    """Make this fork what a new interpreter would be; return the request."""
    os.setsid()
    channel.send(json.dumps({"pid": os.getpid()}).encode())  # from here on, a signal to its group reaches it
    channel.close()
    stdin, log = files
    for source, target in ((stdin, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    for descriptor in files:
        os.close(descriptor)
    confine(server, has_network=request["has_network"])
    replace_environment(request["environment"])
    if threads := request["environment"].get("OMP_NUM_THREADS"):  # OpenMP has read the server's
        import torch  # noqa: PLC0415 - the agent's end of the socket does without

        torch.set_num_threads(int(threads))
    return request


def _import_libraries() -> None:
    """Import what children need; no garbage collection of a fork visits, and so copies, what was imported."""
    gc.disable()
    sys.modules["wandb"] = None  # type: ignore[assignment]  # as in child.py
    for module in _MODULES:
        importlib.import_module(module)
    gc.freeze()
    gc.enable()


if __name__ == "__main__":
    _import_libraries()
    asked = serve(socket.socket(fileno=int(sys.argv[1])))
    if asked is not None:
        sys.argv = [asked["module"], *asked["arguments"]]
        runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)
