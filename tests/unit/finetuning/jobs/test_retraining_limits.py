"""Retraining plans cost the tasks of everyone a limited time."""

import pytest

from apps.core.errors import RateLimited
from apps.finetuning.jobs.retraining import plans
from apps.finetuning.jobs.retraining import progress as steps
from apps.finetuning.lifecycle import RetrainingStatus
from apps.finetuning.models import FineTuningJob, Retraining
from apps.finetuning.tasks import retrain
from tests.factories.retraining import grow, make_plan, make_production


@pytest.fixture
def job(floor, key, claim) -> FineTuningJob:
    return make_production(floor, key, claim)


def test_a_tick_takes_a_limited_time_and_plans_are_not_created_without_end(floor, job, key, monkeypatch) -> None:
    make_plan(job, key)
    grow(job, 20)
    monkeypatch.setattr(steps, "MAX_SECONDS", -1.0)
    retrain()
    assert Retraining.objects.get().status == RetrainingStatus.WAITING
    monkeypatch.setattr(steps, "MAX_SECONDS", 10.0)
    retrain()
    assert Retraining.objects.get().status == RetrainingStatus.TRAINING

    monkeypatch.setattr(plans, "MAX_CREATED_IN_AN_HOUR", 1)
    with pytest.raises(RateLimited, match="1 retraining plans an hour"):
        make_plan(job, key, name="another")
