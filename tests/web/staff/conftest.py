"""The operator console."""

import pytest
from django.test import Client


@pytest.fixture
def console(client_for, olga) -> Client:
    """The browser of an operator."""
    return client_for(olga)
