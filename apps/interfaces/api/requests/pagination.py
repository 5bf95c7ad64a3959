"""OpenAI's pages: requested by `limit` and `after=<last id>`, returned as `data` and `has_more`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from typing import Annotated, Any, Generic, Literal, TypedDict, TypeVar

import msgspec
from django.db.models import Model, QuerySet
from msgspec import Meta

from apps.core.database.keyset import Order, beyond, find_place, first_rows
from apps.core.database.read_times import counted_read
from apps.core.database.search import with_words
from apps.core.errors import InvalidValue

PAGE_BYTES = 16 * 1024 * 1024  # of a page whose rows may be large
_MAX_WORDS = 6
T = TypeVar("T", bound=Model)
Rendered = TypeVar("Rendered")
After = Annotated[str, Meta(description="The id of the last object of the page before.")]


class ListObject(TypedDict, Generic[Rendered]):
    """One page. The next one is asked for by `after=<last_id>` while `has_more` is true."""

    object: Literal["list"]
    data: list[Rendered]
    has_more: bool
    first_id: str | None
    last_id: str | None


class PageQuery(msgspec.Struct):
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    after: After | None = None


class LongPageQuery(PageQuery):
    """For lists that have few rows: most clients get all of them at once."""

    limit: Annotated[int, Meta(ge=1, le=100)] = 100


class SearchQuery(PageQuery):
    q: Annotated[str, Meta(max_length=80, description="Words that an object must contain.")] | None = None


def page(
    query: PageQuery,
    rows: QuerySet[T],
    render: Callable[[T], Rendered],
    *,
    order: Order = ("-created_at", "-id"),
    most_bytes: int | None = None,
    places: QuerySet[T] | None = None,
) -> ListObject[Rendered]:
    """Return one page of `rows` as OpenAI's list object, as `take` finds them."""
    found, has_more = take(query, rows, order=order, most_bytes=most_bytes, places=places)
    return list_object([render(row) for row in found], has_more=has_more)


def page_together(
    query: PageQuery,
    rows: QuerySet[T],
    render: Callable[[list[T]], list[Rendered]],
    *,
    order: Order = ("-created_at", "-id"),
    places: QuerySet[T] | None = None,
) -> ListObject[Rendered]:
    """Return one page of `rows` as `page` does, for objects that are rendered by statements for all of them."""
    found, has_more = take(query, rows, order=order, places=places)
    return list_object(render(found), has_more=has_more)


def take(
    query: PageQuery,
    rows: QuerySet[T],
    *,
    order: Order = ("-created_at", "-id"),
    most_bytes: int | None = None,
    places: QuerySet[T] | None = None,
) -> tuple[list[T], bool]:
    """Return the rows of one page, and whether there are more.

    A page of rows that have `bytes` ends early, but not before its first row, where it would exceed `most_bytes`.

    An `after` that names no row of `rows` (unknown, or another tenant's) raises InvalidValue, because a page that
    starts elsewhere would repeat or lose items. It may name one of `places`, which also has rows that are deleted or
    that a filter leaves out: clients delete or change what a page lists and then ask for the next one.
    """
    if query.after:
        last = find_place(rows if places is None else places, query.after, order)
        if last is None:
            raise _unknown(query.after)
        rows = beyond(rows, last, order)
    if most_bytes is not None:
        return _take_bytes(query.limit, rows.order_by(*order), most_bytes)
    with counted_read():
        found = first_rows(rows.order_by(*order), query.limit + 1)
    return found[: query.limit], len(found) > query.limit


def _take_bytes(limit: int, rows: QuerySet[T], most_bytes: int) -> tuple[list[T], bool]:
    with counted_read():
        sizes = list(rows.values_list("pk", "bytes")[: limit + 1])
    totals = accumulate(size for _, size in sizes)
    fitting = sum(total <= most_bytes for total in totals)
    shown = [pk for pk, _ in sizes[: min(max(fitting, 1), limit)]]
    return list(rows.filter(pk__in=shown)), len(sizes) > len(shown)


def with_words_of(query: SearchQuery, rows: QuerySet[T], *, fields: Sequence[str]) -> QuerySet[T]:
    """Return the rows that contain each word of `q` in any of the fields."""
    return with_words(rows, (query.q or "").split()[:_MAX_WORDS], fields)


@dataclass(frozen=True)
class Source:
    """One kind of rows of a list with several kinds, each with the annotations `listed_at` and `listed_id`.

    A page holds at most `most` rows of this kind, and may begin after any of `places`.
    """

    rows: QuerySet[Any]
    render: Callable[[Any], Any]
    most: int
    places: QuerySet[Any]


def merged_page(query: PageQuery, sources: Sequence[Source], *, is_descending: bool) -> ListObject[Any]:
    """Return one page of several kinds of rows ordered by time, as `page` does for one kind."""
    limit = query.limit
    sign = "-" if is_descending else ""
    order = (f"{sign}listed_at", f"{sign}listed_id")
    last = _last(sources, query.after) if query.after else None
    found, ends = [], []
    for source in sources:
        rows = source.rows if last is None else beyond(source.rows, last, order)
        most = min(limit, source.most)
        with counted_read():
            fetched = first_rows(rows.order_by(*order), most + 1)
        found += [(row.listed_at, row.listed_id, row, source.render) for row in fetched[:most]]
        ends += [(row.listed_at, row.listed_id) for row in fetched[most:]]  # rows beyond this one are unknown
    found.sort(key=itemgetter(0, 1), reverse=is_descending)
    if ends:
        end = max(ends) if is_descending else min(ends)
        found = [one for one in found if (one[:2] > end if is_descending else one[:2] < end)]
    data = [render(row) for _, _, row, render in found[:limit]]
    return list_object(data, has_more=bool(ends) or len(found) > limit)


def _last(sources: Sequence[Source], after: str) -> tuple[object, object]:
    if "\x00" not in after:
        for source in sources:
            if last := source.places.filter(listed_id=after).values_list("listed_at", "listed_id").first():
                return last
    raise _unknown(after)


def list_object(data: list[Rendered], *, has_more: bool = False) -> ListObject[Rendered]:
    """Return OpenAI's list object of rendered objects."""
    ends: list[Any] = [data[0], data[-1]] if data else [{}, {}]
    first_id, last_id = (each.get("id") for each in ends)
    return {"object": "list", "data": data, "has_more": has_more, "first_id": first_id, "last_id": last_id}


def _unknown(after: str) -> InvalidValue:
    text = f"No such object: {after[:64]}. 'after' must be the id of the last object of the page before."
    return InvalidValue(text, param="after")
