"""No tenant takes the web process from the others: requests, running time, places, open bodies."""

import asyncio
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from apps.core.http.asgi import MIB, PROCESSOR_SECONDS
from apps.core.http.fair_shares import LateRefusals
from apps.interfaces.web.edge import callers, dashboard_files
from apps.interfaces.web.edge.callers import CallerIds
from apps.interfaces.web.edge.request_limits import LimitRequests, WebLimits
from tests.support.waiting import settle

ACME = CallerIds("key a", "person alice", "organization acme")
PEOPLE = {
    "a": ACME,
    "a2": ACME._replace(credential="key a2"),
    "bob": ACME._replace(credential="session bob", person="person bob"),
    "rival": CallerIds("key r", "person charlie", "organization rival"),
    "second": CallerIds("key s", "person charlie", "organization second"),
}


@pytest.fixture(autouse=True)
def _people(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let an Authorization header name one of PEOPLE, without a database."""
    header = lambda scope: (dict(scope["headers"]).get(b"authorization", b"").decode(), "")  # noqa: E731

    async def find(credential: tuple[str, str]) -> CallerIds | None:
        return PEOPLE.get(credential[0])

    monkeypatch.setattr(callers, "credential_of", header)
    monkeypatch.setattr(callers, "recall", lambda credential: PEOPLE.get(credential[0]))
    monkeypatch.setattr(callers, "find", find)
    return


class Views:
    """Stands where Django stands: reads the body, runs until it is let go, answers."""

    def __init__(self) -> None:
        self.running: list[str] = []
        self.seconds = 0.0  # of the processor, that each request takes
        self.go_on = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while (message := await receive())["type"] == "http.request" and message.get("more_body"):
            pass
        if message["type"] == "http.disconnect":
            return
        self.running.append(dict(scope["headers"]).get(b"authorization", b"").decode())
        await self.go_on.wait()
        scope[PROCESSOR_SECONDS] = self.seconds
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})


async def ask(
    application: Any, who: str = "", path: str = "/api/v1/me", *, method: str = "GET", client: str = "10.0.0.1",
    body: Any = None, leaving: asyncio.Event | None = None, **headers: str,
) -> tuple[int, bytes, dict[str, str]]:  # fmt: skip
    raw = [(b"authorization", who.encode())] if who else []
    raw += [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": method, "path": path, "headers": raw, "client": (client, 1)}
    sent: list[Any] = []
    bodies = iter([body])

    async def receive() -> Any:
        for each in bodies:
            return await each() if each else {"type": "http.request", "body": b"", "more_body": False}
        await (leaving or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    await application(scope, receive, send)
    if not sent:
        return 0, b"", {}  # the client left
    start = sent[0]
    found = {name.decode(): value.decode() for name, value in start["headers"]}
    return start["status"], b"".join(message.get("body", b"") for message in sent), found


def prompt_views() -> Views:
    """Return views that answer at once."""
    views = Views()
    views.go_on.set()
    return views


def limited(views: Views, **limits: int) -> LimitRequests:
    return LimitRequests(
        views, WebLimits(**{"requests_per_minute": 10, "seconds_per_minute": 60, "places": 8} | limits)
    )


def statuses(asked: list[dict[str, Any]], **limits: int) -> list[int]:
    async def scenario() -> list[int]:
        application = limited(prompt_views(), **limits)
        return [(await ask(application, **one))[0] for one in asked]

    return asyncio.run(scenario())


def test_a_key_has_so_many_requests_a_minute_and_others_are_not_touched() -> None:
    found = statuses([{"who": "a"}] * 12 + [{"who": "rival"}] * 2)

    assert found == [200] * 10 + [429] * 2 + [200] * 2


async def test_bodies_of_one_organization_are_read_at_its_rate_and_others_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: 100.0)  # stands still, however busy the machine is

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    async def body() -> dict[str, Any]:
        return {"type": "http.request", "body": bytes(4 * MIB)}

    application = limited(prompt_views())
    monkeypatch.setattr("apps.core.http.fair_shares.asyncio.sleep", sleep)
    monkeypatch.setattr("apps.core.http.fair_shares.time", clock)
    for who in ("a", "a2", "bob", "a", "a2", "bob", "rival"):
        assert (await ask(application, who, method="POST", body=body))[0] == 200

    found = [round(wait, 3) for wait in waits if wait > 1e-6]  # less is rounding
    assert found == [round(4 / 24, 3), round(8 / 24, 3)]  # 4 and 8 MiB beyond the first 16


def test_many_keys_and_members_of_one_organization_share_its_limit() -> None:
    found = statuses([{"who": who} for _ in range(10) for who in ("a", "a2", "bob")])

    assert found.count(200) == 20


def test_many_organizations_of_one_person_share_theirs() -> None:
    PEOPLE["third"] = CallerIds("key t", "person charlie", "organization third")
    found = statuses([{"who": who} for _ in range(10) for who in ("rival", "second", "third")])

    assert found.count(200) == 20


@pytest.mark.parametrize("client", ["10.0.0.1", "2001:db8::%d", "::ffff:10.0.0.1"])
def test_an_address_has_a_limit_for_all_behind_it(client: str) -> None:
    """One customer of an IPv6 network has a /64."""
    strangers = [{"client": client % n if "%" in client else client} for n in range(20)]

    assert statuses(strangers).count(200) == 10
    assert statuses([*strangers, {"client": "10.9.9.9"}, {"who": "a", "client": client.replace("%d", "1")}])[-2:] == [
        200,
        200,
    ]


@pytest.mark.parametrize("path", ["/no/such/page", "/v1/nothing", "/api/v1/schema", "/accounts/login/", "/objects/x"])
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "DELETE", "BREW"])
def test_no_path_and_no_method_is_free(path: str, method: str) -> None:
    assert statuses([{"path": path, "method": method}] * 15).count(429) == 5


@pytest.fixture
def _favicon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard_files, "_collected", lambda: {"/static/favicon.svg"})


@pytest.mark.usefixtures("_favicon")
def test_files_of_the_dashboard_have_a_wider_limit_of_their_own() -> None:
    asked = [{"path": "/static/favicon.svg"}, {"path": "/static/no-such-file"}] * 30
    found = statuses([*asked, {"path": "/"}, {"who": "a", "path": "/jobs"}])

    assert found == [200, 404] * 25 + [429] * 10 + [200] * 2


@pytest.mark.usefixtures("_favicon")
async def test_a_file_that_the_dashboard_lacks_is_refused_before_any_view() -> None:
    views = prompt_views()
    application = limited(views)
    status, body, _ = await ask(application, path="/static/no-such-file")
    assert (status, json.loads(body)["error"]["code"]) == (404, "unknown_url")
    assert (await ask(application, path="/static/../static/favicon.svg"))[0] == 404
    assert views.running == []


def test_a_wrong_key_costs_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    async def find(credential: tuple[str, str]) -> None:
        asked.append(credential)

    monkeypatch.setattr(callers, "find", find)

    assert statuses([{"who": f"forged {n}"} for n in range(30)]).count(429) > 20
    assert len(asked) <= 10  # the database is not asked more often


async def test_processor_time_is_limited_whatever_the_route() -> None:
    views = prompt_views()
    views.seconds = 2.5
    application = limited(views, seconds_per_minute=1)
    assert (await ask(application, "a"))[0] == 200
    status, body, headers = await ask(application, "a")
    assert (status, json.loads(body)["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 85 < int(headers["retry-after"]) <= 95
    assert (await ask(application, "bob"))[0] == 429  # the organization's time is used up too
    assert (await ask(application, "rival"))[0] == 200


async def test_an_organization_never_holds_all_places_and_one_that_ran_much_holds_one() -> None:
    views = Views()
    application = limited(views, places=8, requests_per_minute=100)
    crowd = [asyncio.ensure_future(ask(application, who)) for who in ("a", "a2", "bob") * 4]
    await settle()
    assert len(views.running) == 2
    neighbour = asyncio.ensure_future(ask(application, "rival"))
    await settle()
    assert views.running[-1] == "rival"
    views.go_on.set()
    assert {answer[0] for answer in await asyncio.gather(*crowd, neighbour)} == {200}
    assert not application._open._open and application._own.places._free == 8

    views.go_on.clear()
    views.running.clear()
    application._seconds.take("organization acme", 90, 80)
    crowd = [asyncio.ensure_future(ask(application, "a")) for _ in range(4)]
    await settle()
    assert len(views.running) == 1
    views.go_on.set()
    await asyncio.gather(*crowd)


async def test_who_waits_in_too_long_a_line_is_refused() -> None:
    views = Views()
    application = limited(views, places=2, requests_per_minute=1000)
    crowd = [asyncio.ensure_future(ask(application, who)) for who in ("a", "a2") * 23]
    await settle()
    views.go_on.set()
    found = [answer[0] for answer in await asyncio.gather(*crowd)]
    assert found.count(200) == 33 and found.count(429) == 13


async def test_a_client_that_leaves_while_it_waits_has_nothing_run() -> None:
    views, leaving = Views(), asyncio.Event()
    application = limited(views, places=1, requests_per_minute=1000)
    first = asyncio.ensure_future(ask(application, "a"))
    left = [asyncio.ensure_future(ask(application, "a", leaving=leaving)) for _ in range(10)]
    waiting = asyncio.ensure_future(ask(application, "rival"))
    await settle()
    leaving.set()
    assert {answer[0] for answer in await asyncio.gather(*left)} == {0}
    views.go_on.set()
    assert ((await first)[0], (await waiting)[0]) == (200, 200)
    assert views.running == ["a", "rival"]
    assert (await ask(application, "a", leaving=leaving))[0] == 0
    assert views.running == ["a", "rival"]
    assert not application._open._open and application._own.places._free == 1


async def test_bodies_that_are_not_whole_hold_no_place_and_are_counted() -> None:
    views, rest = Views(), asyncio.Event()
    views.go_on.set()
    application = limited(views, places=2, requests_per_minute=1000)

    async def slowly() -> Any:
        await rest.wait()
        return {"type": "http.request", "body": b"x", "more_body": False}

    def upload() -> Any:
        return ask(application, "a", "/v1/files", method="POST", body=slowly, content_length=str(100 * MIB))

    bodies = [asyncio.ensure_future(upload()) for _ in range(4)]
    await settle()
    assert (await upload())[0] == 429
    assert (await ask(application, "a"))[0] == 200
    small = [asyncio.ensure_future(ask(application, "a", method="POST", body=slowly)) for _ in range(20)]
    await settle()
    status, body, _ = await ask(application, "a")
    assert (status, json.loads(body)["error"]["limit"]) == (429, "24 open requests at once")
    assert (await ask(application, "rival"))[0] == 200
    rest.set()
    await asyncio.gather(*bodies, *small)
    assert (await upload())[0] == 200


async def test_an_address_that_was_refused_often_gets_its_refusals_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LateRefusals, "PROMPT_PER_MINUTE", 5)
    monkeypatch.setattr(LateRefusals, "HOLD_SECONDS", 600.0)
    monkeypatch.setattr(LateRefusals, "MAX_HELD", 8)

    application = limited(prompt_views(), requests_per_minute=1)
    await ask(application, "a")
    prompt = [(await ask(application, "a"))[0] for _ in range(5)]
    held = [asyncio.ensure_future(ask(application, "a")) for _ in range(8)]
    await settle()
    above, other = await ask(application, "a"), await ask(application, "rival", client="10.9.9.9")
    other_refused = await ask(application, "rival", client="10.9.9.9")

    assert prompt == [429] * 5 and not any(each.done() for each in held)
    assert (above[0], other[0], other_refused[0]) == (429, 200, 429)
    for each in held:
        each.cancel()
    await asyncio.gather(*held, return_exceptions=True)
    again = asyncio.ensure_future(ask(application, "a"))
    await settle()
    assert not again.done(), "a client that left is no longer counted"
    again.cancel()


async def test_a_person_gets_a_page_and_htmx_a_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("apps.core.http.fair_shares.time", SimpleNamespace(monotonic=lambda: 100.0))

    application = limited(prompt_views(), requests_per_minute=1)
    await ask(application, "a", "/jobs")
    status, body, headers = await ask(application, "a", "/jobs")
    assert status == 429 and headers["content-type"].startswith("text/html") and "retry-after" in headers
    assert "Too many requests" in body.decode() and "60 s" in body.decode()
    status, body, headers = await ask(application, "a", "/jobs", hx_request="true")
    assert (status, body, headers["hx-reswap"]) == (429, b"", "none")
    assert "60 s" in json.loads(headers["hx-trigger"])["toast"]["text"]


async def test_a_signed_in_person_keeps_the_navigation_and_reads_the_own_language(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(callers, "credential_of", lambda scope: ("", "session"))
    monkeypatch.setattr(callers, "recall", lambda credential: PEOPLE["bob"])

    application = limited(prompt_views(), requests_per_minute=1)
    large = {"content_length": str(5 * MIB), "accept": "text/html"}
    _, too_large, _ = await ask(application, "", "/evals", method="POST", **large)
    status, body, headers = await ask(application, "", "/jobs", accept_language="de")
    _, _, of_htmx = await ask(application, "", "/jobs", accept_language="de", hx_request="true")

    page = body.decode()
    assert status == 429 and int(headers["retry-after"]) > 0
    assert 'href="/datasets"' in page and 'href="/jobs"' in page and 'href="/status"' in page
    assert f"Ihr Browser darf 1 Anfragen pro Minute nutzen. Versuchen Sie es in {headers['retry-after']} s" in page
    assert "Ihr Browser darf" in json.loads(of_htmx["hx-trigger"])["toast"]["text"]
    assert "Erneut versuchen" in page and "Gehen Sie im Browser zurück" not in page
    assert "<h1>That is too large</h1>" in too_large.decode() and 'href="/datasets"' in too_large.decode()
    assert "Go back in your browser" in too_large.decode()


async def test_a_stranger_sees_no_navigation_and_a_script_reads_no_page() -> None:
    application = limited(prompt_views(), requests_per_minute=1)
    await ask(application, "a", "/jobs")
    _, page, _ = await ask(application, "a", "/jobs")
    _, answer, _ = await ask(application, "a", "/jobs", accept="application/json, text/html")

    assert 'href="/datasets"' not in page.decode() and "Too many requests" in page.decode()
    assert json.loads(answer)["error"]["code"] == "rate_limit_exceeded"


async def test_a_caller_that_used_much_or_runs_another_view_has_it_run_elsewhere() -> None:
    """Until the other process is ready, all views run here."""

    class Busy(Views):
        is_ready = False

    here, there = Views(), Busy()
    here.go_on.set()
    there.go_on.set()
    here.seconds = 0.4  # more than a hundredth, with the second request, of what a key may use in a minute
    limits = WebLimits(requests_per_minute=100, seconds_per_minute=60, places=8)
    application = LimitRequests(here, limits, busy=there)  # type: ignore[arg-type]
    assert [(await ask(application, "a"))[0] for _ in range(3)] == [200] * 3
    there.is_ready = True
    found = [await ask(application, who, client=f"10.{who}") for who in ("a", "rival", "rival", "a2")]
    assert [answer[0] for answer in found] == [200] * 4
    assert (here.running, there.running) == (["a"] * 3 + ["rival"] * 2, ["a", "a2"])

    here.go_on.clear()
    first = asyncio.ensure_future(ask(application, "", client="10.0.0.9"))
    await settle()
    assert (await ask(application, "", client="10.0.0.9"))[0] == 200
    assert (here.running[-1], there.running[-1]) == ("", "")
    here.go_on.set()
    assert (await first)[0] == 200
    assert {lane.places._free for lane in (application._own, application._busy)} == {8}
