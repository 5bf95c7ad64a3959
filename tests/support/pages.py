"""What tests read of a page, its markup without the whitespace that a browser ignores, and forms that they send."""

import csv
import html
import io
import re
from typing import Any

from django.http import HttpResponse, StreamingHttpResponse
from django.test import Client

# Their content is kept: browsers show it as it is.
_KEPT = re.compile(r"(<(pre|textarea|script|style)\b.*?</\2>)", re.DOTALL)
_SENT_ON_LOAD = re.compile(r'<[^<>]*\bhx-post="([^"]*)"[^<>]*\bhx-trigger="load\b')


class PageClient(Client):
    """A client that sends what a page sends when it is loaded, and removes the whitespace around its tags.

    So no test depends on the indentation of templates.
    """

    def get(self, path: str, *args: Any, **kwargs: Any) -> Any:
        """Return the response to a GET; if the page posts something on load, the response to a GET after that."""
        response = super().get(path, *args, **kwargs)
        if _is_page(response) and (sent := _SENT_ON_LOAD.search(response.content.decode())):
            path_of_page = response.wsgi_request.get_full_path()
            answer = self.post(html.unescape(sent[1]) or path_of_page, headers={"HX-Request": "true"})
            assert answer.status_code == 200, "the scripts take a redirect for a lost session"
            return super().get(path, *args, **kwargs)
        return response

    def request(self, **request: Any) -> Any:
        """Return the response to a request."""
        response = super().request(**request)
        if _is_page(response):
            response.content = squeeze(response.content.decode()).encode()
        return response


def squeeze(markup: str) -> str:
    """Return markup without whitespace around its tags, except in elements that show it."""
    pieces = _KEPT.split(markup)
    # A piece, then a kept element and the name of its tag.
    return "".join(piece if place % 3 else _squeeze(piece) for place, piece in enumerate(pieces) if place % 3 != 2)


def _squeeze(piece: str) -> str:
    # Without regular expressions, which took a twentieth of the time of all tests of pages. The marks keep its ends.
    single = " ".join(f"|{piece}|".split())
    return single.replace(" <", "<").replace(" >", ">").replace("> ", ">")[1:-1]


def _is_page(response: object) -> bool:
    return isinstance(response, HttpResponse) and response.headers.get("Content-Type", "").startswith("text/html")


def text(response: HttpResponse) -> str:
    """Return a page as its reader sees it: with characters, not with entities."""
    return html.unescape(response.content.decode())


def csv_rows(response: StreamingHttpResponse) -> list[dict[str, str]]:
    """Return the rows of a CSV download by their columns."""
    return list(csv.DictReader(io.StringIO(b"".join(response.streaming_content).decode())))
