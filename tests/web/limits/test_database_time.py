"""A request whose statement the database stops gets an answer that says what to do, and changes nothing."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock

import psycopg
import pytest
from django.db import DatabaseError, connection
from django.test import Client

from apps.config.settings import internal
from apps.core.http import statement_limits

TOO_LONG = ["SET LOCAL statement_timeout = 1", "SELECT pg_sleep(10)"]
HELD = 4711  # an advisory lock that another session holds
IN_USE = ["SET LOCAL lock_timeout = 1", f"SELECT pg_advisory_xact_lock({HELD})"]
IDLE = ["DO $$ BEGIN RAISE idle_in_transaction_session_timeout; END $$"]
END = ["RESET ROLE", "SELECT pg_terminate_backend(pg_backend_pid())", "SELECT 1"]
FAULT = ["DO $$ BEGIN RAISE division_by_zero; END $$"]
DEADLOCK = ["DO $$ BEGIN RAISE deadlock_detected; END $$"]


@contextmanager
def stopping(table: str, statements: list[str]) -> Iterator[None]:
    """Have each statement that names the table end as the database ends these ones."""

    def execute(run: Callable[..., Any], statement: str, arguments: Any, many: bool, context: Any) -> Any:
        for instead in statements if f'"{table}"' in statement else ():
            run(instead, None, False, context)
        return run(statement, arguments, many, context)

    with connection.execute_wrapper(execute):
        yield


@pytest.fixture
def _other_session(db: None) -> Iterator[None]:
    other = connection.copy()
    with other.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_lock(%s)", [HELD])
    yield
    other.close()


@pytest.mark.usefixtures("_other_session")
@pytest.mark.parametrize(
    ("statements", "code", "says", "headers"),
    [
        (TOO_LONG, "query_timeout", "Ask for less: a shorter period", {"x-should-retry": "false"}),
        (IDLE, "query_timeout", "Ask for less: a shorter period", {"x-should-retry": "false"}),
        (IN_USE, "rows_in_use", "Try again in a few seconds", {"Retry-After": "2"}),
        (DEADLOCK, "rows_in_use", "Try again in a few seconds", {"Retry-After": "2"}),
    ],
    ids=["too long", "idle", "in use", "deadlock"],
)
def test_it_is_refused_with_what_to_do(statements, code, says, headers, key, alice, client_for, api_client, settings):
    with stopping("finetuning_finetuningjob", statements):
        page = client_for(alice).get("/jobs", {"q": "anything"})
        answer = api_client(key).get("/v1/fine_tuning/jobs")
        of_ours = api_client(key).get("/api/v1/quotas")
    settings.ROOT_URLCONF, settings.MIDDLEWARE = "apps.config.urls_internal", internal.MIDDLEWARE
    with stopping("finetuning_worker", statements):
        of_worker = Client().post("/internal/v1/claim", b"{}", content_type="application/json")

    assert {each.status_code for each in (page, answer, of_ours, of_worker)} == {503}
    assert says in page.content.decode() and "<h1>That took too long</h1>" in page.content.decode()
    for each in (answer, of_ours, of_worker):
        assert each.json()["error"]["code"] == code and says in each.json()["error"]["message"]
    for each in (page, answer, of_ours, of_worker):
        assert headers.items() <= dict(each.headers).items()
        assert each.headers["x-request-id"]


def test_a_statement_outside_a_view_is_refused_in_the_same_way(key, alice, client_for) -> None:
    browser = client_for(alice)
    browser.raise_request_exception = False
    with stopping("django_session", TOO_LONG):
        page = browser.get("/jobs")
    with stopping("django_session", FAULT):
        fault = browser.get("/jobs")

    assert (page.status_code, fault.status_code) == (503, 500)
    assert "<h1>That took too long</h1>" in page.content.decode()
    assert page.headers["x-request-id"] and page.headers["x-should-retry"] == "false"


@pytest.mark.usefixtures("key")
def test_the_page_of_a_fault_keeps_the_navigation_without_a_query(alice, client_for) -> None:
    browser = client_for(alice)
    browser.raise_request_exception = False
    run: list[str] = []

    def note(execute: Callable[..., Any], statement: str, *rest: Any) -> Any:
        run.append(statement)
        return execute(statement, *rest)

    with stopping("finetuning_finetuningjob", FAULT), connection.execute_wrapper(note):
        page = browser.get("/jobs")
    text = page.content.decode()

    assert page.status_code == 500 and page.headers["x-request-id"] in text
    for address in ("/datasets", "/jobs", "/adapters", "/help", "/status"):
        assert f'href="{address}"' in text
    assert "Try again" in text
    assert [each for each in run[run.index(FAULT[0]) + 1 :] if " FROM " in each] == []


@pytest.mark.django_db(transaction=True)
def test_a_transaction_that_takes_too_long_is_refused(key, api_client, monkeypatch) -> None:
    monkeypatch.setattr(statement_limits, "SESSION_SECONDS", 0)  # the limit that the transaction reaches
    with stopping("finetuning_finetuningjob", ["SET LOCAL transaction_timeout = 1", "SELECT pg_sleep(10)"]):
        answer = api_client(key).get("/v1/fine_tuning/jobs")
    connection.close()  # the server has closed its end; outside tests, Django does so after the request

    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "query_timeout")
    assert answer.headers["x-should-retry"] == "false"
    assert api_client(key).get("/v1/fine_tuning/jobs").status_code == 200


@pytest.mark.parametrize(("limit_seconds", "code"), [(0, "query_timeout"), (3600, "service_unavailable")])
def test_a_session_that_ends_without_a_reason_counts_as_ended_by_its_limit_after_that_time(
    rf, monkeypatch, limit_seconds, code
) -> None:
    """The server's reason and the end of the session race, and libpq sees the end first now and then."""
    monkeypatch.setattr(statement_limits, "SESSION_SECONDS", limit_seconds)
    middleware, request = statement_limits.RefuseStoppedStatements(Mock()), rf.get("/v1/fine_tuning/jobs")
    lost = DatabaseError("lost")
    lost.__cause__ = psycopg.OperationalError("server closed the connection unexpectedly")

    middleware.process_request(request)
    answer = middleware.process_exception(request, lost)

    assert (answer.status_code, json.loads(answer.content)["error"]["code"]) == (503, code)
    assert ("x-should-retry" in answer.headers) != ("Retry-After" in answer.headers)


@pytest.mark.django_db(transaction=True)
def test_a_request_whose_session_the_database_ends_may_be_repeated(key, alice, client_for, api_client) -> None:
    for ask in (
        lambda: api_client(key).get("/v1/fine_tuning/jobs"),
        lambda: client_for(alice).get("/jobs"),
    ):
        with stopping("finetuning_finetuningjob", END):
            answer = ask()
        connection.close()

        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "5")
        assert "The database did not answer. Try again" in answer.content.decode()


@pytest.mark.parametrize(
    ("reason", "says", "seconds"),
    [
        ("disk_full", "The database has no room right now. Nothing was changed.", "60"),
        ("too_many_connections", "The database did not answer.", "5"),
    ],
)
def test_a_database_without_room_may_be_asked_again(reason, says, seconds, key, alice, client_for, api_client) -> None:
    with stopping("finetuning_finetuningjob", [f"DO $$ BEGIN RAISE {reason}; END $$"]):
        page = client_for(alice).get("/jobs")
        answer = api_client(key).get("/v1/fine_tuning/jobs")

    for each in (page, answer):
        assert (each.status_code, each.headers["Retry-After"]) == (503, seconds)
        assert says in each.content.decode()
    assert answer.json()["error"]["code"] == "service_unavailable"
