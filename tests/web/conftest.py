"""Fixtures of jobs and their attempts, for the pages that show them."""

from tests.unit.finetuning.conftest import claim, floor, reload  # noqa: F401 - fixtures
