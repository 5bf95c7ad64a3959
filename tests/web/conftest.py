"""Fixtures of jobs and their attempts, for the pages that show them."""

from tests.support.attempts import call, claim, metered, reload, version  # noqa: F401 - fixtures
