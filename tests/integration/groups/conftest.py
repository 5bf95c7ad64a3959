"""Fixtures of an agent before a control plane, a twin or the real one."""

from tests.services.internal_api import internal_url  # noqa: F401 - fixture
from tests.support.agent import models, plane  # noqa: F401 - fixtures
