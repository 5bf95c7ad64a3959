"""Fixtures of jobs and their attempts."""

from tests.support.attempts import attempt, claim, metered, reload  # noqa: F401 - fixtures
