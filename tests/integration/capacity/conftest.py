"""Fixtures of pools whose machines an engine starts."""

from tests.support.internal_api import internal_url  # noqa: F401 - fixture
