"""One process a GPU: started here, stopped together, with the rendezvous on this machine's loopback alone."""

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from types import FrameType

import torch
import torch.distributed

from apps.contracts.runs import Struct
from gpu_workers.common.config import rank_environment, read_launch_environment

_POLL_SECONDS = 0.1
_PATIENCE_SECONDS = 20.0


class Rank(Struct, frozen=True, kw_only=True):
    """Which of the processes this is."""

    index: int = 0
    count: int = 1
    is_launched: bool = False  # by `run_ranks`: a process group is to be joined, if only its own

    @property
    def is_first(self) -> bool:
        return self.index == 0


def read_rank() -> Rank | None:
    """Return what `run_ranks` gave this process, None in the one it was started by."""
    found = read_launch_environment()
    return None if found is None else Rank(index=found[0], count=found[1], is_launched=True)


def run_ranks(argv: list[str], *, count: int, secret_line: bytes) -> int:
    """Run this module `count` times and return the first one's exit code; when one dies, all do."""
    port = _free_port()
    command = [sys.executable, "-m", "gpu_workers.train", *argv[1:]]
    children = [
        subprocess.Popen(command, env=rank_environment(index=index, count=count, port=port), stdin=subprocess.PIPE)
        for index in range(count)
    ]
    signal.signal(signal.SIGTERM, _pass_on(children))
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


def _pass_on(children: list[subprocess.Popen[bytes]]):  # type: ignore[no-untyped-def]
    def handle(number: int, frame: FrameType | None) -> None:
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    return handle


@contextlib.contextmanager
def first_rank_first(rank: Rank) -> Iterator[None]:
    """Let the first process do the body before the others, which then find its files."""
    if rank.is_launched and not torch.distributed.is_initialized():
        # Shards that rest in the host's memory are gathered there, which NCCL cannot.
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        if torch.cuda.is_available():
            torch.cuda.set_device(rank.index)
    if rank.count > 1 and not rank.is_first:
        torch.distributed.barrier()
    yield
    if rank.count > 1 and rank.is_first:
        torch.distributed.barrier()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
