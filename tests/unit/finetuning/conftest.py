"""Fixtures of jobs and their attempts."""

from tests.support.attempts import attempt, claim, floor, metered, reload  # noqa: F401 - fixtures
