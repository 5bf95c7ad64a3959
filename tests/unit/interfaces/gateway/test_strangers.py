"""Keys that were never valid: looked up one at a time, in turns and in limits, so that real keys do not wait."""

import asyncio
from collections import Counter
from typing import Any

import pytest

from apps.accounts.login.api_keys import LIVE_PREFIX, new_secret
from apps.accounts.login.bearer_keys import InvalidApiKey
from apps.accounts.queries import KeyIdentity
from apps.core.errors import DomainError, PermissionDenied, RateLimited, Unavailable
from apps.interfaces.gateway.admission.keys import Keys
from apps.interfaces.gateway.admission.strangers import MAX_WAITING_OF_ONE, WRONG_PER_MINUTE
from apps.interfaces.gateway.http.client import address_of

RIGHT = [new_secret(LIVE_PREFIX) for _ in range(3)]


class Database:
    """Knows the right keys, and counts the lookups that run at once."""

    def __init__(self) -> None:
        self.running = self.most_running = self.calls = 0

    async def call(self, find: object, secret: str) -> tuple[KeyIdentity | None, None]:
        self.running, self.calls = self.running + 1, self.calls + 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        if secret not in RIGHT:
            return None, None
        named: dict[str, Any] = dict.fromkeys(KeyIdentity.__annotations__) | {"organization_id": "org_1"}
        return KeyIdentity(**named), None


async def outcome(keys: Keys, secret: str, address: str = "192.0.2.1") -> type[DomainError] | None:
    try:
        await keys.identify(f"Bearer {secret}", lambda: address)
    except DomainError as error:
        return type(error)
    return None


async def test_wrong_keys_are_looked_up_one_at_a_time_and_few_of_one_address():
    database = Database()
    keys = Keys(database)  # type: ignore[arg-type]
    found: Counter[Any] = Counter()
    for _ in range(20):
        asked = [outcome(keys, new_secret(LIVE_PREFIX)) for _ in range(MAX_WAITING_OF_ONE)]
        found.update(await asyncio.gather(*asked))

    assert database.most_running == 1
    assert WRONG_PER_MINUTE <= database.calls < WRONG_PER_MINUTE + 2 * MAX_WAITING_OF_ONE
    assert set(found) == {InvalidApiKey, RateLimited}


async def test_an_address_with_many_wrong_keys_delays_no_other_and_no_key_that_was_valid():
    keys = Keys(Database())  # type: ignore[arg-type]
    await outcome(keys, RIGHT[0])
    flood = [asyncio.create_task(outcome(keys, new_secret(LIVE_PREFIX))) for _ in range(500)]
    await asyncio.sleep(0)
    keys.forget_all()
    wanted = [await outcome(keys, RIGHT[0]), await outcome(keys, RIGHT[1], "192.0.2.2")]
    ended = Counter(await asyncio.gather(*flood))

    assert ended[Unavailable] >= 500 - WRONG_PER_MINUTE - 2 * MAX_WAITING_OF_ONE
    # The right keys of this database lack the scope; they were looked up.
    assert wanted == [PermissionDenied, PermissionDenied]


async def test_a_right_key_does_not_count_against_its_address():
    keys = Keys(Database())  # type: ignore[arg-type]
    found = set()
    for _ in range(2 * WRONG_PER_MINUTE):
        keys._valid.clear()
        keys.forget_all()
        found.add(await outcome(keys, RIGHT[0]))

    assert found == {PermissionDenied}


@pytest.mark.parametrize(
    ("peer", "forwarded", "address"),
    [
        (None, b"192.0.2.7", "192.0.2.7"),
        (None, b"10.1.1.1, 192.0.2.7", "192.0.2.7"),
        (None, b"2001:db8:1:2:3::4", "2001:db8:1:2::"),
        (None, b"::ffff:192.0.2.7", "192.0.2.7"),
        (None, b"", ""),
        (None, b"x" * 1000, ""),
        (("172.18.0.2", 1), b"192.0.2.7", "192.0.2.7"),
        (("192.0.2.9", 1), b"192.0.2.7", "192.0.2.9"),
    ],
)
def test_only_a_front_may_name_the_address_of_a_client(settings, peer, forwarded, address):
    settings.TRUSTED_PROXIES = "172.18.0.0/16"

    assert address_of(peer, forwarded) == address
