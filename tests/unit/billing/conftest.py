"""Sixty-four connections at once, for what must hold under them."""

from collections.abc import Iterator

import pytest
from django.conf import settings
from django.db import connection

from tests.unit.billing.books import CONNECTIONS


@pytest.fixture
def many_connections(transactional_db: None) -> Iterator[None]:
    """Let each of 64 threads have a connection of its own."""
    options = settings.DATABASES["default"]["OPTIONS"]
    usual = options["pool"]
    connection.close()
    connection.close_pool()
    options["pool"] = {"min_size": 0, "max_size": CONNECTIONS + 4, "timeout": 120}
    yield
    connection.close()
    connection.close_pool()
    options["pool"] = usual
