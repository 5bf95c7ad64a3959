"""Fixtures of jobs and their attempts, for the pages that show them."""

from tests.support.attempts import call, claim, metered, reload  # noqa: F401 - fixtures
