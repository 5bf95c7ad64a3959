"""Calls of the gateway to the database are repeated on a connection that the server has ended, and tell it the time."""

import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
from django.db import connection
from psycopg.errors import AdminShutdown, IdleInTransactionSessionTimeout, QueryCanceled, TransactionTimeout

from apps.core.database.clock import db_now
from apps.interfaces.gateway.database import call_again
from apps.interfaces.gateway.engines import routes


@pytest.mark.parametrize("reason", [AdminShutdown, IdleInTransactionSessionTimeout, QueryCanceled, TransactionTimeout])
def test_a_call_that_the_server_ended_is_repeated(reason) -> None:
    answers = iter(["ended", "answer"])

    def ask() -> str:
        if (answer := next(answers)) == "ended":
            with connection.wrap_database_errors:
                raise reason("ended by the server")
        return answer

    assert call_again(ask) == "answer"


def test_an_error_of_the_statement_itself_is_not_repeated() -> None:
    calls = []

    def fail() -> None:
        calls.append(1)
        raise LookupError("no such row")

    with pytest.raises(LookupError):
        call_again(fail)
    assert len(calls) == 1


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("ahead", [60.0, -60.0])
def test_times_are_those_of_the_database_wherever_this_machines_clock_stands(monkeypatch, ahead: float) -> None:
    monkeypatch.setattr(routes, "db_now", lambda: db_now() + timedelta(seconds=ahead))
    known = routes.Routes(SimpleNamespace(call=None))

    known._table = routes._read()

    assert known._table.clock_offset_seconds == pytest.approx(ahead, abs=5)
    assert known.now() - time.time() == pytest.approx(ahead, abs=5)
