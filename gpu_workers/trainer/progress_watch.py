"""Detection of a run without progress.

A child that hangs would keep its GPU forever, because another thread keeps its lease. Progress is an event, a unit of
work that the child counted (`pulse`), or bytes that its processes read or wrote. Time counts only if the child could
use it. It does not count while this worker was suspended or the child waited for a core.
"""

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from gpu_workers.common.process_tree import Process, list_session, read_title
from gpu_workers.common.pulse import read_pulse

TIMES_EXPECTED = 10.0  # times the expected duration of a step
_CHECK_SECONDS = 2.0
_MAX_SECONDS_A_CHECK = 10.0  # a longer wait was not the child's: this process itself was suspended
_UNIT_BYTES = 4 * 2**20  # a hung process that still writes its log moves less


class Activity(msgspec.Struct, frozen=True):
    """The work of a child's processes so far. `waited_seconds`: ready to run, without a core."""

    pulse: int = 0
    moved_bytes: int = 0
    waited_seconds: float = 0.0


class ChildActivity:
    """Reads the activity of a child and of the processes it started."""

    def __init__(self, leader: Process, work_dir: Path) -> None:
        self._leader = leader
        self._work_dir = work_dir
        self._moved: dict[Process, int] = {}
        self._waited: dict[Process, float] = {}

    def read(self) -> Activity:
        """Return the activity. Ended processes keep their share, so no sum decreases."""
        for process in list_session(self._leader):
            self._moved[process] = max(_moved_bytes(process), self._moved.get(process, 0))
            self._waited[process] = max(_waited_seconds(process), self._waited.get(process, 0.0))
        return Activity(read_pulse(self._work_dir), sum(self._moved.values()), max(self._waited.values(), default=0.0))

    def describe(self) -> str:
        """Return a line for each process: its name, its state and where in the kernel it waits."""
        return "\n".join(
            f"process {process.pid} ({read_title(process)}): "
            f"state {_read(process, 'stat').rpartition(')')[2].strip()[:1] or 'gone'}, "
            f"waits in {_read(process, 'wchan') or 'nothing'}"
            for process in list_session(self._leader)
        )


class ProgressWatch:
    """Counts the seconds without progress; `is_stalled` once they reach `limit_seconds`.

    `least_seconds` is the limit unless a slow step needs a longer one.
    """

    def __init__(self, *, least_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.work = 0  # units so far, for the control plane's own watch
        self.still_seconds = 0.0
        self.limit_seconds = least_seconds
        self._least_seconds = least_seconds
        self._clock = clock
        self._checked_at = clock()
        self._bytes = 0
        self._child: ChildActivity | None = None
        self._seen = Activity()

    @property
    def is_stalled(self) -> bool:
        return self.still_seconds >= self.limit_seconds

    def expect(self, step_seconds: float) -> None:
        """Set the limit to ten times the expected duration of a step, but not below the initial limit."""
        self.limit_seconds = max(self._least_seconds, TIMES_EXPECTED * step_seconds)

    def follow(self, child: ChildActivity | None) -> None:
        """Watch this child from now on. None means this process's own transfers."""
        self._child = child
        self._seen = child.read() if child else Activity()
        self._checked_at = self._clock()
        self.record_progress()

    def record_progress(self) -> None:
        """Record progress."""
        self.work += 1
        self.still_seconds = 0.0

    def count_bytes(self, number: int) -> None:
        """Record bytes that this process transferred itself; only a whole unit counts as progress."""
        self._bytes += number
        if self._bytes >= _UNIT_BYTES:
            self._bytes = 0
            self.record_progress()

    def check(self, *, most_seconds: float = _MAX_SECONDS_A_CHECK) -> bool:
        """Count the time since the last check, unless the child made progress; return whether it is stalled.

        It is cheap enough for a loop: it checks every two seconds, or ten times within a shorter limit.
        """
        now = self._clock()
        passed = now - self._checked_at
        if passed < min(_CHECK_SECONDS, self.limit_seconds / 10):
            return self.is_stalled
        self._checked_at = now
        waited = self._see_child()
        self.still_seconds += max(min(passed, most_seconds) - waited, 0.0)
        return self.is_stalled

    def _see_child(self) -> float:
        """Record the child's progress; return how long it waited for a core meanwhile."""
        if self._child is None:
            return 0.0
        before, seen = self._seen, self._child.read()
        moved = seen.moved_bytes - before.moved_bytes
        if seen.pulse != before.pulse or moved >= _UNIT_BYTES:
            self.record_progress()
            before = msgspec.structs.replace(before, moved_bytes=seen.moved_bytes)
        self._seen = msgspec.structs.replace(seen, moved_bytes=before.moved_bytes)
        return max(seen.waited_seconds - before.waited_seconds, 0.0)


def _moved_bytes(process: Process) -> int:
    """Return the bytes of read, write and mapped pages (proc_pid_io(5)); 0 if they are hidden."""
    lines = (line.partition(": ") for line in _read(process, "io").splitlines())
    counts = {name: int(value) for name, _, value in lines}
    return sum(counts.get(name, 0) for name in ("rchar", "wchar", "read_bytes"))


def _waited_seconds(process: Process) -> float:
    """Return how long the main thread was ready to run without a core (proc_pid_schedstat(5))."""
    fields = _read(process, "schedstat").split()
    return int(fields[1]) / 1e9 if len(fields) > 1 else 0.0


def _read(process: Process, name: str) -> str:
    try:
        return Path(f"/proc/{process.pid}/{name}").read_text(errors="replace").strip()
    except OSError:
        return ""
