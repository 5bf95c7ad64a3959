"""Which program uses how much of the processors."""

import os
import time
from collections import Counter
from pathlib import Path

from gpu_workers.common.process_tree import list_descendants

_LOOK_SECONDS = 0.5
_TICKS = os.sysconf("SC_CLK_TCK")
# Parts of command lines. Processes that fit none count for their parent.
_PROGRAMS = {
    "apps.config.asgi_busy": "busy",
    "apps.config.asgi:": "web",
    "apps.config.asgi_internal:": "worker API",
    "gateway.app:": "gateway",
    "--queues control": "short tasks",
    "--queues data": "files",
    "--queues mail": "mail",
    "scripts.embedded postgres": "postgres",
    "scripts.embedded redis": "redis",
}


class Processors:
    """Processor seconds so far, by program, of everything that descends from this process."""

    def __init__(self) -> None:
        self._names = {os.getpid(): "bench"}

    def name(self, pid: int, name: str) -> None:
        """Call a child, and what it starts, by this name."""
        self._names[pid] = name

    def read(self) -> Counter[str]:
        used = Counter[str]()
        for pid in (os.getpid(), *(process.pid for process in list_descendants(os.getpid()))):
            try:
                stat = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
                name = self._name_of(pid, int(stat[1]))
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended; from now on its parent counts it
            used[name] += sum(int(ticks) for ticks in stat[11:15]) / _TICKS  # with children that have ended
        return used

    def look(self) -> tuple[float, float]:
        """Look for half a second; return the cores that these programs use, and those that all others use."""
        began, ours, all_programs = time.monotonic(), self.read().total(), busy_seconds()
        time.sleep(_LOOK_SECONDS)
        seconds, ours = time.monotonic() - began, self.read().total() - ours
        return ours / seconds, (busy_seconds() - all_programs - ours) / seconds

    def _name_of(self, pid: int, parent: int) -> str:
        if pid not in self._names:
            command = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
            fitting = (name for part, name in _PROGRAMS.items() if part in command)
            self._names[pid] = next(fitting, self._names.get(parent, "other"))
        return self._names[pid]


def busy_seconds() -> float:
    """Return the seconds of all processors that were not idle, since the start of the machine."""
    user, nice, system, _idle, _waiting, *rest = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system + sum(rest[:3])) / _TICKS
