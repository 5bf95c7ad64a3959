"""Statements that PostgreSQL parses and plans once per connection, for frequent ones with slow planning."""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Self, TypeVar

import psycopg
from django.db import DEFAULT_DB_ALIAS, connection, models

Row = TypeVar("Row", bound=models.Model)


class _PreparedCursor(psycopg.Cursor[tuple[Any, ...]]):
    def execute(self, query: Any, params: Any = None, **chosen: Any) -> Self:
        return super().execute(query, params, **(chosen | {"prepare": True}))


def fetch_prepared(statement: str, parameters: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Return the rows of a statement.

    Its text must not change from call to call, because the connection keeps each text. A parameter needs a cast if
    PostgreSQL cannot infer its type from its place.
    """
    connection.ensure_connection()
    make_cursor: Any = connection.make_debug_cursor if connection.queries_logged else connection.make_cursor
    with make_cursor(_PreparedCursor(connection.connection)) as cursor:
        cursor.execute(statement, parameters)
        return cursor.fetchall()


def columns_of(model: type[models.Model], alias: str) -> str:
    """Return the SQL that selects all columns of a model, for `read_row`."""
    return ", ".join(f'{alias}."{field.column}"' for field in model._meta.concrete_fields)


def read_row(model: type[Row], values: Iterator[Any]) -> Row | None:
    """Build a model's row from the columns of `columns_of` in a fetched row; return None if its key is null."""
    names, converters = _reading(model)
    taken = [next(values) for _ in names]
    for place, convert in converters:
        taken[place] = convert(taken[place], None, connection)
    row = model.from_db(DEFAULT_DB_ALIAS, names, taken)
    return row if row.pk is not None else None


@cache
def _reading(model: type[models.Model]) -> tuple[list[str], list[tuple[int, Any]]]:
    """Return the names of a model's columns, and the converters of those that need one, with their places."""
    fields = model._meta.concrete_fields
    converters = [
        (place, convert)
        for place, field in enumerate(fields)
        for convert in [
            *connection.ops.get_db_converters(field.get_col(field.model._meta.db_table)),
            *field.get_db_converters(connection),
        ]
    ]
    return [field.attname for field in fields], converters
