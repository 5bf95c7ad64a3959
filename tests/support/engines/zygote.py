"""Training children without ten seconds of imports each: one process imports the trainer and forks for every run.

`python -m tests.support.engines.zygote FD` answers on the socket FD. It runs no torch operation itself, so that what
it forks has no thread pool to miss.
"""

import array
import contextlib
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import gpu_workers.train.after.publish
import gpu_workers.train.process  # noqa: F401 - both are imported for what is forked
from gpu_workers.common.config import child_environment
from gpu_workers.common.process_tree import die_with_parent
from gpu_workers.trainer.executor import REPOSITORY, SubprocessExecutor

_MESSAGE_BYTES = 1 << 20
_POLL_SECONDS = 0.02


class Zygote:
    """The test's end of the socket."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        self._ended: dict[int, int] = {}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.engines.zygote", str(theirs.fileno())],
                cwd=REPOSITORY,
                env=child_environment(threads=1, extra={"TOKENIZERS_PARALLELISM": "false"}),
                pass_fds=[theirs.fileno()],
            )
        self._socket.recv(_MESSAGE_BYTES)  # it has imported everything: no test's patience is spent on that

    def fork(self, module: str, arguments: list[str], *, log: int, environment: dict[str, str]) -> "Forked":
        """Run `python -m module arguments` in a fork; its standard input is a pipe, its output goes to `log`."""
        read, write = os.pipe()
        request = {"module": module, "arguments": arguments, "environment": environment}
        with self._lock:
            fds = array.array("i", [read, log])
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)]
            self._socket.sendmsg([json.dumps(request).encode()], rights)
            os.close(read)
            while "pid" not in (answer := json.loads(self._socket.recv(_MESSAGE_BYTES))):
                self._note(answer)
        return Forked(self, answer["pid"], os.fdopen(write, "wb"))

    def exit_code(self, pid: int) -> int | None:
        with self._lock:
            while True:
                try:
                    self._note(json.loads(self._socket.recv(_MESSAGE_BYTES, socket.MSG_DONTWAIT)))
                except BlockingIOError:
                    return self._ended.get(pid)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()

    def _note(self, answer: dict[str, int]) -> None:
        self._ended[answer["ended"]] = answer["code"]


class Forked:
    """As much of `Popen` as is used of it."""

    def __init__(self, zygote: Zygote, pid: int, stdin: Any) -> None:
        self.pid = pid
        self.stdin = stdin
        self._zygote = zygote

    def poll(self) -> int | None:
        return self._zygote.exit_code(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        ends = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if ends is not None and time.monotonic() > ends:
                raise subprocess.TimeoutExpired("forked", timeout or 0.0)
            time.sleep(_POLL_SECONDS)
        return code


class ForkingExecutor(SubprocessExecutor):
    """SubprocessExecutor but for the fresh interpreter; its children keep the network."""

    def __init__(self, zygote: Zygote, module: str) -> None:
        super().__init__(thread_limit=1, module=module)
        self._zygote = zygote
        self._module = module

    def _spawn(self, arguments: list[str], log: Any, environment: dict[str, str], **_: bool) -> Any:
        return self._zygote.fork(self._module, arguments, log=log.fileno(), environment=environment)


def serve(channel: socket.socket) -> None:
    """Fork for each request, tell each end; leave, with everything forked, when the test's end closes."""
    alive: set[int] = set()
    gc.freeze()  # no collection in a fork visits, and so copies, what was imported
    channel.send(b"{}")
    channel.settimeout(_POLL_SECONDS)
    while True:
        try:
            data, rights, _, _ = channel.recvmsg(_MESSAGE_BYTES, socket.CMSG_SPACE(2 * array.array("i").itemsize))
        except TimeoutError:
            _tell_ends(channel, alive)
            continue
        if not data:
            break
        fds = array.array("i")
        fds.frombytes(rights[0][2])
        pid = os.fork()
        if pid == 0:
            channel.close()
            _become(json.loads(data), *fds)
        for fd in fds:
            os.close(fd)
        alive.add(pid)
        channel.send(json.dumps({"pid": pid}).encode())
    for pid in alive:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _tell_ends(channel: socket.socket, alive: set[int]) -> None:
    while alive:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        alive.discard(pid)
        code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        channel.send(json.dumps({"ended": pid, "code": code}).encode())


def _become(request: dict[str, Any], stdin: int, log: int) -> None:
    """Be the asked module's process; never returns."""
    code = 1
    try:
        os.setsid()
        die_with_parent(signal.SIGKILL)
        for source, target in ((stdin, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.close(stdin)
        os.close(log)
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.argv = [request["module"], *request["arguments"]]
        runpy.run_module(request["module"], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        with contextlib.suppress(ValueError):  # closed already
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as end:
        serve(end)
