"""A real browser against the real application: uvicorn in a thread, the test database, system Chromium.

Every page opened through `open_page` fails its test on a console error, an uncaught exception or a policy violation.
"""

import asyncio
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any
from urllib.request import urlopen

import pytest
import uvicorn
from django.conf import settings
from django.contrib.staticfiles.handlers import ASGIStaticFilesHandler
from django.db import connection
from django.test import Client
from playwright.sync_api import Browser, BrowserContext, Page, Request, expect

from apps.accounts.models import User
from apps.core.http.asgi import DjangoApplication
from tests.support.browser import browser_type_launch_args as browser_type_launch_args
from tests.support.browser import wait_until

# Playwright's loop runs in this thread; the ORM is still used from it alone, one call at a time.
os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "true"

expect.set_options(timeout=30_000)  # a busy machine


class Counted:
    """The web application, and how many requests it is at: one whose caller left counts until its view has ended."""

    def __init__(self) -> None:
        self._application = ASGIStaticFilesHandler(DjangoApplication())
        self.under_way = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.under_way += 1
        try:
            # Django cancels a request whose caller left, and leaves the file that it was about to send unclosed.
            is_file = scope["type"] == "http" and scope["path"].startswith(settings.STATIC_URL)
            await self._application(scope, _without_disconnects(receive) if is_file else receive, send)
        finally:
            self.under_way -= 1


def _without_disconnects(receive: Any) -> Callable[[], Awaitable[Any]]:
    async def receive_or_wait() -> Any:
        message = await receive()
        if message["type"] == "http.disconnect":
            await asyncio.Event().wait()
        return message

    return receive_or_wait


@pytest.fixture(scope="session")
def web_application() -> Counted:
    return Counted()


@pytest.fixture(scope="session")
def server_url(django_db_setup: None, web_application: Counted) -> Iterator[str]:
    """Serve the web application; requests see what a test with `transactional_db` has committed."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(web_application, log_level="warning", lifespan="off", timeout_graceful_shutdown=2)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="uvicorn")
    thread.start()
    wait_until(lambda: server.started)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join(timeout=60)
    listener.close()


@pytest.fixture
def open_page(
    browser: Browser, server_url: str, web_application: Counted, transactional_db: None
) -> Iterator[Callable[..., Page]]:
    """Return a maker of pages: `open_page("/keys", user=alice, width=390, theme="dark")`."""
    contexts: list[BrowserContext] = []
    complaints: list[str] = []
    unanswered: dict[Page, set[Request]] = {}

    def make(path: str = "/", *, user: User | None = None, width: int = 1440, theme: str = "light") -> Page:
        context = browser.new_context(
            base_url=server_url,
            viewport={"width": width, "height": 900 if width > 600 else 780},
            color_scheme="dark" if theme == "dark" else "light",
            reduced_motion="reduce",
        )
        contexts.append(context)
        context.grant_permissions(["clipboard-read", "clipboard-write"])
        context.add_cookies([{"name": "theme", "value": theme, "url": server_url}, *_session(user, server_url)])
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        unanswered[page] = waiting = set()
        page.on("request", lambda request: waiting.add(request))
        page.on("response", lambda response: waiting.discard(response.request))
        page.on("requestfailed", lambda request: waiting.discard(request))
        page.goto(path)
        return page

    make.complaints = complaints  # type: ignore[attr-defined]
    yield make
    for page, waiting in unanswered.items():
        _wait_for_answers(page, waiting)
    for context in contexts:
        context.close()
    with urlopen(f"{server_url}{settings.STATIC_URL}favicon.svg"):
        pass  # by its answer the server has begun whatever was sent before
    wait_until(lambda: not web_application.under_way)
    wait_until(_is_database_idle)
    assert complaints == []


def _wait_for_answers(page: Page, waiting: set[Request], *, seconds: float = 5) -> None:
    """Let the server answer what a page has asked: a view whose caller left works on, while its tables are emptied.

    What a test never lets be answered is left after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while waiting and not page.is_closed() and time.monotonic() < deadline:
        page.wait_for_timeout(20)


def _is_database_idle() -> bool:
    """Tell whether no request still works on the tables to be emptied: it would lock them in another order."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
            "AND state IN ('active', 'idle in transaction')"
        )
        return not cursor.fetchone()[0]


def _session(user: User | None, url: str) -> list[dict[str, str]]:
    if user is None:
        return []
    client = Client()
    client.force_login(user, backend=settings.AUTHENTICATION_BACKENDS[0])
    name = settings.SESSION_COOKIE_NAME
    return [{"name": name, "value": client.cookies[name].value, "url": url}]
