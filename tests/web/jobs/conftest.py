"""The setup that every page of a job needs."""

import pytest

from apps.accounts.models import Organization
from tests.factories.finetuning import TrainingSetup


@pytest.fixture
def floor(organization: Organization) -> TrainingSetup:
    return TrainingSetup(organization)
