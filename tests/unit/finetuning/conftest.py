"""Fixtures of jobs and their attempts."""

from tests.support.attempts import claim, floor, reload  # noqa: F401 - fixtures
