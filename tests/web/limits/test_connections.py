"""Connections to the web process over real sockets: heads, half requests, and whose address counts."""

import socket
import struct
import time
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pytest
from django.conf import settings
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from apps.core.http import connections
from apps.core.http.fair_shares import Buckets
from apps.interfaces.web.edge.callers import address_of
from tests.support.asgi import origin, serving  # noqa: F401 - a fixture
from tests.support.database import connections_in_use
from tests.support.waiting import wait_until


async def whoami(scope, receive, send) -> None:
    """Stands where Django stands: answers with the address that limits count."""
    if scope["type"] == "lifespan":
        for word in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{word}.complete"})
        return
    body = address_of(scope).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture(scope="module")
def address():
    with serving(whoami) as url:
        yield url


def talk(address: str, *parts: bytes, pause: float = 0.0) -> bytes:
    """Send the parts, then read until the server closes or says nothing for a while."""
    parsed = urlsplit(address)
    with socket.create_connection((parsed.hostname, parsed.port), timeout=10) as connection:
        try:
            for part in parts:
                connection.sendall(part)
                time.sleep(pause)
            found = b""
            while chunk := connection.recv(65536):
                found += chunk
        except ConnectionError:
            return b"reset"
        return found


CLOSE = b"Host: x\r\nConnection: close\r\n"


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (b"X: %b\r\n" % (b"a" * 60_000), b"200"),
        (b"X: %b\r\n" % (b"a" * 70_000), b"431"),
        (b"Cookie: %b\r\n" % (b"a=b; " * 200_000), b"431"),
        (b"".join(b"X-%d: a\r\n" % n for n in range(90)), b"200"),
        (b"".join(b"X-%d: a\r\n" % n for n in range(200)), b"431"),
        (b"".join(b"X-%d: a\r\n" % n for n in range(10_000)), b"431"),
    ],
)
def test_a_head_has_so_many_bytes_and_lines(address: str, lines: bytes, status: bytes) -> None:
    answer = talk(address, b"GET / HTTP/1.1\r\n" + CLOSE + lines + b"\r\n")

    assert answer[9:12] == status or (status == b"431" and answer == b"reset"), answer[:100]


@pytest.mark.parametrize("parts", [[], [b"GET / HT"], [b"GET / HTTP/1.1\r\nHost: x\r\n"], [b"G", b"ET / HTTP/1.1\r\n"]])
def test_half_a_request_is_not_waited_for(monkeypatch, parts: list[bytes]) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.3)
    with serving(whoami) as url:
        assert talk(url, *parts) == b""


def test_the_second_request_of_a_connection_is_waited_for_no_longer(monkeypatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.3)
    with serving(whoami) as url:
        answer = talk(url, b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGET / HT")

    assert answer.count(b"200 OK") == 1


def test_an_address_holds_so_many_connections(monkeypatch, settings) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 3)
    with serving(whoami) as url:
        parsed = urlsplit(url)
        opened = [socket.create_connection((parsed.hostname, parsed.port)) for _ in range(3)]
        assert talk(url, b"GET / HTTP/1.1\r\n" + CLOSE + b"\r\n") in (b"", b"reset")
        for one in opened:
            one.close()
        deadline = time.monotonic() + 10
        while connections._open["127.0.0.1"] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert b"200 OK" in talk(url, b"GET / HTTP/1.1\r\n" + CLOSE + b"\r\n")
        settings.TRUSTED_PROXIES = "127.0.0.0/8"  # a proxy's connections are those of many
        opened = [socket.create_connection((parsed.hostname, parsed.port)) for _ in range(4)]
        assert b"200 OK" in talk(url, b"GET / HTTP/1.1\r\n" + CLOSE + b"\r\n")
        for one in opened:
            one.close()


@pytest.mark.slow
def test_an_address_that_opens_connections_too_fast_waits_with_each_further_one(monkeypatch) -> None:
    """A client that has left by then costs no request."""
    monkeypatch.setattr(connections, "_opened", Buckets())
    monkeypatch.setattr(connections, "PROMPT_CONNECTIONS_PER_MINUTE", 3)
    monkeypatch.setattr(connections, "DELAY_SECONDS", 0.5)
    request, paths, seconds = b"GET /%d HTTP/1.1\r\n" + CLOSE + b"\r\n", [], []

    async def noting(scope, receive, send) -> None:
        paths.append(scope.get("path"))
        await whoami(scope, receive, send)

    with serving(noting) as url:
        parsed = urlsplit(url)
        for number in range(4):
            began = time.monotonic()
            assert b"200 OK" in talk(url, request % number)
            seconds.append(time.monotonic() - began)
        torn = socket.create_connection((parsed.hostname, parsed.port))
        torn.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closed by a reset
        torn.sendall(request % 4)
        time.sleep(0.1)
        torn.close()
        assert b"200 OK" in talk(url, request % 5)

    assert seconds[3] >= 0.5 > min(seconds[:3])
    assert [path for path in paths if path] == ["/0", "/1", "/2", "/3", "/5"]


@pytest.mark.parametrize("sent", [50, 1_000])
def test_so_many_requests_are_read_ahead_of_their_turn(address: str, sent: int) -> None:
    """One read of the socket brings many small ones, each of which takes memory until it is answered."""
    answer = talk(address, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * (sent - 1) + b"GET / HTTP/1.1\r\n" + CLOSE + b"\r\n")

    if sent <= connections.MAX_AHEAD:
        assert answer.count(b"200 OK") == sent
    else:
        assert answer == b"reset" or answer.count(b"200 OK") <= connections.MAX_AHEAD + 1


@pytest.mark.parametrize(
    ("trusted", "forwarded", "counted"),
    [
        (None, "203.0.113.9", "127.0.0.1"),
        ("10.0.0.1", "203.0.113.9", "127.0.0.1"),
        ("127.0.0.1", "203.0.113.9", "203.0.113.9"),
        ("127.0.0.1", "198.51.100.1, 203.0.113.9", "203.0.113.9"),  # what the client wrote itself comes first
        ("127.0.0.1,203.0.113.9", "198.51.100.1, 203.0.113.9", "198.51.100.1"),
        ("127.0.0.1", "2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
    ],
)
def test_a_forwarded_address_is_believed_of_a_trusted_proxy_alone(
    trusted: str | None, forwarded: str, counted: str
) -> None:
    """As apps/config/asgi.py wraps the application where proxies are configured."""
    application = ProxyHeadersMiddleware(whoami, trusted_hosts=trusted) if trusted else whoami
    request = b"GET / HTTP/1.1\r\nX-Forwarded-For: %b\r\nX-Real-IP: 198.51.100.7\r\n" % forwarded.encode()
    with serving(application) as url:
        assert talk(url, request + CLOSE + b"\r\n").endswith(b"address " + counted.encode())


@pytest.mark.slow
def test_error_pages_keep_no_connection_to_the_database(origin, client_for, alice, organization):  # noqa: F811
    """Django renders them in threads that never end, and their navigation shows the balance."""
    cookie = settings.SESSION_COOKIE_NAME
    session = client_for(alice).cookies[cookie].value
    for path in ("/no-such-page", "/jobs/ftjob-none") * 3:
        with (
            pytest.raises(HTTPError) as refusal,
            urlopen(Request(f"{origin}{path}", headers={"Cookie": f"{cookie}={session}"})),
        ):
            pass
        assert refusal.value.code == 404
        assert "Acme" in refusal.value.read().decode()

    # A view gives its connection back after its answer.
    wait_until(lambda: connections_in_use() == [], connections_in_use)
