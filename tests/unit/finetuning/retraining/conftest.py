"""A model in production, and a retraining whose two models are asked."""

import pytest

from apps.finetuning.lifecycle import RetrainingStatus
from apps.finetuning.models import FineTuningJob, Retraining
from apps.finetuning.tasks import retrain
from tests.factories.retraining import grow, make_plan, make_production, tick, train


@pytest.fixture
def job(floor, key, claim) -> FineTuningJob:
    return make_production(floor, key, claim)


@pytest.fixture
def compared(floor, job, key, claim) -> Retraining:
    """A retraining whose job has succeeded: both models are asked."""
    make_plan(job, key, min_gain_points=5.0)
    grow(job, 20)
    retrain()
    assert tick().status == RetrainingStatus.TRAINING
    train(floor, claim)
    return tick()
