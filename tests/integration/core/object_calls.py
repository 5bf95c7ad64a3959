"""Calls of the addresses that an object store signs."""

import urllib.error
import urllib.request
from email.message import Message

from django.urls import include, path

from apps.core.objects.store import object_key

urlpatterns = [path("objects/", include("apps.core.objects.urls"))]  # of the server of `web_url`
KEY = object_key("org_01", "datasets", "file-01", "data.jsonl")
CONTENT = b"".join(b"%08d\n" % number for number in range(100_000))  # 900 kB: several chunks


def fetch(url: str, *, method: str = "GET", body: bytes | None = None, **headers: str) -> tuple[int, bytes, Message]:
    # Without a type urllib announces a form, which moto would then try to read as one.
    named = {"Content-Type": "application/octet-stream"} | headers
    request = urllib.request.Request(url, data=body, method=method, headers=named)
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, response.read(), response.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(), error.headers
