"""The confinement of every child of a trainer before it runs: no network, no core dumps, and an end with its parent.

Training needs local files only, so a child runs in a separate network namespace that contains only its own loopback
interface. If the kernel does not allow this user such a namespace (in many containers), the child keeps the network,
and its log says so.

As a program, it confines itself and becomes another: see `confined`.
"""

import ctypes
import fcntl
import json
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress

from gpu_workers.common.process_tree import die_with_parent

_LIBC = ctypes.CDLL(None, use_errno=True)  # before any fork: a child must not wait for a lock of the loader
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000  # sched.h
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 0x1  # linux/sockios.h, net/if.h
_KEPT = b"This child keeps the network: the kernel allows it no network namespace of its own (%s).\n"
_GONE = b"This child has no network.\n"


def confined(command: Sequence[str], *, has_network: bool, limits: Sequence[tuple[int, int]] = ()) -> list[str]:
    """Return a command with which a child of this process confines itself and becomes `command`, with the same number.

    `limits` are pairs for resource.setrlimit. Run it in the repository. A `preexec_fn` would run Python between fork
    and exec, where a lock that another thread held at the fork (OpenSSL's, for example) is never released.
    """
    given = json.dumps([os.getpid(), has_network, limits])
    return [sys.executable, "-m", __name__, given, *command]


def confine(parent: int, *, has_network: bool) -> None:
    """Confine this process, which `parent` has just forked; without a network, say so on standard error."""
    if not has_network:
        leave_network()  # first: a change of credentials resets the death signal
    die_with_parent(signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump would contain a customer's rows, and fill the disk
    if os.getppid() != parent:  # the parent died before the death signal was set
        os._exit(1)


def leave_network() -> None:
    """Disconnect this process, which must have a single thread; log the result to its standard error."""
    user, group = os.getuid(), os.getgid()
    if _LIBC.unshare(_CLONE_NEWUSER | _CLONE_NEWNET):
        os.write(2, _KEPT % os.strerror(ctypes.get_errno()).encode())
        return
    # Map to the same user as before, or libraries cannot look up their user. Processes of one job communicate by
    # loopback.
    with suppress(OSError):
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{user} {user} 1")
        _write("/proc/self/gid_map", f"{group} {group} 1")
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        fcntl.ioctl(probe, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
    os.write(2, _GONE)


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    parent, has_network, limits = json.loads(sys.argv[1])
    confine(parent, has_network=has_network)
    for kind, limit in limits:
        resource.setrlimit(kind, (limit, limit))
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606 - a program of the worker's own
