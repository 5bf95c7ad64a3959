"""Bytes that requests in progress hold in memory, limited for each organization and for all together."""

from collections import defaultdict
from types import TracebackType
from typing import Self

from apps.core.errors import RateLimited, Unavailable
from apps.core.http.asgi import MIB

_MOST_OF_FREE = 0.5  # an organization leaves as much free as it holds, so that there is always room for another


class HeldBytes:
    """Counts bytes by organization. Use inside one event loop.

    `what` names them in the errors, and `advice` is a sentence about how an organization holds less.
    """

    def __init__(self, what: str, *, most_of_one: int, most_of_all: int, advice: str) -> None:
        self._what, self._advice = what, advice
        self._most_of_one, self._most_of_all = most_of_one, most_of_all
        self._held: defaultdict[str, int] = defaultdict(int)  # by organization
        self._total = 0

    def holding(self, organization_id: str) -> "Holding":
        return Holding(self, organization_id)

    def add(self, organization_id: str, count: int) -> None:
        """Count the bytes; a negative count returns them.

        If this raises RateLimited or Unavailable, nothing was added.
        """
        held = self._held.get(organization_id, 0)
        wanted = held + count
        if count > 0 and wanted > self._most_of_one:
            raise RateLimited(
                f"Your organization's requests in progress hold {self._most_of_one // MIB} MiB of {self._what}, the "
                f"most allowed. {self._advice}"
            )
        if count > 0 and wanted > _MOST_OF_FREE * (self._most_of_all - self._total + held):
            raise Unavailable("Too many large requests are in progress at the moment. Try again shortly.")
        self._total += count
        self._held[organization_id] += count
        if not self._held[organization_id]:
            del self._held[organization_id]


class Holding:
    """The bytes of one request. They are returned at the end of the block."""

    __slots__ = ("_held", "_organization_id", "_size")

    def __init__(self, held: HeldBytes, organization_id: str) -> None:
        self._held, self._organization_id, self._size = held, organization_id, 0

    def __enter__(self) -> Self:
        return self

    def count(self, size: int) -> None:
        """Count this size in bytes instead of the previous one. Raises RateLimited, Unavailable."""
        self._held.add(self._organization_id, size - self._size)
        self._size = size

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._size:
            self._held.add(self._organization_id, -self._size)
