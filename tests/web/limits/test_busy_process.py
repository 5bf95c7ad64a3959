"""Views of callers that use much run in a second process, which answers as the first one does."""

import asyncio
import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.conf import settings

from apps.core.http.asgi import DjangoApplication
from apps.core.models import AuditEntry
from apps.interfaces.web.edge import busy_process, request_limits
from apps.interfaces.web.edge.busy_process import BusyProcess
from apps.interfaces.web.edge.front_door import FrontDoor
from apps.interfaces.web.edge.request_limits import LimitRequests
from tests.factories.datasets import jsonl
from tests.support.asgi import NO_LIMITS, serving
from tests.support.database import database_url
from tests.support.waiting import SECONDS, SkippingLoop, wait_until


def processes() -> list[int]:
    """Return the busy processes that this one has started."""
    children = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    pids = [int(pid) for path in children for pid in path.read_text().split()]
    return [pid for pid in pids if b"asgi_busy" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.fixture(scope="module")
def busy(django_db_setup: None) -> Iterator[BusyProcess]:
    """Give the real process; every caller counts as one that used much."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_limits, "_QUIET_PART", 0)
        patch.setattr(busy_process, "_REST_SECONDS", 0.1)
        patch.setenv("DATABASE_URL", database_url("app"))
        yield BusyProcess([sys.executable, "-m", "apps.config.asgi_busy"])


@pytest.fixture(scope="module")
def served(busy: BusyProcess) -> Iterator[tuple[str, list[str]]]:
    """Give the address of the front door, and the paths that the first process has run itself."""
    own_paths: list[str] = []
    django_application: Any = DjangoApplication()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        own_paths.append(scope["path"])
        await django_application(scope, receive, send)

    door = FrontDoor(application, gateway_url="http://127.0.0.1:1", limits=NO_LIMITS, busy=busy)
    with serving(door) as address:
        wait_until(lambda: busy.is_ready, "the process did not start", seconds=180)  # on a busy machine
        yield address, own_paths
    assert not processes()


@pytest.fixture
def origin(served: tuple[str, list[str]], transactional_db: None) -> str:
    return served[0]


@pytest.fixture
def own_paths(served: tuple[str, list[str]]) -> list[str]:
    served[1].clear()
    return served[1]


def ask(
    origin: str, method: str, path: str, headers: dict[str, str], body: Iterable[bytes] | None = None
) -> tuple[int, dict[str, str], bytes]:
    client = http.client.HTTPConnection(urlsplit(origin).netloc, timeout=60)
    client.request(method, path, body=body, headers=headers, encode_chunked="Transfer-Encoding" in headers)
    answer = client.getresponse()
    found = answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    client.close()
    return found


@pytest.mark.slow
def test_it_answers_as_the_first_process_does(origin, own_paths, client_for, alice, organization, key):
    as_key = {"Authorization": f"Bearer {key.secret}"}
    as_person = {"Cookie": f"sessionid={client_for(alice).cookies[settings.SESSION_COOKIE_NAME].value}"}
    form = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n'
    form += b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n' + jsonl(40)
    chunks = [form[:50], form[50:], b"\r\n--x--\r\n"]
    multipart = {"Content-Type": "multipart/form-data; boundary=x", "Transfer-Encoding": "chunked"}
    stranger = {"X-Forwarded-For": "6.6.6.6", "x-request-id": "my-own-request"}

    status, headers, page = ask(origin, "GET", "/jobs?q=a%2Fb", as_person)
    assert status == 200 and b"</html>" in page and "content-security-policy" in headers
    assert not [name for name in headers if name.startswith("x-anneal")]
    assert ask(origin, "HEAD", "/accounts/login/", {})[::2] == (200, b"")
    status, headers, _ = ask(origin, "GET", "/jobs?q=a%2Fb", {})
    assert (status, headers["location"]) == (302, "/accounts/login/?next=/jobs%3Fq%3Da%252Fb")
    status, headers, body = ask(origin, "POST", "/v1/files", as_key | multipart | stranger, iter(chunks))
    assert status == 200 and b"a.jsonl" in body and headers["x-request-id"] == "my-own-request"
    assert AuditEntry.objects.filter(action="dataset.uploaded").get().ip == "127.0.0.1"
    assert ask(origin, "POST", "/v1/files", as_key | {"Content-Length": str(9 * 2**30)})[0] == 413
    assert ask(origin, "GET", "/v1/models", {"Authorization": "Bearer wrong"})[0] == 401
    assert own_paths == []


@pytest.mark.slow
def test_the_first_process_answers_while_the_second_is_away(origin, own_paths, busy):
    [pid] = processes()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not busy.is_ready, processes)

    assert ask(origin, "GET", "/accounts/login/", {})[0] == 200
    assert own_paths == ["/accounts/login/"]
    wait_until(lambda: busy.is_ready, processes)
    assert ask(origin, "GET", "/accounts/login/", {})[0] == 200
    assert len(own_paths) == 1 and processes() != [pid]


@pytest.mark.slow
def test_a_client_that_leaves_is_charged_for_what_it_started(origin, monkeypatch: pytest.MonkeyPatch):
    charged: list[float] = []
    monkeypatch.setattr(LimitRequests, "_take_seconds", lambda self, owners, seconds: charged.append(seconds))
    begun, begin = threading.Event(), LimitRequests._begin

    async def begin_and_tell(*args: Any) -> None:
        await begin(*args)
        begun.set()

    monkeypatch.setattr(LimitRequests, "_begin", begin_and_tell)
    with socket.create_connection(("127.0.0.1", urlsplit(origin).port)) as client:
        client.sendall(b"GET /accounts/login/ HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert begun.wait(SECONDS)

    wait_until(lambda: bool(charged), lambda: "the request has no end")
    assert charged[0] > 0


@pytest.mark.slow
def test_it_does_not_outlive_the_process_in_front(transactional_db, tmp_path: Path):
    """A killed process closes the pipe that is the other's standard input."""
    path = tmp_path / "views.sock"
    environ = os.environ | {"DATABASE_URL": database_url("app")}
    command = [sys.executable, "-m", "apps.config.asgi_busy", str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environ)
    assert process.stdin is not None
    with socket.socket(socket.AF_UNIX) as client:
        wait_until(lambda: client.connect_ex(str(path)) == 0, "the process did not start", seconds=180)
        process.stdin.close()

        assert process.wait(timeout=SECONDS) == 0


def test_it_is_ready_however_long_its_start_takes(tmp_path: Path):
    """An hour, here, of which it waits for a file."""
    script, awaited = tmp_path / "late.py", tmp_path / "awaited"
    script.write_text(
        "import pathlib, socket, sys, time\n"
        "while not pathlib.Path(sys.argv[1]).exists():\n"
        "    time.sleep(0.01)\n"
        "late = socket.socket(socket.AF_UNIX)\n"
        "late.bind(sys.argv[2])\n"
        "late.listen()\n"
        "sys.stdin.read()\n"
    )
    loop = SkippingLoop()

    async def run() -> None:
        process = BusyProcess([sys.executable, str(script), str(awaited)])
        await process.start()
        await asyncio.sleep(0.01)
        loop.skipped = 3600.0
        await asyncio.sleep(0.01)
        assert not process.is_ready
        awaited.touch()
        await asyncio.to_thread(wait_until, lambda: process.is_ready, "it is not ready")
        await process.end()

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(run())
