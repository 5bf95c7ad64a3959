"""Functions that find and end whole process trees on Linux, including those whose parent was killed."""

import ctypes
import os
import signal
import time
from collections.abc import Iterable

import msgspec

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


class Process(msgspec.Struct, frozen=True):
    """One process. The start time distinguishes it from a later process with the same number."""

    pid: int
    started_ticks: int  # since boot, /proc/<pid>/stat field 22


class _Stat(msgspec.Struct, frozen=True):
    process: Process
    state: str
    parent: int


def become_subreaper() -> None:
    """Become the parent of all orphans among this process's descendants, so that none moves to init."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(signal_number: int) -> None:
    """Make the kernel send this signal when the parent dies. Call it in a child between fork and exec."""
    _prctl(_PR_SET_PDEATHSIG, signal_number)


def identify(pid: int) -> Process | None:
    """Return the process with this number, or None if it does not exist or is a zombie."""
    stat = _read_stat(pid)
    return None if stat is None or stat.state in "ZX" else stat.process


def is_alive(process: Process) -> bool:
    return identify(process.pid) == process


def read_title(process: Process) -> str:
    """Return the process's short name (15 characters; a zombie keeps it), or "" if the process is gone."""
    return _read_text(process.pid, "comm").strip()


def read_command(process: Process) -> str:
    """Return the process's command line, or "" if it is gone or a zombie."""
    return _read_text(process.pid, "cmdline").replace("\0", " ")


def list_descendants(pid: int, *, with_zombies: bool = False) -> list[Process]:
    """Return every living descendant of `pid`, nearest first."""
    children: dict[int, list[_Stat]] = {}
    for stat in filter(None, map(_read_stat, _list_pids())):
        children.setdefault(stat.parent, []).append(stat)
    found, queue = [], [pid]
    while queue:
        for stat in children.get(queue.pop(0), ()):
            queue.append(stat.process.pid)
            if with_zombies or stat.state not in "ZX":
                found.append(stat.process)
    return found


def list_session(leader: Process) -> list[Process]:
    """Return the living members of the session that `leader` started, even after its death.

    The kernel does not reuse a session's number while the session has members. A member older than the leader therefore
    means that the number was reused after all members had gone.
    """
    members = list(filter(None, (identify(pid) for pid in _list_pids() if _session_of(pid) == leader.pid)))
    is_same = all(m.started_ticks >= leader.started_ticks for m in members)
    holder = identify(leader.pid)
    return members if is_same and holder in (None, leader) else []


def kill_all(processes: Iterable[Process]) -> None:
    signal_all(processes, signal.SIGKILL)


def signal_all(processes: Iterable[Process], number: signal.Signals) -> None:
    """Send the signal to each process whose number still belongs to the same process."""
    for process in processes:
        if is_alive(process):
            try:
                os.kill(process.pid, number)
            except ProcessLookupError:
                continue


def kill_descendants(pid: int, *, timeout_seconds: float = 8.0) -> list[Process]:
    """Kill the descendants of this process until none is left; return those that outlived the timeout."""
    deadline = time.monotonic() + timeout_seconds
    while remaining := list_descendants(pid):
        if time.monotonic() > deadline:
            return remaining
        kill_all(remaining)
        reap_children()
        time.sleep(0.02)
    return []


def reap_children() -> dict[int, int]:
    """Collect dead children without waiting; return exit codes by process number, negative for a signal."""
    codes: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return codes
        if pid == 0:
            return codes
        codes[pid] = os.waitstatus_to_exitcode(status)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _list_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _read_text(pid: int, name: str) -> str:
    try:
        with open(f"/proc/{pid}/{name}", "rb", buffering=0) as file:
            return file.read().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # the last: hidden, as others' processes may be
        return ""


def _read_stat(pid: int) -> _Stat | None:
    text = _read_text(pid, "stat")
    if not text:
        return None
    fields = text.rsplit(")", 1)[1].split()  # the name before ")" may contain spaces
    return _Stat(
        process=Process(pid=pid, started_ticks=int(fields[19])),
        state=fields[0],
        parent=int(fields[1]),
    )
