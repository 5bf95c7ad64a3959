"""The fixtures of finished jobs, of which adapters come."""

from tests.support.attempts import claim, reload, version  # noqa: F401 - fixtures
