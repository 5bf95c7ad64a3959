"""Tables of pages as CSV: asked with `csv`, a page answers with the rows of its table of that name.

The page is made as usual, and its table is read. So the file has the rows of the page, and the same people get it.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from html.parser import HTMLParser

from django.conf import settings
from django.contrib.messages import get_messages
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.utils.translation import override

from apps.core.objects.downloads import download_csv, too_many_rows

MAX_ROWS = 1_000  # of a file whose table has pages
_NAME = re.compile(r"[\w.-]{1,80}")
_TABLE = r'<table[^>]*\sdata-csv="{}"[^>]*>(.*?)(?:<tfoot|</table)'
_VOID = frozenset({"br", "hr", "img", "input", "wbr"})
_CONTROLS = frozenset({"button", "dialog", "svg", "template", "textarea"})
_LINES = frozenset({"br", "div", "dd", "dt", "li", "p"})
_VALUES = {"time": "datetime", "data": "value"}  # attributes with what a program reads instead of the text
_FIGURE = re.compile(r"([+\-\N{MINUS SIGN}]?)\$?(\d{1,3}(?:,\d{3})+|\d+)(\.\d+)?([¢%]?)")
_NONE = "\N{EN DASH}"


def answer_with_table(request: HttpRequest, run: Callable[[], HttpResponseBase]) -> HttpResponseBase:
    """Return the answer of a page, or the table that the address names, in English as every export.

    Raises InvalidState if its view read more than MAX_ROWS rows with `rows_at_once`.
    """
    name = asked_table(request)
    if not name:
        return run()
    whole = request.GET.copy()
    for parameter in [each for each in whole if each.endswith(("after", "before"))]:
        del whole[parameter]  # the file begins with the first row
    request.GET = whole  # type: ignore[assignment]  # immutable only until here
    with override(settings.LANGUAGE_CODE):
        response = run()
    if not isinstance(response, HttpResponse) or response.status_code != 200:
        return response
    found = re.search(_TABLE.format(re.escape(name)), response.content.decode(), re.DOTALL)
    if not found:
        return response
    header, rows = _read_table(found[1])
    if hasattr(kept := get_messages(request), "used"):  # they wait for the next page, because a file shows none
        kept.used = False
    if hasattr(request, "has_most_rows") and len(rows) > MAX_ROWS:
        raise too_many_rows(MAX_ROWS)
    return download_csv(request, header, rows, filename=f"{name}.csv")


def rows_at_once(request: HttpRequest, table: str, usual: int) -> int:
    """Return how many rows of the table a page reads: as a file, one more than it may have, which is refused."""
    if asked_table(request) != table:
        return usual
    request.has_most_rows = True  # type: ignore[attr-defined]
    return MAX_ROWS + 1


def asked_table(request: HttpRequest) -> str:
    """Return the name of the table that the address asks for as a file; "" if it asks for the page."""
    name = request.GET.get("csv", "") if request.method in ("GET", "HEAD") else ""
    return name if _NAME.fullmatch(name) else ""


def _read_table(table: str) -> tuple[list[str], list[list[str | Decimal]]]:
    """Return the header and the rows. Columns of buttons, whose header is hidden, are left out."""
    reader = _TableReader()
    reader.feed(table)
    header, *rows = reader.rows
    kept = [
        column
        for column, name in enumerate(header)
        if name.text or any(len(row) > column and row[column].text for row in rows)
    ]
    names = [header[column].text or " ".join(header[column].hidden.split()) for column in kept]
    return names, [[_value(row[column]) if column < len(row) else "" for column in kept] for row in rows]


def _value(cell: "_Cell") -> str | Decimal:
    """Return a cell as programs read it. A dash is nothing.

    Of figures, 1,234 and $1,234 become 1234, 5¢ becomes 0.05, and 12% becomes 0.12.
    """
    if cell.text == _NONE:
        return ""
    found = _FIGURE.fullmatch(cell.text) if cell.is_figure else None
    if not found:
        return cell.text
    sign, digits, fraction, unit = found.groups("")
    plain = digits.replace(",", "") + fraction
    if not sign and not unit:
        return plain
    figure = Decimal(plain).scaleb(-2 if unit else 0)
    return figure if sign in ("", "+") else -figure


@dataclass
class _Cell:
    raw: str = ""
    hidden: str = ""  # the text for screen readers
    is_figure: bool = False  # it or an element in it has the class `num`

    @property
    def text(self) -> str:
        """The visible text; its lines are joined by commas."""
        return ", ".join(filter(None, (" ".join(line.split()) for line in self.raw.split("\n"))))


class _TableReader(HTMLParser):
    """The cells of a table of this installation's pages, whose tags are all closed."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[_Cell]] = []
        self._open: list[tuple[str, str]] = []  # the tags around the text, with "shown", "hidden" or "skipped"
        self._cell = _Cell()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self._cell = _Cell()
            width = given.get("colspan", "1")
            self.rows[-1] += [self._cell, *(_Cell() for _ in range(1, int(width)))]
        self._cell.is_figure |= "num" in given.get("class", "").split()
        self._add("\n" if tag in _LINES else " ")
        if tag in _VALUES and _VALUES[tag] in given:
            self._add(given[_VALUES[tag]])
        if tag not in _VOID:
            self._open.append((tag, self._kind(tag, given)))

    def handle_endtag(self, tag: str) -> None:
        while tag not in _VOID and self._open and self._open.pop()[0] != tag:
            pass
        if tag in _LINES:
            self._add("\n")

    def handle_data(self, data: str) -> None:
        self._add(data.replace("\n", " "))

    def _add(self, text: str) -> None:
        kind = self._open[-1][1] if self._open else "shown"
        if kind == "shown":
            self._cell.raw += text
        elif kind == "hidden":
            self._cell.hidden += text

    def _kind(self, tag: str, given: Mapping[str, str]) -> str:
        around = self._open[-1][1] if self._open else "shown"
        classes = given.get("class", "").split()
        is_value = tag in _VALUES and _VALUES[tag] in given
        is_other_choice = tag == "option" and "selected" not in given
        if around == "skipped" or tag in _CONTROLS or "btn" in classes or "popover" in given:
            return "skipped"
        if is_value or is_other_choice or "acts" in classes:
            return "skipped"
        return "hidden" if "vh" in classes else around
