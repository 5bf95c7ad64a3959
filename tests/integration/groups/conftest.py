"""Fixtures of an agent before a control plane."""

from tests.support.agent import models, plane  # noqa: F401 - fixtures
