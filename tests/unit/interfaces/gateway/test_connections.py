"""Requests are read and answered however they are split; what is written together leaves the gateway together."""

import asyncio

import pytest
from uvicorn import Config
from uvicorn.server import ServerState

from apps.core.http.connections import MAX_AHEAD
from apps.interfaces.gateway.http.connections import GatewayConnection
from tests.support.gateway.connections import Clock, Transport, answer, answered, connected, echo, post, settle


def events_of(request: bytes) -> list[bytes | str]:
    """Return what happens to the connection of one request."""

    async def scenario() -> list[bytes | str]:
        transport, state = Transport(), ServerState()
        connection = GatewayConnection(
            Config(answer, lifespan="off", log_config=None), state, {}, asyncio.get_running_loop()
        )
        connection.connection_made(transport)
        connection.data_received(request)
        while state.tasks:
            await asyncio.gather(*state.tasks)
        await settle()
        connection.connection_lost(None)
        return transport.events

    return asyncio.run(scenario())


def test_the_head_and_the_body_of_an_answer_are_one_packet():
    sent, *rest = events_of(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")

    assert sent.startswith(b"HTTP/1.1 200 OK\r\n")
    assert sent.endswith(b"\r\n\r\nhello")
    assert not [event for event in rest if event != "close"]


@pytest.mark.parametrize(
    "request_bytes", [b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"nonsense\r\n\r\n"]
)
def test_an_answer_is_sent_before_its_connection_closes(request_bytes):
    first, second, *_ = events_of(request_bytes)

    assert first.startswith(b"HTTP/1.1 ")
    assert second == "close"


@pytest.mark.parametrize("sent", [50, 1_000])
def test_so_many_requests_are_read_ahead_of_their_turn(sent):
    """One read of the socket brings many small ones, each of which takes memory until it is answered."""
    events = events_of(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n" * sent)

    answered = sum(event.count(b"hello") for event in events if event != "close")
    assert answered == sent if sent <= MAX_AHEAD else answered <= MAX_AHEAD + 1
    assert ("close" in events) is (sent > MAX_AHEAD)


async def test_what_is_answered_in_one_turn_is_sent_when_all_of_it_is_answered():
    """A write wakes its reader, which would take the processor before the next request is answered."""
    events: list[str] = []

    async def noting(scope, receive, send) -> None:
        await answer(scope, receive, send)
        events.append("answered")

    async with connected(noting) as (one, its), connected(noting) as (other, others):
        its.write = others.write = lambda data: events.append("sent")
        one.data_received(post(b"/", b""))
        other.data_received(post(b"/", b""))
        await settle()
    assert events == ["answered", "answered", "sent", "sent"]


async def test_an_answer_that_is_not_sent_yet_is_sent_before_the_gateway_stops():
    async with connected(answer) as (connection, socket):
        connection.data_received(post(b"/", b""))
        await answered(connection)
        assert not socket.sent
        connection.shutdown()
        await settle()
        assert socket.sent.endswith(b"hello")
        assert socket.events[-1] == "close"


async def test_no_request_is_begun_on_a_connection_that_closes():
    async with connected(echo) as (connection, socket):
        connection.shutdown()
        connection.data_received(post(b"/late", b""))  # in the same turn of the loop
        await settle()
        assert connection.server_state.total_requests == 0
        assert socket.events == ["close"]


async def test_an_answer_to_a_customer_who_left_meanwhile_is_dropped():
    async with connected(answer) as (connection, socket):
        connection.data_received(post(b"/", b""))
        await answered(connection)
        socket.close()
        await settle()
        assert not socket.sent


# --- Requests as they come --------------------------------------------------------------------------------------------


async def test_requests_sent_at_once_are_answered_one_after_the_other():
    async with connected(echo) as (connection, socket):
        connection.data_received(b"".join(post(b"/%d" % number, b"b") for number in range(40)))
        assert not socket.is_reading  # no more are read before some are answered
        while socket.sent.count(b"HTTP/1.1 200") < 40:
            await asyncio.sleep(0)
        assert socket.is_reading
        assert [part.split(b"\r\n\r\n")[1] for part in socket.sent.split(b"HTTP/1.1")[1:]] == [
            b"/%d=b" % number for number in range(40)
        ]


async def test_a_body_that_is_asked_for_comes_when_it_is_read():
    async with connected(echo) as (connection, socket):
        connection.data_received(b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n")
        await settle()
        assert socket.sent == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.data_received(b"hi")
        await settle()
        assert socket.sent.endswith(b"/a=hi")


async def test_a_refusal_before_the_body_that_was_announced_ends_the_connection():
    async with connected(answer) as (connection, socket):
        connection.data_received(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n")
        await settle()
        assert b"connection: close\r\n" in socket.sent
        assert socket.events[-1] == "close"
    async with connected(answer) as (connection, socket):
        connection.data_received(post(b"/", b"hello", b"Expect: 100-continue"))  # did not wait for it
        await settle()
        assert "close" not in socket.events


@pytest.mark.parametrize(
    "request_bytes, body",
    [
        (b"GET / HTTP/1.0\r\n\r\n", b"one two"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"4\r\none \r\n3\r\ntwo\r\n0\r\n\r\n"),
        (b"HEAD / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b""),
    ],
)
async def test_an_answer_of_unknown_length_ends_as_its_client_understands(request_bytes, body):
    async def parts(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"one ", "more_body": True})
        await send({"type": "http.response.body", "body": b"two"})

    async with connected(parts) as (connection, socket):
        connection.data_received(request_bytes)
        await settle()
        assert socket.sent.partition(b"\r\n\r\n")[2] == body
        assert socket.events[-1] == "close"


async def test_no_more_is_written_than_is_read():
    written = []

    async def endless(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200})
        for number in range(3):
            await send({"type": "http.response.body", "body": b"x", "more_body": number < 2})
            written.append(number)

    async with connected(endless) as (connection, _):
        connection.pause_writing()
        connection.data_received(post(b"/", b""))
        await settle()
        assert not written
        connection.resume_writing()
        await settle()
        assert len(written) == 3


async def test_a_large_body_is_read_no_faster_than_it_is_taken():
    may_go_on = asyncio.Event()

    async def patient(scope, receive, send) -> None:
        await may_go_on.wait()
        await echo(scope, receive, send)

    async with connected(patient) as (connection, socket):
        connection.data_received(post(b"/", b"x" * 100_000)[:-1])
        await settle()
        assert not socket.is_reading
        may_go_on.set()
        await settle()
        assert socket.is_reading
        connection.data_received(b"x")
        await settle()
        assert socket.sent.endswith(b"x" * 100_000)


async def test_a_head_without_end_is_refused():
    async with connected(answer) as (connection, socket):
        connection.data_received(b"POST / HTTP/1.1\r\nHost: ")
        for _ in range(20):
            connection.data_received(b"x" * 10_000)
        await settle()
        assert socket.sent.startswith(b"HTTP/1.1 431 ")
        assert socket.sent.count(b"HTTP/1.1") == 1
        assert socket.events[-1] == "close"


async def test_a_customer_who_leaves_is_told_of_at_once():
    seen = []

    async def watching(scope, receive, send) -> None:
        await receive()
        seen.append((await receive())["type"])

    async with connected(watching) as (connection, _):
        connection.data_received(post(b"/1", b"") + post(b"/2", b""))  # the second does not hide the first
        await settle()
        assert not seen
        connection.connection_lost(None)
        await settle()
        assert seen == ["http.disconnect"]


async def test_an_application_that_fails_is_answered_for(caplog):
    async def failing(scope, receive, send) -> None:
        raise RuntimeError("a bug")

    async with connected(failing) as (connection, socket):
        connection.data_received(post(b"/", b""))
        await settle()
        assert socket.sent.startswith(b"HTTP/1.1 500 ")
        assert socket.events[-1] == "close"
    assert "a bug" in caplog.text


async def test_a_connection_is_closed_when_nothing_came_for_long_and_not_before():
    async def asked(connection: GatewayConnection, data: bytes) -> None:
        connection.data_received(data)
        await settle()

    async with connected(answer, timeout_keep_alive=75) as (connection, socket):
        clock = connection.loop = Clock(connection.loop)
        connection.timeout_keep_alive_handler()  # its timer from now on is the clock's
        await asked(connection, post(b"/", b""))
        clock.pass_to(50)
        await asked(connection, post(b"/", b""))
        clock.pass_to(124)
        assert "close" not in socket.events
        await asked(connection, b"POST / HTTP")  # slow, but not silent
        clock.pass_to(150)
        assert "close" not in socket.events
        await asked(connection, b"/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
        clock.pass_to(224)
        assert "close" not in socket.events
        clock.pass_to(225)
        await settle()
        assert socket.events[-1] == "close"


async def test_a_connection_whose_body_comes_after_its_answer_is_closed_too():
    async with connected(answer, timeout_keep_alive=75) as (connection, socket):
        clock = connection.loop = Clock(connection.loop)
        connection.timeout_keep_alive_handler()
        connection.data_received(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n")
        await settle()
        assert socket.sent.startswith(b"HTTP/1.1 200 ")
        clock.pass_to(10)
        connection.data_received(b"hello")
        clock.pass_to(74)
        assert "close" not in socket.events
        clock.pass_to(75)
        await settle()
        assert socket.events[-1] == "close"


async def test_a_client_that_does_not_read_the_end_is_cut_off():
    async with connected(answer, timeout_keep_alive=75) as (connection, socket):
        clock = connection.loop = Clock(connection.loop)
        connection.timeout_keep_alive_handler()
        connection.data_received(post(b"/", b""))
        await settle()
        clock.pass_to(75)
        await settle()
        assert socket.events[-1] == "close"
        clock.pass_to(85)
        assert socket.events[-1] == "abort"


async def test_a_head_that_does_not_come_to_its_end_is_given_up():
    async with connected(answer, timeout_keep_alive=75) as (connection, socket):
        clock = connection.loop = Clock(connection.loop)
        connection.timeout_keep_alive_handler()
        for moment in range(0, 30, 5):  # a line now and then
            clock.pass_to(moment)
            connection.data_received(b"POST / HTTP/1.1\r\nHost: x\r\n" if moment == 0 else b"X-Slow: 1\r\n")
        assert "close" not in socket.events
        clock.pass_to(45)
        await settle()
        assert socket.events[-1] == "close"


async def test_a_connection_on_which_nothing_ever_comes_is_closed():
    async with connected(answer, timeout_keep_alive=0) as (_, socket):
        while not socket.events:  # at the latest, the limit of every asynchronous test ends this
            await asyncio.sleep(0)
        assert socket.events == ["close"]


async def test_stopping_lets_answers_end_and_closes_the_rest():
    async with connected(echo) as (connection, socket):
        connection.data_received(post(b"/1", b"ab")[:-1])
        await settle()
        connection.shutdown()
        assert "close" not in socket.events
        connection.data_received(b"b")
        await settle()
        assert b"connection: close" in socket.sent
        assert socket.events[-1] == "close"
    async with connected(echo) as (connection, socket):
        connection.shutdown()
        await settle()
        assert socket.events == ["close"]


@pytest.mark.parametrize(("announced", "is_read"), [(50_000, True), (5_000_000, False)])
async def test_the_rest_of_a_refused_body_is_read_only_if_it_is_short(announced, is_read):
    """A client sees the answer before its connection ends."""

    async with connected(answer) as (connection, socket):
        clock = connection.loop = Clock(connection.loop)
        connection.data_received(post(b"/", b"x" * announced)[:200])
        await settle()
        assert socket.sent.endswith(b"hello")
        assert (socket.is_reading, b"connection: close" in socket.sent) == (is_read, not is_read)
        assert "close" not in socket.events
        clock.pass_to(3)
        await settle()
        assert ("close" in socket.events) is not is_read
