"""Calls of the gateway to the database are repeated on a connection that the server has ended."""

import pytest
from django.db import connection
from psycopg.errors import AdminShutdown, IdleInTransactionSessionTimeout, QueryCanceled, TransactionTimeout

from apps.interfaces.gateway.database import call_again


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
