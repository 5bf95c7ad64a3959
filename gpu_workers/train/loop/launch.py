"""One training process per GPU: started here, stopped together, with the rendezvous only on this machine's loopback.

The process that starts the others imports no torch, whose import would delay them all by seconds.
"""

import contextlib
import signal
import socket
import subprocess
import sys
import time
from types import FrameType

from apps.contracts.runs import Struct
from gpu_workers.common.config import rank_environment, read_launch_environment

_POLL_SECONDS = 0.1
_PATIENCE_SECONDS = 20.0


class Rank(Struct, frozen=True, kw_only=True):
    """The position of this process among all."""

    index: int = 0
    count: int = 1
    is_launched: bool = False  # by `run_ranks`: it must join a process group, even one of a single process

    @property
    def is_first(self) -> bool:
        return self.index == 0


def read_rank() -> Rank | None:
    """Return the rank that `run_ranks` gave this process, None in the parent process."""
    found = read_launch_environment()
    return None if found is None else Rank(index=found[0], count=found[1], is_launched=True)


def run_ranks(argv: list[str], *, count: int, secret_line: bytes) -> int:
    """Run this module `count` times and return the first one's exit code; if one dies, end all."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])
    command = [sys.executable, "-m", "gpu_workers.trainer.child", "gpu_workers.train", *argv[1:]]
    children = [
        subprocess.Popen(command, env=rank_environment(index=index, count=count, port=port), stdin=subprocess.PIPE)
        for index in range(count)
    ]

    def pass_on(number: int, _frame: FrameType | None) -> None:
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    signal.signal(signal.SIGTERM, pass_on)
    for child in children:
        with contextlib.suppress(BrokenPipeError), child.stdin as stdin:  # type: ignore[union-attr]
            stdin.write(secret_line)
    return _wait(children)


def _wait(children: list[subprocess.Popen[bytes]]) -> int:
    failed_at: float | None = None
    while any(child.poll() is None for child in children):
        if failed_at is None and any(child.poll() for child in children):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > _PATIENCE_SECONDS:
            for child in children:
                child.kill()
        time.sleep(_POLL_SECONDS)
    codes = [child.returncode for child in children]
    return codes[0] or next((code for code in codes if code), 0)
