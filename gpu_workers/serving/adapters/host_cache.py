"""A model of the adapters that the engine keeps in host memory, as far as they are known from outside.

vLLM keeps the last `max_cpu_loras` adapters that it used, even unloaded ones, because unloading only forgets a name. It
reads an evicted adapter from disk again, inside a step that serves all requests. So a load must never evict an adapter
that is still served. Such an adapter first gets a small request, which makes it the newest.
"""

from collections import OrderedDict
from collections.abc import Collection


class HostCache:
    """Mirrors the engine's least-recently-used list. A name belongs to loaded files and is never reused for others."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._used_at: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._used_at)

    def touch(self, name: str, *, used_at: float) -> None:
        """Record that the engine used the adapter at this moment; this may evict the oldest one."""
        self._used_at[name] = max(used_at, self._used_at.get(name, used_at))
        while len(self._used_at) > self._size:
            del self._used_at[min(self._used_at, key=self._used_at.__getitem__)]

    def find_victims(self, served: Collection[str]) -> list[str]:
        """Return the served adapters that are older than every evictable one, oldest first. They must be touched now.

        Empty while there is room. If all adapters are served, nothing may be evicted, and all are returned.
        """
        if len(self._used_at) < self._size:
            return []
        ordered = sorted(self._used_at, key=self._used_at.__getitem__)
        first_to_go = next((place for place, name in enumerate(ordered) if name not in served), len(ordered))
        return ordered[:first_to_go]
