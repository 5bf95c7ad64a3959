"""A worker that calls the worker API."""

from tests.support.attempts import call  # noqa: F401 - fixture
