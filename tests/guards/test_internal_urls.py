"""The worker API answers nobody without a credential: every address, every method."""

from collections.abc import Iterator
from typing import Any

import pytest
from django.test import Client
from django.urls import URLPattern, URLResolver, get_resolver

URLCONF = "apps.config.urls_internal"
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")


def addresses(resolver: URLResolver | None = None, prefix: str = "/") -> Iterator[str]:
    """Yield each address with made-up ids in the places of its parameters."""
    for entry in (resolver or get_resolver(URLCONF)).url_patterns:
        route = prefix + str(entry.pattern)
        if isinstance(entry, URLResolver):
            yield from addresses(entry, route)
        elif isinstance(entry, URLPattern):
            for name in entry.pattern.converters:
                route = route.replace(f"<str:{name}>", "made-up").replace(f"<path:{name}>", "org/a/b")
            assert "<" not in route, f"teach this test the parameter of {route}"
            yield route


@pytest.mark.django_db
@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer annw_made-up"}], ids=["nobody", "wrong credential"])
@pytest.mark.parametrize("path", sorted(addresses()))
def test_an_address_is_closed(path: str, headers: dict[str, str], settings: Any) -> None:
    settings.ROOT_URLCONF = URLCONF
    client = Client()

    for method in METHODS:
        response = client.generic(method, path, b"{}", content_type="application/json", headers=headers)
        assert 400 <= response.status_code < 500, method
