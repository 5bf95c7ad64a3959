"""OpenAI's pages: requested by `limit` and `after=<last id>`, returned as `data` and `has_more`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeVar

from django.db.models import Model, Q, QuerySet
from rest_framework.request import Request

from apps.core.errors import InvalidValue

T = TypeVar("T", bound=Model)


def read_limit(request: Request, *, default: int, maximum: int) -> int:
    """Return `limit` or the default. Raises InvalidValue unless it is a whole number from 1 to `maximum`."""
    text = request.query_params.get("limit")
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= maximum):
        raise InvalidValue(f"'limit' must be a whole number from 1 to {maximum}.", param="limit")
    return int(text[:9])


def page(
    request: Request,
    rows: QuerySet[T],
    render: Callable[[T], dict[str, object]],
    *,
    default_limit: int = 20,
    maximum: int = 100,
    order: tuple[str, str] = ("-created_at", "-id"),
) -> dict[str, object]:
    """Return one page of `rows` as OpenAI's list object.

    `order` names a time or number and a unique field, each with `-` for descending, both in one direction. An `after`
    that names no row of `rows` (unknown, or another tenant's) raises InvalidValue, because a page that starts elsewhere
    would repeat or lose items.
    """
    limit = read_limit(request, default=default_limit, maximum=maximum)
    if after := request.query_params.get("after"):
        rows = _beyond(rows, after, order)
    found = list(rows.order_by(*order)[: limit + 1])
    return _list_object([render(row) for row in found[:limit]], has_more=len(found) > limit)


@dataclass(frozen=True)
class Source:
    """One kind of rows of a list with several kinds, each with the annotations `listed_at` and `listed_id`.

    A page holds at most `most` rows of this kind.
    """

    rows: QuerySet[Any]
    render: Callable[[Any], dict[str, object]]
    most: int


def merged_page(
    request: Request, sources: Sequence[Source], *, default_limit: int, maximum: int, is_descending: bool
) -> dict[str, object]:
    """Return one page of several kinds of rows ordered by time, as `page` does for one kind."""
    limit = read_limit(request, default=default_limit, maximum=maximum)
    sign = "-" if is_descending else ""
    order = (f"{sign}listed_at", f"{sign}listed_id")
    last = _last(sources, after) if (after := request.query_params.get("after")) else None
    found, ends = [], []
    for source in sources:
        rows = source.rows if last is None else _past(source.rows, last, order)
        most = min(limit, source.most)
        fetched = list(rows.order_by(*order)[: most + 1])
        found += [(row.listed_at, row.listed_id, row, source.render) for row in fetched[:most]]
        ends += [(row.listed_at, row.listed_id) for row in fetched[most:]]  # rows beyond this one are unknown
    found.sort(key=itemgetter(0, 1), reverse=is_descending)
    if ends:
        end = max(ends) if is_descending else min(ends)
        found = [one for one in found if (one[:2] > end if is_descending else one[:2] < end)]
    data = [render(row) for _, _, row, render in found[:limit]]
    return _list_object(data, has_more=bool(ends) or len(found) > limit)


def _last(sources: Sequence[Source], after: str) -> tuple[object, object]:
    if "\x00" not in after:
        for source in sources:
            if last := source.rows.filter(listed_id=after).values_list("listed_at", "listed_id").first():
                return last
    raise _unknown(after)


def _list_object(data: list[dict[str, object]], *, has_more: bool) -> dict[str, object]:
    ids = (
        {"first_id": data[0].get("id"), "last_id": data[-1].get("id")} if data else {"first_id": None, "last_id": None}
    )
    return {"object": "list", "data": data, "has_more": has_more} | ids


def _unknown(after: str) -> InvalidValue:
    text = f"No such object: {after[:64]}. 'after' must be the id of the last object of the page before."
    return InvalidValue(text, param="after")


def _beyond(rows: QuerySet[T], after: str, order: tuple[str, str]) -> QuerySet[T]:
    names = [name.removeprefix("-") for name in order]
    last = rows.filter(pk=after).values_list(*names).first() if "\x00" not in after else None
    if last is None:
        raise _unknown(after)
    return _past(rows, last, order)


def _past(rows: QuerySet[T], last: tuple[object, object], order: tuple[str, str]) -> QuerySet[T]:
    (key, direction), (tie, _) = (_direction(name) for name in order)
    return rows.filter(Q(**{f"{key}__{direction}": last[0]}) | Q(**{key: last[0], f"{tie}__{direction}": last[1]}))


def _direction(name: str) -> tuple[str, str]:
    return (name[1:], "lt") if name.startswith("-") else (name, "gt")
