"""Machines take turns: what one of them does at once does not keep the others from running."""

import asyncio
from functools import partial
from typing import Any

from apps.core.http.asgi import Receive
from apps.core.http.fair_shares import Pace
from apps.core.http.turns import CALLER, TakeTurns
from tests.support.waiting import settle

ANY = Pace(prompt=600, per_second=10, wait_seconds=10.0)
TEN = Pace(prompt=10, per_second=1 / 60, wait_seconds=0)


def empty_body() -> Receive:
    """Receive the end of a body, and after it nothing, because the client stays."""
    coming = iter([{"type": "http.request", "body": b"", "more_body": False}])

    async def receive() -> Any:
        return next(coming, None) or await asyncio.Event().wait()

    return receive


async def status_of(turns: TakeTurns, credential: str, address: str = "10.0.0.1") -> int:
    """Call with the credential; return the status of the answer."""
    headers, statuses = [(b"authorization", credential.encode())], list[int]()

    async def send(message: Any) -> None:
        statuses.extend([message["status"]] if "status" in message else [])

    scope = {"type": "http", "method": "POST", "path": "/", "headers": headers, "client": (address, 1)}
    await turns(scope, empty_body(), send)
    return statuses[0]


async def test_a_machine_that_calls_at_full_rate_leaves_places_to_the_others() -> None:
    """Nor does one that makes its credentials up."""

    running: list[str] = []
    go_on = asyncio.Event()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        if (await receive())["type"] == "http.disconnect":
            return
        running.append(dict(scope["headers"])[b"authorization"].decode())
        if "made up" not in running[-1]:
            scope[CALLER] = running[-1]
        await go_on.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    turns = TakeTurns(application, places=4, most_of_one=2, most_waiting=3, wait_seconds=5.0, pace=ANY)
    call = partial(status_of, turns)
    go_on.set()
    await call("loud")
    await call("quiet")
    go_on.clear()
    running.clear()
    loud = [asyncio.ensure_future(call("loud")) for _ in range(8)]
    await settle()
    quiet = asyncio.ensure_future(call("quiet"))
    await settle()
    strangers = [asyncio.ensure_future(call(f"made up {n}")) for n in range(3)]
    await settle()
    assert running == ["loud", "loud", "quiet", "made up 0"]

    strangers[0].cancel()  # one that leaves while it runs gives its place back
    strangers[1].cancel()
    go_on.set()
    statuses = await asyncio.gather(*loud, quiet, *strangers, return_exceptions=True)
    assert sorted(each for each in statuses if isinstance(each, int)) == [200] * 7 + [429] * 3
    assert turns._places._free == 4


async def test_a_machine_that_calls_without_end_is_refused_and_another_is_not() -> None:
    """Nor may an address make up credentials without end."""

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        credential = dict(scope["headers"])[b"authorization"].decode()
        if "made up" not in credential:
            scope[CALLER] = f"machine {credential}"
        status = 200 if CALLER in scope or credential.endswith("beside a signature") else 401
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    turns = TakeTurns(application, places=4, most_of_one=1, most_waiting=3, wait_seconds=5.0, pace=TEN)
    call = partial(status_of, turns)

    assert [await call("loud") for _ in range(13)] == [200] * 11 + [429] * 2  # the first one as a stranger
    assert [await call(f"made up {n}") for n in range(11)] == [401] * 9 + [429] * 2
    assert [await call("quiet", "10.0.0.2"), await call("made up", "10.0.0.3")] == [200, 401]
    assert [await call("", "10.0.0.4") for _ in range(11)] == [200] * 10 + [429]  # a signed object needs none
    signed = [f"made up {n} beside a signature" for n in (0, 1)]
    assert [await call(each, "10.0.0.6") for each in signed * 6] == [200] * 10 + [429] * 2
    assert await call("", "10.0.0.5") == 200


async def test_a_machine_is_one_caller_with_all_its_tokens() -> None:
    asked: list[str] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        if CALLER not in scope:
            asked.append(dict(scope["headers"])[b"authorization"].decode())
            scope[CALLER] = asked[-1].split()[0]
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    turns = TakeTurns(application, places=4, most_of_one=1, most_waiting=3, wait_seconds=5.0, pace=TEN)
    call = partial(status_of, turns, address="10.0.0.7")

    tokens = [f"loud {number}" for number in range(5)]
    assert [await call(token) for token in tokens] == [200] * 5, "each for the first time, as a stranger"
    assert [await call(tokens[number % 5]) for number in range(13)] == [200] * 10 + [429] * 3
    assert [await call("quiet 0") for _ in range(2)] == [200] * 2
    assert asked == [*tokens, "quiet 0"], "whose a token is, is looked up once"
