"""Pages of a list by the row where the last page ended: rows that come or go meanwhile repeat and hide no others."""

from typing import Any, TypeVar

from django.db.models import Model, Q, QuerySet

T = TypeVar("T", bound=Model)
Order = tuple[str, str]  # a column and a unique column, each with `-` for descending, both in one direction
Place = tuple[Any, Any]  # a row's values of the two columns


def find_place(rows: QuerySet[T], pk: str, order: Order) -> Place | None:
    """Return the place of a row in the order; return None if `rows` has no such row."""
    if "\x00" in pk:
        return None
    try:
        found = rows.filter(pk=pk)
    except ValueError:  # a number is expected
        return None
    return found.values_list(*(name.removeprefix("-") for name in order)).first()


def beyond(rows: QuerySet[T], place: Place, order: Order) -> QuerySet[T]:
    """Return the rows after a place in the order."""
    (key, direction), (tie, _) = (_direction(name) for name in order)
    return rows.filter(Q(**{f"{key}__{direction}": place[0]}) | Q(**{key: place[0], f"{tie}__{direction}": place[1]}))


def reverse_of(order: Order) -> Order:
    """Return the opposite order."""
    key, tie = (name[1:] if name.startswith("-") else f"-{name}" for name in order)
    return key, tie


def _direction(name: str) -> tuple[str, str]:
    return (name[1:], "lt") if name.startswith("-") else (name, "gt")
