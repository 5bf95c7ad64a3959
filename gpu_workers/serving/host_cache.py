"""What the engine keeps in host memory, as far as it can be known from outside.

vLLM keeps the last `max_cpu_loras` adapters it was asked for, unloaded ones too: unloading only forgets a name. An
adapter pushed out of there is read from disk again inside the step of everybody's requests. So what is still served
must never be what the next load pushes out: it is asked for something small first, which makes it the newest.
"""

from collections import OrderedDict
from collections.abc import Collection


class HostCache:
    """Mirrors the engine's least-recently-used list; names are of loaded files, never reused for others."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._used_at: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._used_at)

    def touch(self, name: str, *, used_at: float) -> None:
        """Note that the engine had to do with the adapter at this moment; it may push out the oldest one."""
        self._used_at[name] = max(used_at, self._used_at.get(name, used_at))
        while len(self._used_at) > self._size:
            del self._used_at[self._oldest()]

    def find_victims(self, served: Collection[str]) -> list[str]:
        """Return the served adapters that are older than every one that may go, oldest first: those to ask now.

        Empty while there is room. When everything is served, nothing may go, and all are returned.
        """
        if len(self._used_at) < self._size:
            return []
        ordered = sorted(self._used_at, key=self._used_at.__getitem__)
        first_to_go = next((place for place, name in enumerate(ordered) if name not in served), len(ordered))
        return ordered[:first_to_go]

    def _oldest(self) -> str:
        return min(self._used_at, key=self._used_at.__getitem__)
