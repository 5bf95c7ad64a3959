"""The number of CPU threads of a training child: one for each free core, less one core for other work.

torch's threads wait for each other after every operator. If one of them shares its core, all of them wait: with one of
two cores busy, two threads computed a quarter of what one thread did alone.
"""

import math
import os
import time
from pathlib import Path

_MEASURED_SECONDS = 0.5
_CGROUP = Path("/sys/fs/cgroup")
# The microseconds of each period in which a control group may run, and the period: today's file, and the older two.
_LIMITS = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))
_STAT = Path("/proc/stat")


def choose_threads(*, limit: int = 0) -> int:
    """Return a number of threads from 1 to `limit` (0: no limit), after measuring the load for half a second.

    The load is not measured if the result is 1 in any case.
    """
    cores = count_cores()
    most = min(cores - 1, limit or cores)
    if most <= 1:
        return 1
    return threads_for(cores=cores, busy_cores=measure_busy_cores(), limit=limit)


def threads_for(*, cores: int, busy_cores: float, limit: int = 0) -> int:
    """Return the number of threads for this many cores, of which `busy_cores` (a fraction) do other work."""
    free = cores - max(1, math.ceil(busy_cores - 0.25))  # the idle platform uses a quarter of a core
    return max(1, min(free, limit or free))


def count_cores() -> int:
    """Return the number of cores this process may use, by its affinity and its control group."""
    cores = len(os.sched_getaffinity(0))
    for names in _LIMITS:
        try:
            quota, period = (int(word) for name in names for word in (_CGROUP / name).read_text().split())
        except (OSError, ValueError):  # no such file, or "max"
            continue
        if quota > 0:
            return max(1, min(cores, quota // period))
    return cores


def measure_busy_cores() -> float:
    """Return how many of the cores this process may use were busy during half a second.

    The kernel counts the whole machine. In a container with a part of it, our cores are assumed to be as busy as all.
    """
    load = Load()
    time.sleep(_MEASURED_SECONDS)
    return count_cores() * load.busy_share()


class Load:
    """The load of the machine's cores between two readings."""

    def __init__(self) -> None:
        self._busy, self._total = _read_ticks()

    def busy_share(self) -> float:
        """Return the share of all cores' time in which they were busy since the last reading."""
        (busy, total), before = _read_ticks(), (self._busy, self._total)
        self._busy, self._total = busy, total
        return (busy - before[0]) / max(total - before[1], 1)


def _read_ticks() -> tuple[int, int]:
    """Return the busy ticks and all ticks of all cores since the machine started (proc_stat(5))."""
    user, nice, system, idle, waiting, *rest = map(int, _STAT.read_text().split("\n", 1)[0].split()[1:9])
    busy = user + nice + system + sum(rest)
    return busy, busy + idle + waiting
