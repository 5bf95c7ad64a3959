"""One training process per GPU. They are started here and stopped together.

Processes of one machine meet on its loopback. Those of a group meet at its first machine, at the address that the lease
named, and each machine starts its own.

The process that starts the others imports no torch, whose import would delay them all by seconds.
"""

import contextlib
import fcntl
import signal
import socket
import struct
import subprocess
import sys
import time
from types import FrameType
from typing import TypedDict

from apps.contracts.addresses.machines import NodeGroup
from apps.contracts.runs import Struct
from gpu_workers.common.config import rank_environment, read_launch_environment

_POLL_SECONDS = 0.1
_PATIENCE_SECONDS = 20.0
_SIOCGIFADDR = 0x8915  # linux/sockios.h


class Rank(Struct, frozen=True, kw_only=True):
    """The position of this process among all."""

    index: int = 0
    count: int = 1
    local_index: int = 0  # on its machine
    is_launched: bool = False  # by `run_ranks`: it must join a process group, even one of a single process

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_first_here(self) -> bool:
        """Return whether it is the first process of its machine.

        That one fetches files and writes the machine's outcome.
        """
        return self.local_index == 0


def read_rank() -> Rank | None:
    """Return the rank that `run_ranks` gave this process; None in the parent process."""
    found = read_launch_environment()
    return None if found is None else Rank(index=found[0], local_index=found[1], count=found[2], is_launched=True)


def run_ranks(argv: list[str], *, count: int, secret_line: bytes, group: NodeGroup | None = None) -> int:
    """Run this module `count` times and return 0, or the exit code of the first that fails.

    If one fails, end all on this machine.
    """
    place = place_in(group, count) if group else _place_alone(count)
    command = [sys.executable, "-m", "gpu_workers.trainer.child", "gpu_workers.train", *argv[1:]]
    children = [
        subprocess.Popen(command, env=rank_environment(index=index, **place), stdin=subprocess.PIPE)
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


class Place(TypedDict, total=False):
    """The arguments of `rank_environment` that all processes of a machine share; only the index is missing."""

    count: int
    port: int
    host: str
    before: int
    local_count: int
    interface: str


def _place_alone(count: int) -> Place:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return {"count": count, "port": int(listener.getsockname()[1])}


def place_in(group: NodeGroup, count: int) -> Place:
    """Return the place of the processes of one machine of a group, which has `count` of them."""
    return {
        "count": count * group.node_count,
        "port": group.master_port,
        "host": group.master_address,
        "before": count * group.rank,
        "local_count": count,
        "interface": interface_of(group.address),
    }


def interface_of(address: str) -> str:
    """Return the network interface with this IPv4 address, or with the address of this name; "" if there is none.

    Without it, gloo uses the interface that the machine's own name resolves to, which is often the loopback.
    """
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        wanted = socket.inet_aton(socket.gethostbyname(address))
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if answer[20:24] == wanted:
                    return name
    return ""


def _wait(children: list[subprocess.Popen[bytes]]) -> int:
    """Return 0, or the code of the first one that failed. The others fail because of it, or wait for it in vain."""
    first, failed_at = 0, 0.0
    while True:
        codes = [child.poll() for child in children]
        if not first and any(codes):
            first, failed_at = min(code for code in codes if code), time.monotonic()  # a signal before a failure
        if None not in codes:
            return first
        if first and time.monotonic() - failed_at > _PATIENCE_SECONDS:
            for child in children:
                child.kill()
        time.sleep(_POLL_SECONDS)
