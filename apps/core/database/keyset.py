"""Pages of a list that begin after the last row of the page before.

Rows that are added or deleted meanwhile make no other row repeat or disappear.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from django.db.models import Model, Q, QuerySet

T = TypeVar("T", bound=Model)
Order = tuple[str, str]  # a column and a unique column, each with `-` for descending, both in one direction
Place = tuple[Any, Any]  # a row's values of the two columns


@dataclass(frozen=True, kw_only=True)
class KeysetPage(Generic[T]):
    """Rows in the order of the list.

    `cursor` names the row that the page was requested with; it is empty for the first page.
    """

    rows: list[T]
    cursor: Mapping[str, str]
    has_previous: bool
    has_next: bool

    @property
    def previous(self) -> dict[str, str]:
        """The parameter that asks for the page before; empty if this is the first one."""
        return {"before": str(self.rows[0].pk)} if self.has_previous else {}

    @property
    def next(self) -> dict[str, str]:
        """The parameter that asks for the page after; empty if this is the last one."""
        return {"after": str(self.rows[-1].pk)} if self.has_next else {}


def read_page(rows: QuerySet[T], asked: Mapping[str, str], *, order: Order, size: int) -> KeysetPage[T]:
    """Return at most `size` of `rows`.

    They are those after the row `after`, those before the row `before`, or else the first ones.
    """
    after, before = asked.get("after", ""), asked.get("before", "")
    way = reverse_of(order) if before else order
    place = find_place(rows, before or after, order) if before or after else None
    found = first_rows(beyond(rows, place, way).order_by(*way), size + 1) if place else []
    if not found:  # the first page, also where the named row or all rows beyond it are gone
        place, before, after = None, "", ""
        found = first_rows(rows.order_by(*order), size + 1)
    has_more, found = len(found) > size, found[:size]
    if before:
        found.reverse()
    return KeysetPage(
        rows=found,
        cursor={"before": before} if before else {"after": after} if after else {},
        has_previous=has_more if before else place is not None,
        has_next=bool(before) or has_more,
    )


def first_rows(rows: QuerySet[T], count: int) -> list[T]:
    """Return the first `count` of `rows`. If related rows are joined, a separate statement chooses them first.

    Row-level security gives each joined table a condition on the same organization. PostgreSQL assumes that these
    conditions are independent, so it expects hardly any row. It would join all rows of a large organization and then
    sort them.
    """
    if not rows.query.select_related:
        return list(rows[:count])
    chosen = list(rows.values_list("pk", flat=True)[:count])
    return list(rows.filter(pk__in=chosen)) if chosen else []


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
    (key, direction), (tie, _) = ((name[1:], "lt") if name.startswith("-") else (name, "gt") for name in order)
    # The first condition follows from the second. PostgreSQL begins to read an index there, but not at an alternative.
    rows = rows.filter(**{f"{key}__{direction}e": place[0]})
    return rows.filter(Q(**{f"{key}__{direction}": place[0]}) | Q(**{key: place[0], f"{tie}__{direction}": place[1]}))


def reverse_of(order: Order) -> Order:
    """Return the opposite order."""
    key, tie = (name[1:] if name.startswith("-") else f"-{name}" for name in order)
    return key, tie
