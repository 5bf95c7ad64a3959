"""Statements that PostgreSQL parses and plans once for each connection, for frequent ones whose planning takes long."""

from collections.abc import Mapping
from typing import Any, Self

import psycopg
from django.db import connection


class _PreparedCursor(psycopg.Cursor[tuple[Any, ...]]):
    def execute(self, query: Any, params: Any = None, **chosen: Any) -> Self:
        return super().execute(query, params, **(chosen | {"prepare": True}))


def fetch_prepared(statement: str, parameters: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Return the rows of a statement. It must not change from call to call: each text is kept with the connection.

    A parameter whose type PostgreSQL cannot know from its place needs a cast.
    """
    connection.ensure_connection()
    make_cursor = connection.make_debug_cursor if connection.queries_logged else connection.make_cursor
    with make_cursor(_PreparedCursor(connection.connection)) as cursor:
        cursor.execute(statement, parameters)
        return cursor.fetchall()
