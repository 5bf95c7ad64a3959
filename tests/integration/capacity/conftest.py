"""Fixtures of pools whose machines an engine starts."""

from tests.services.internal_api import internal_url  # noqa: F401 - fixture
from tests.services.slurm import slurm  # noqa: F401 - fixture
from tests.support.agent import models, plane  # noqa: F401 - fixtures
