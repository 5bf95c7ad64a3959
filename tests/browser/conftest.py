"""A real browser against the real application: uvicorn in a thread, the test database, system Chromium.

Every page opened through `open_page` fails its test on a console error, an uncaught exception or a policy violation.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from urllib.request import urlopen

import pytest
import uvicorn
from django.conf import settings
from django.db import connection
from django.test import Client
from playwright.sync_api import Browser, Page, Request, expect

from apps.accounts.models import Organization, User
from apps.core.http.asgi import DjangoApplication, Receive, Scope, Send
from tests.factories.finetuning import TrainingSetup
from tests.factories.market import Market
from tests.support.asgi import StaticFiles
from tests.support.browser import browser_type_launch_args as browser_type_launch_args
from tests.support.browser import wait_until

# Playwright's loop runs in this thread; the ORM is still used from it alone, one call at a time.
os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "true"

expect.set_options(timeout=30_000)  # a busy machine


class Counted:
    """The web application, and how many requests it is at: one whose caller left counts until its view has ended."""

    def __init__(self) -> None:
        self._application = StaticFiles(DjangoApplication())
        self.under_way = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.under_way += 1
        try:
            await self._application(scope, receive, send)
        finally:
            self.under_way -= 1


@pytest.fixture
def floor(transactional_db: None, organization: Organization) -> TrainingSetup:
    return TrainingSetup(organization)


@pytest.fixture
def market(transactional_db: None, organization: Organization) -> Market:
    return Market(organization)


@pytest.fixture(scope="session")
def web_application() -> Counted:
    return Counted()


@pytest.fixture(scope="session")
def pooled_connections(django_db_setup: None) -> Iterator[None]:
    """Let requests share connections, as those of an installation do: each new one reads the catalogue of all tables.

    The test's own thread takes its connection from the pool too.
    """
    connection.close()
    options = connection.settings_dict["OPTIONS"]
    options["pool"] = {"min_size": 1, "max_size": 12}
    yield
    connection.close()
    connection.close_pool()
    del options["pool"]


@pytest.fixture(scope="session")
def server_url(pooled_connections: None, web_application: Counted) -> Iterator[str]:
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


@dataclass
class Tab:
    """A page in a context of its own, with what the test that has it now must know of it.

    Tests have it in turn. The browser then has the static files and their compiled scripts in its caches, and starts
    no process: a third of the processor time of a page.
    """

    page: Page
    is_fresh: bool
    complaints: list[str] = field(default_factory=list)
    waiting: set[Request] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.page.on("console", lambda said: self.complaints.append(said.text) if said.type == "error" else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.waiting.add(request))
        self.page.on("response", lambda response: self.waiting.discard(response.request))
        self.page.on("requestfailed", lambda request: self.waiting.discard(request))

    def leave(self) -> bool:
        """End what the test left, and return whether another test may have this page."""
        self.complaints = []
        if self.is_fresh or self.page.is_closed() or len(self.page.context.pages) > 1:
            self.page.context.close()
            return False
        self.page.unroute_all(behavior="ignoreErrors")
        is_usual = self.page.evaluate(
            "() => { localStorage.clear(); sessionStorage.clear(); return !('__pwClock' in globalThis); }"
        )
        assert is_usual, "a test that sets the clock needs open_page(..., is_fresh=True)"
        self.page.goto("about:blank")
        self.page.mouse.move(-1, -1)  # over nothing that the next page shows
        self.page.context.clear_cookies()
        self.waiting.clear()
        return True


@pytest.fixture(scope="session")
def idle_tabs() -> list[Tab]:
    """Pages that no test has now."""
    return []


@pytest.fixture
def open_page(
    browser: Browser, server_url: str, web_application: Counted, idle_tabs: list[Tab], transactional_db: None
) -> Iterator[Callable[..., Page]]:
    """Return a maker of pages: `open_page("/keys", user=alice, width=390)`.

    `is_fresh` is for a test that sets the page's clock or listens to its events: no other test has the page.
    """
    tabs: list[Tab] = []
    complaints: list[str] = []

    def make(path: str = "/", *, user: User | None = None, width: int = 1440, is_fresh: bool = False) -> Page:
        tab = idle_tabs.pop() if idle_tabs and not is_fresh else _open_tab(browser, server_url, is_fresh=is_fresh)
        tabs.append(tab)
        tab.complaints = complaints
        tab.page.context.add_cookies(
            [{"name": "theme", "value": "light", "url": server_url}, *_session(user, server_url)]
        )
        tab.page.set_viewport_size({"width": width, "height": 900 if width > 600 else 780})
        tab.page.goto(path)
        return tab.page

    make.complaints = complaints  # type: ignore[attr-defined]
    yield make
    for tab in tabs:
        _wait_for_answers(tab.page, tab.waiting)
    idle_tabs += [tab for tab in tabs if tab.leave()]
    with urlopen(f"{server_url}{settings.STATIC_URL}favicon.svg"):
        pass  # its answer shows that the server has begun all earlier requests
    wait_until(lambda: not web_application.under_way)
    wait_until(_is_database_idle)
    assert complaints == []


def _open_tab(browser: Browser, url: str, *, is_fresh: bool) -> Tab:
    context = browser.new_context(base_url=url, color_scheme="light", reduced_motion="reduce")
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    return Tab(context.new_page(), is_fresh)


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
