"""Lookups of keys that this process has not seen valid. Anyone can invent such keys, and each costs a database query.

They use one database thread, in which addresses take turns. The other threads stay free for real keys, routes and
slices.
"""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from apps.core.errors import RateLimited, Unavailable
from apps.core.http.fair_shares import Buckets, Places, TooManyWaiting

WRONG_PER_MINUTE = 60  # of one address
WRONG_PER_MINUTE_UNNAMED = 600  # of all clients whose address the front did not name
MAX_WAITING_OF_ONE, MAX_WAITING, WAIT_SECONDS = 16, 256, 5.0

Found = TypeVar("Found")


class Strangers:
    """Use inside one event loop."""

    def __init__(self) -> None:
        self._places = Places(1, most_waiting=MAX_WAITING_OF_ONE, wait_seconds=WAIT_SECONDS)
        self._wrong = Buckets()
        self._waiting = 0

    async def look_up(
        self, address: str, find: Callable[[], Awaitable[Found]], is_right: Callable[[Found], bool]
    ) -> Found:
        """Return the result of `find`, called when it is the address's turn. Only wrong keys count against the address.

        Raises RateLimited, Unavailable.
        """
        per_minute = WRONG_PER_MINUTE if address else WRONG_PER_MINUTE_UNNAMED
        if seconds := self._wrong.wait_seconds(address, per_minute):
            wait = int(seconds) + 1
            raise RateLimited(
                f"Too many wrong API keys came from your address. Check the key and try again in {wait} s.",
                retry_after_seconds=wait,
            )
        await self._wait_turn(address)
        try:
            self._wrong.take(address, per_minute)
            found = await find()
        finally:
            self._places.give_back(address)
        if is_right(found):
            self._wrong.take(address, per_minute, -1)
        return found

    async def _wait_turn(self, address: str) -> None:
        busy = Unavailable("Many unknown API keys are being checked at the moment. Try again shortly.")
        if self._waiting >= MAX_WAITING:
            raise busy
        self._waiting += 1
        try:
            await self._places.take(address, most=1)
        except TooManyWaiting:
            raise busy from None
        finally:
            self._waiting -= 1
