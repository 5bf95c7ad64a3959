"""Fair access to the engine's adapter slots, which vLLM lacks.

If every slot is busy, vLLM starts another adapter's request only when a slot falls idle. Under steady traffic, this
never happens. Here at most `slots` distinct adapters are in flight. While others wait, an adapter that has held its
slot for a quantum admits no new request, drains, and passes the slot to the adapter that has waited longest.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


class SlotsBusy(Exception):
    """No slot became free in time, or too many requests already wait. Retry later."""


@dataclass(slots=True)
class _Holding:
    since: float
    in_flight: int = 0


@dataclass(slots=True)
class _Queue:
    tickets: list[asyncio.Future[None]] = field(default_factory=list)


class SlotLease:
    """Slots for one event loop. `clock` is monotonic seconds."""

    def __init__(
        self,
        slots: int,
        *,
        quantum_seconds: float = 1.5,
        patience_seconds: float = 30.0,
        max_waiting: int = 256,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._slots = slots
        self._quantum_seconds = quantum_seconds
        self._patience_seconds = patience_seconds
        self._max_waiting = max_waiting
        self._clock = clock
        self._holdings: dict[str, _Holding] = {}
        self._queues: dict[str, _Queue] = {}  # oldest first: dicts keep insertion order

    @asynccontextmanager
    async def hold(self, lora_name: str) -> AsyncIterator[None]:
        """Wait for permission to send one request of this adapter; raises SlotsBusy."""
        if not self._admit(lora_name):
            await self._wait(lora_name)
        try:
            yield
        finally:
            self._release(lora_name)

    def count_waiting(self) -> int:
        return sum(len(queue.tickets) for queue in self._queues.values())

    def count_in_flight(self) -> int:
        return sum(holding.in_flight for holding in self._holdings.values())

    def _admit(self, lora_name: str) -> bool:
        holding = self._holdings.get(lora_name)
        if holding is not None:
            is_turn_over = bool(self._queues) and self._clock() - holding.since >= self._quantum_seconds
            if is_turn_over:
                return False
        elif self._queues or len(self._holdings) >= self._slots:
            return False
        self._take(lora_name)
        return True

    def _take(self, lora_name: str) -> None:
        self._holdings.setdefault(lora_name, _Holding(since=self._clock())).in_flight += 1

    async def _wait(self, lora_name: str) -> None:
        if self.count_waiting() >= self._max_waiting:
            raise SlotsBusy(f"{self._max_waiting} requests wait for an adapter slot")
        ticket = asyncio.get_running_loop().create_future()
        self._queues.setdefault(lora_name, _Queue()).tickets.append(ticket)
        try:
            await asyncio.wait_for(asyncio.shield(ticket), self._patience_seconds)
        except TimeoutError:
            self._leave(lora_name, ticket)
            raise SlotsBusy(f"no adapter slot in {self._patience_seconds:g} s") from None
        except asyncio.CancelledError:
            self._leave(lora_name, ticket)
            raise

    def _leave(self, lora_name: str, ticket: asyncio.Future[None]) -> None:
        """Undo an unused wait, even if the slot was granted at the same moment."""
        if ticket.done():
            self._release(lora_name)
            return
        queue = self._queues[lora_name]
        queue.tickets.remove(ticket)
        if not queue.tickets:
            del self._queues[lora_name]
        self._grant()

    def _release(self, lora_name: str) -> None:
        holding = self._holdings[lora_name]
        holding.in_flight -= 1
        if holding.in_flight == 0:
            del self._holdings[lora_name]
        self._grant()

    def _grant(self) -> None:
        """Give free slots to the oldest queues. A queue that still holds a slot drains first while others wait."""
        is_progressing = True
        while is_progressing:
            is_progressing = False
            for lora_name in list(self._queues):
                holds_slot = lora_name in self._holdings
                is_blocked = len(self._queues) > 1 if holds_slot else len(self._holdings) >= self._slots
                if not is_blocked:
                    is_progressing = True
                    for ticket in self._queues.pop(lora_name).tickets:
                        self._take(lora_name)
                        ticket.set_result(None)
