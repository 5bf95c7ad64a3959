"""The parts that all lists of the pages share: search, filters and order in the address, pages, CSV."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Generic, TypeVar

from django.conf import settings
from django.db.models import Model, Q, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import render
from django.urls import reverse
from django.utils.cache import patch_vary_headers
from django.utils.http import urlencode
from django.utils.translation import gettext, override

from apps.core.database.keyset import KeysetPage, Order, read_page
from apps.core.database.read_times import counted_read
from apps.core.database.search import with_words
from apps.core.messages.translation import later
from apps.core.objects.downloads import download_csv, too_many_rows

# The usual orders, to which a list adds its own.
NEWEST_FIRST: Mapping[str, tuple[str, Order]] = {
    "": (later("Newest first"), ("-created_at", "-id")),
    "oldest": (later("Oldest first"), ("created_at", "id")),
}
PAGE_ROWS = 25
_MAX_CHARACTERS = 80
_MAX_WORDS = 6
_QUOTED = re.compile(r'"([^"]*)"')
_WORD = re.compile(r'(?:"[^"]*"|\S)+')
_MAX_EXPORTED = 100_000
_READ_AT_ONCE = 1000
Row = TypeVar("Row", bound=Model)


@dataclass(frozen=True)
class Filter:
    """A parameter that narrows a list. Each choice has a label and a condition; the first one is the default."""

    label: str
    choices: Mapping[str, tuple[str, Q]]


@dataclass(frozen=True, kw_only=True)
class Listing(Generic[Row]):
    """One list: its addresses, the fields to search, the filters (the first one as tabs) and the orders.

    The first order is the default. If `pairs` names a JSON field, a word `name=value` finds the rows with this pair.
    Quotation marks join words.
    """

    name: str  # in the plural, as pages call the rows
    hint: str
    url_name: str
    export_url_name: str
    searched: tuple[str, ...]
    filters: Mapping[str, Filter]
    orders: Mapping[str, tuple[str, Order]]
    pairs: str = ""

    def page(self, request: HttpRequest, rows: QuerySet[Row]) -> "ListPage[Row]":
        """Return the requested page: the rows after `after`, those before `before`, or else the first ones."""
        asked = self._read(request)
        chosen = self._choose(rows, asked)
        with counted_read():
            found = read_page(chosen, request.GET, order=self.orders[asked["sort"]][1], size=PAGE_ROWS)
        return ListPage(listing=self, found=found, asked=asked)

    def export(
        self,
        request: HttpRequest,
        rows: QuerySet[Row],
        *,
        header: Sequence[str],
        cells: Callable[[Any], Sequence[object]],
        joined: Callable[[list[Row]], Iterable[object]] = list,
    ) -> HttpResponseBase:
        """Return all rows that the request asks for as a CSV file. Raises InvalidState for over `_MAX_EXPORTED`.

        `joined` adds to many rows at once what is not in their table; `cells` gets what it returns, one by one.
        """
        found = self.chosen(request, rows)[: _MAX_EXPORTED + 1]
        with override(settings.LANGUAGE_CODE):
            name = self.name.replace(" ", "-").lower()
        with counted_read():
            parts = map(joined, _parts(_whole(found)))
            return download_csv(request, header, map(cells, chain.from_iterable(parts)), filename=f"{name}.csv")

    def chosen(self, request: HttpRequest, rows: QuerySet[Row]) -> QuerySet[Row]:
        """Return all of `rows` that the request asks for, in its order."""
        asked = self._read(request)
        return self._choose(rows, asked).order_by(*self.orders[asked["sort"]][1])

    def address(self, asked: Mapping[str, str], *, of: str = "") -> str:
        """Return the address of the list, or of another page that reads the same query, without defaults."""
        defaults = {"sort": next(iter(self.orders))} | {
            name: next(iter(each.choices), "") for name, each in self.filters.items()
        }
        query = urlencode({name: value for name, value in asked.items() if value and value != defaults.get(name)})
        return reverse(of or self.url_name) + (f"?{query}" if query else "")

    def _read(self, request: HttpRequest) -> dict[str, str]:
        """Return the words, the choice of each filter and the order. A value that is not offered is ignored."""

        def choice(name: str, choices: Mapping[str, object]) -> str:
            given = request.GET.get(name, "")
            return given if given in choices else next(iter(choices), "")

        words = request.GET.get("q", "").replace("\x00", "").strip()[:_MAX_CHARACTERS]
        chosen = {name: choice(name, each.choices) for name, each in self.filters.items()}
        return {"q": words, **chosen, "sort": choice("sort", self.orders)}

    def _choose(self, rows: QuerySet[Row], asked: Mapping[str, str]) -> QuerySet[Row]:
        for name, each in self.filters.items():
            rows = rows.filter(each.choices[asked[name]][1]) if each.choices else rows
        words = []
        for word in _words(asked["q"]):
            name, _, value = word.partition("=")
            if self.pairs and name and value:
                rows = rows.filter(**{f"{self.pairs}__contains": {name: value}})
            else:
                words.append(word)
        return with_words(rows, words, self.searched)


def _words(text: str) -> list[str]:
    """Return the first words. Spaces between two quotation marks do not end a word."""
    found = (_QUOTED.sub(r"\1", word) for word in _WORD.findall(text))
    return [word for word in found if word][:_MAX_WORDS]


def _whole(rows: QuerySet[Row]) -> Iterator[Row]:
    with closing(rows.iterator(chunk_size=_READ_AT_ONCE)) as found:  # type: ignore[type-var]  # a generator
        for number, row in enumerate(found):
            if number == _MAX_EXPORTED:
                raise too_many_rows(_MAX_EXPORTED)
            yield row


def _parts(rows: Iterator[Row]) -> Iterator[list[Row]]:
    while part := list(islice(rows, _READ_AT_ONCE)):
        yield part


@dataclass(frozen=True, kw_only=True)
class ListPage(Generic[Row]):
    """One page of a list, with the values of its head and its foot.

    `views` are the links that its reader saved; None for a list where views cannot be saved.
    """

    listing: Listing[Row]
    found: KeysetPage[Row]
    asked: Mapping[str, str]
    views: Iterable[object] | None = None

    @property
    def rows(self) -> list[Row]:
        return self.found.rows

    @property
    def address(self) -> str:
        """The address of this page, which htmx reloads."""
        return self.listing.address({**self.asked, **self.found.cursor})

    @property
    def export_url(self) -> str:
        return self.listing.address(self.asked, of=self.listing.export_url_name)

    @property
    def previous(self) -> str:
        """The address of the page before; "" if this is the first one."""
        return self.listing.address({**self.asked, **self.found.previous}) if self.found.has_previous else ""

    @property
    def next(self) -> str:
        return self.listing.address({**self.asked, **self.found.next}) if self.found.has_next else ""

    @property
    def query(self) -> str:
        """The search, filters and order as a query string; "" for the whole list in its usual order."""
        return self.listing.address(self.asked).partition("?")[2]

    @property
    def tabs(self) -> list[dict[str, Any]]:
        name, tabs = next(iter(self.listing.filters.items()))
        return [
            {
                "label": label,
                "url": self.listing.address({**self.asked, name: value}),
                "current": value == self.asked[name],
            }
            for value, (label, _) in tabs.choices.items()
        ]

    @property
    def tabs_label(self) -> str:
        return next(iter(self.listing.filters.values())).label

    @property
    def tab(self) -> tuple[str, str]:
        """The parameter that the tabs set, and its value."""
        name = next(iter(self.listing.filters))
        return name, self.asked[name]

    @property
    def selects(self) -> list[dict[str, Any]]:
        """The filters beside the tabs, and the order."""
        others = list(self.listing.filters.items())[1:]
        fields = [
            (name, each.label, [(value, label) for value, (label, _) in each.choices.items()]) for name, each in others
        ]
        fields.append(("sort", gettext("Order"), [(value, label) for value, (label, _) in self.listing.orders.items()]))
        return [
            {"name": name, "label": label, "options": options, "value": self.asked[name]}
            for name, label, options in fields
            if len(options) > 1
        ]


def render_list(
    request: HttpRequest,
    template: str,
    page: ListPage[Any],
    context: Mapping[str, object],
    *,
    status: int = 200,
) -> HttpResponse:
    """Return the page of a list; for htmx, only its partial `table`."""
    part = "#table" if request.headers.get("HX-Request") else ""
    response = render(request, template + part, {"list": page, **context}, status=status)
    patch_vary_headers(response, ["HX-Request"])
    return response
