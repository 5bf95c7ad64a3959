"""The control plane's private listener for real worker processes of a test."""

from typing import Any

import pytest


@pytest.fixture
def internal_url(settings: Any, request: pytest.FixtureRequest) -> str:
    """Return the address of the worker API, which has no cookies and so no CSRF tokens."""
    settings.ROOT_URLCONF = "apps.config.urls_internal"
    settings.MIDDLEWARE = ["django.middleware.common.CommonMiddleware"]
    settings.INTERNAL_URL = request.getfixturevalue("live_server").url
    return settings.INTERNAL_URL
