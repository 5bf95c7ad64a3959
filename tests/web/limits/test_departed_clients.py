"""Clients that leave in the middle, or stop reading, keep nothing of the web process."""

import os
import random
import socket
import struct
import time
from contextlib import ExitStack
from urllib.parse import urlsplit

import pytest
from django.conf import settings

from tests.factories.datasets import jsonl, make_ready_version
from tests.support.asgi import origin  # noqa: F401 - a fixture
from tests.support.database import connections_in_use
from tests.support.waiting import SECONDS, wait_until


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def connect(address: str) -> socket.socket:
    """Return a connection that takes little before it is read."""
    parsed = urlsplit(address)
    opened = socket.socket()
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    opened.settimeout(SECONDS)
    opened.connect((parsed.hostname, parsed.port))
    return opened


@pytest.mark.slow
def test_downloads_that_are_not_read_hold_no_connection_to_the_database(origin, organization, key):  # noqa: F811
    version = make_ready_version(organization, jsonl(200_000))
    head = (
        f"GET /v1/files/{version.pk}/content HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key.secret}\r\n\r\n"
    )

    with ExitStack() as stack:
        for _ in range(3):
            client = stack.enter_context(connect(origin))
            client.sendall(head.encode())
            assert client.recv(12) == b"HTTP/1.1 200"
        wait_until(lambda: connections_in_use() == [], connections_in_use)


@pytest.mark.slow
def test_clients_that_leave_at_any_moment_leave_nothing_behind(origin, client_for, alice, organization, key):  # noqa: F811
    """Halves of heads, of bodies, of uploads and of answers, cut off at random."""
    cookie = f"{settings.SESSION_COOKIE_NAME}={client_for(alice).cookies[settings.SESSION_COOKIE_NAME].value}"
    version = make_ready_version(organization, jsonl(20_000))
    as_key, as_person = f"Authorization: Bearer {key.secret}", f"Cookie: {cookie}"
    form = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n' + jsonl(40_000)
    asked = [
        (f"GET /v1/files/{version.pk}/content", as_key, b""),
        ("POST /v1/files", f"{as_key}\r\nContent-Type: multipart/form-data; boundary=x", form),
        ("POST /api/v1/estimates", f"{as_key}\r\nContent-Type: application/json", b'{"model":' + b" " * 200_000),
        ("GET /jobs", as_person, b""),
        ("GET /datasets", as_person, b""),
        ("GET /no-such-page", as_person, b""),
    ]
    dice = random.Random(7)
    before = open_files()
    for number in range(60):
        line, header, body = asked[number % len(asked)]
        length = f"Content-Length: {len(body)}\r\n" if body else ""
        whole = f"{line} HTTP/1.1\r\nHost: localhost\r\n{header}\r\n{length}\r\n".encode() + body
        with connect(origin) as client:
            client.sendall(whole[: len(whole) if number % 2 else dice.randrange(1, len(whole))])
            time.sleep(dice.choice([0, 0.005, 0.02, 0.05]))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, not an end

    wait_until(lambda: connections_in_use() == [], connections_in_use)
    wait_until(lambda: open_files() <= before, open_files)
