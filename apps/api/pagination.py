"""OpenAI's pages: `limit`, `after=<last id>`, answered by `data` and `has_more`."""

from collections.abc import Callable
from typing import Any, TypeVar

from django.db.models import Model, Q, QuerySet
from rest_framework.request import Request

from apps.core.errors import InvalidValue

T = TypeVar("T", bound=Model)


def read_limit(request: Request, *, default: int, maximum: int) -> int:
    """Raises InvalidValue unless `limit` is a whole number from 1 to `maximum`."""
    text = request.query_params.get("limit")
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= maximum):
        raise InvalidValue(f"'limit' must be a whole number from 1 to {maximum}.", param="limit")
    return int(text[:9])


def page(
    request: Request,
    rows: QuerySet[T],
    render: Callable[[T], dict[str, Any]],
    *,
    default_limit: int = 20,
    maximum: int = 100,
    order: tuple[str, str] = ("-created_at", "-id"),
) -> dict[str, Any]:
    """Return one page of `rows` as OpenAI's list object.

    `order` names a time or number and a unique field, each with `-` for descending, both in one direction. An `after`
    that names no row of `rows` (unknown, or another tenant's) raises InvalidValue: a page that starts anywhere else
    would repeat or lose items.
    """
    limit = read_limit(request, default=default_limit, maximum=maximum)
    if after := request.query_params.get("after"):
        rows = _beyond(rows, after, order)
    found = list(rows.order_by(*order)[: limit + 1])
    data = [render(row) for row in found[:limit]]
    ids = (
        {"first_id": data[0].get("id"), "last_id": data[-1].get("id")} if data else {"first_id": None, "last_id": None}
    )
    return {"object": "list", "data": data, "has_more": len(found) > limit} | ids


def _beyond(rows: QuerySet[T], after: str, order: tuple[str, str]) -> QuerySet[T]:
    (key, direction), (tie, _) = (_direction(name) for name in order)
    last = rows.filter(pk=after).values_list(key, tie).first() if "\x00" not in after else None
    if last is None:
        raise InvalidValue(f"No such object: {after}.", param="after")
    return rows.filter(Q(**{f"{key}__{direction}": last[0]}) | Q(**{key: last[0], f"{tie}__{direction}": last[1]}))


def _direction(name: str) -> tuple[str, str]:
    return (name[1:], "lt") if name.startswith("-") else (name, "gt")
