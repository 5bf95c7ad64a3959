"""Fair shares within one process: limits per owner and minute, and turns between owners.

Each process keeps its own counts, so each applies the limits separately. An owner is any string: a key, a person, an
organization, an address. Use every object inside one event loop.
"""

import asyncio
import random
import time
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass

_FORGET_SECONDS = 120.0


class TooManyWaiting(Exception):
    """The owner has the maximum number of waiters, or no place became free in time."""


@dataclass(slots=True)
class _OwnerBucket:
    left: float
    since: float  # time.monotonic()


class Buckets:
    """A token bucket for each owner. A full bucket holds one minute's worth."""

    def __init__(self) -> None:
        self._buckets: dict[str, _OwnerBucket] = {}
        self._swept_at = time.monotonic()

    def wait_seconds(self, owner: str, per_minute: float, amount: float = 1.0) -> float:
        """Return the seconds until the owner can take `amount`; 0 if now."""
        missing = amount - self._at(owner, per_minute).left
        return max(0.0, missing * 60 / per_minute)

    def take(self, owner: str, per_minute: float, amount: float = 1.0) -> None:
        """Take `amount`.

        If the bucket has too little, the rest becomes a debt, and the owner waits until it is paid back.
        """
        self._at(owner, per_minute).left -= amount

    def share_left(self, owner: str, per_minute: float) -> float:
        """Return the fill level of the owner's bucket: 1 if full, below 0 in debt."""
        return self._at(owner, per_minute).left / per_minute

    def _at(self, owner: str, per_minute: float) -> _OwnerBucket:
        """Return the owner's bucket, refilled up to now."""
        now = time.monotonic()
        bucket = self._buckets.get(owner)
        if bucket is None:
            if now - self._swept_at > _FORGET_SECONDS:
                self._swept_at = now
                self._buckets = {k: v for k, v in self._buckets.items() if now - v.since < _FORGET_SECONDS}
            bucket = self._buckets[owner] = _OwnerBucket(per_minute, now)
        bucket.left = min(per_minute, bucket.left + (now - bucket.since) * per_minute / 60)
        bucket.since = now
        return bucket


class OpenCounts:
    """Counts the open items of each owner."""

    def __init__(self) -> None:
        self._open: dict[str, int] = defaultdict(int)

    def __getitem__(self, owner: str) -> int:
        return self._open.get(owner, 0)

    def add(self, owner: str) -> None:
        self._open[owner] += 1

    def remove(self, owner: str) -> None:
        self._open[owner] -= 1
        if not self._open[owner]:
            del self._open[owner]


class LateRefusals:
    """Delays the refusals of an owner that is refused often.

    A refusal costs processor time too. An owner that retries at once is slowed down to less than one request a second
    on each connection.
    """

    PROMPT_PER_MINUTE, HOLD_SECONDS, MAX_HELD = 60, 1.0, 256  # the last two for each owner

    def __init__(self) -> None:
        self._prompt, self._held = Buckets(), OpenCounts()

    async def wait(self, owner: str) -> None:
        """Return at once, or later if the owner was refused often within the last minute."""
        if not self._prompt.wait_seconds(owner, self.PROMPT_PER_MINUTE):
            self._prompt.take(owner, self.PROMPT_PER_MINUTE)
        elif self._held[owner] < self.MAX_HELD:
            self._held.add(owner)
            try:
                # Not all at the same moment: together they would come back as a burst.
                await asyncio.sleep(self.HOLD_SECONDS * random.uniform(1, 1.5))  # noqa: S311 - no secret
            finally:
                self._held.remove(owner)


class Pace:
    """Spreads the bursts of each owner: `prompt` units begin at once, and then `per_second`.

    The unit is that of `wait_turn`: requests or bytes, for example.
    """

    def __init__(self, *, prompt: int, per_second: float, wait_seconds: float) -> None:
        self._lead_seconds, self._interval = prompt / per_second, 1 / per_second
        self._wait_seconds = wait_seconds
        self._next_at: OrderedDict[str, float] = OrderedDict()  # time.monotonic(); the most recent owner is last

    async def wait_turn(self, owner: str, amount: int = 1) -> None:
        """Wait until the owner may begin `amount` more.

        Raises TooManyWaiting if that takes longer than `wait_seconds`.
        """
        now = time.monotonic()
        at = max(self._next_at.get(owner, 0.0), now - self._lead_seconds) + amount * self._interval
        if at - now > self._wait_seconds:
            raise TooManyWaiting
        self._next_at[owner] = at
        self._next_at.move_to_end(owner)
        while next(iter(self._next_at.values())) < now - self._lead_seconds:  # as good as new
            self._next_at.popitem(last=False)
        if at > now:
            await asyncio.sleep(at - now)


class Places:
    """A fixed number of places. Owners, not requests, take turns for a free place."""

    def __init__(self, total: int, *, most_waiting: int, wait_seconds: float) -> None:
        """`most_waiting` applies to each owner."""
        self._free = total
        self._most_waiting, self._wait_seconds = most_waiting, wait_seconds
        self._running = OpenCounts()
        self._queues: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}  # the owner who is next comes first

    async def take(self, owner: str, *, most: int) -> None:
        """Wait for a place; the owner holds at most `most`. Raises TooManyWaiting."""
        queue = self._queues.get(owner)
        if queue is None and self._free and self._running[owner] < most:
            self._occupy(owner)
            return
        if queue is None:
            queue = self._queues[owner] = deque()
        if len(queue) >= self._most_waiting:
            raise TooManyWaiting
        turn = asyncio.get_running_loop().create_future()
        queue.append((most, turn))
        try:
            async with asyncio.timeout(self._wait_seconds):
                await turn
        except BaseException as error:
            self._leave(owner, turn)
            if isinstance(error, TimeoutError):
                raise TooManyWaiting from None
            raise

    def give_back(self, owner: str) -> None:
        self._running.remove(owner)
        self._free += 1
        # Give free places to the owners in turn. An owner that had a turn goes to the end.
        while self._free and (waiting := self._next_owner()) is not None:
            queue = self._queues.pop(waiting)
            _, turn = queue.popleft()
            if queue:
                self._queues[waiting] = queue
            if not turn.done():
                self._occupy(waiting)
                turn.set_result(None)

    def is_taken_by(self, owner: str) -> bool:
        """Return whether the owner holds a place or waits for one."""
        return self._running[owner] > 0 or owner in self._queues

    def _occupy(self, owner: str) -> None:
        self._free -= 1
        self._running.add(owner)

    def _leave(self, owner: str, turn: "asyncio.Future[None]") -> None:
        """Remove a waiter that has given up, even if its turn came at the same moment."""
        if turn.done() and not turn.cancelled():
            self.give_back(owner)
            return
        if queue := self._queues.get(owner):
            self._queues[owner] = deque(waiting for waiting in queue if waiting[1] is not turn)
            if not self._queues[owner]:
                del self._queues[owner]

    def _next_owner(self) -> str | None:
        ready = (owner for owner, queue in self._queues.items() if self._running[owner] < queue[0][0])
        return next(ready, None)
