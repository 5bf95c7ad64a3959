"""`anneal retrain`: a plan is made after its price is accepted, started, followed, stopped and deleted."""

import pytest

from apps.finetuning.models import RetrainingPlan
from tests.factories.retraining import answer, make_production, tick, train


@pytest.mark.slow
def test_a_plan_is_made_started_followed_and_deleted(anneal, floor, key, claim) -> None:
    job = make_production(floor, key, claim)
    create = (
        "retrain", "create", "weekly", "--job", job.pk, "--dataset", "support", "--held-out", "support-held-out",
        "--alias", "production", "--max-cost", "20", "--every", "week", "--on", "1", "--hour", "3",
    )  # fmt: skip
    declined = anneal(*create)
    assert declined.exit_code == 1 and not RetrainingPlan.objects.exists()
    made = anneal(*create, "--yes")
    plan = RetrainingPlan.objects.get()
    assert made.exit_code == 0 and f"{plan.pk} is due 2" in made.output, made.errors
    assert "weekly" in anneal("retrain", "list").output

    assert anneal("retrain", "start", plan.pk, "--yes", "--json").json["status"] == "waiting"
    tick()
    train(floor, claim)
    asked = tick()
    answer(asked.new_run, passed=36)
    answer(asked.production_run, passed=18)
    tick()
    tick()
    listed = anneal("retrain", "history", plan.pk)
    assert "promoted" in listed.output and "+45.0 (" in listed.output

    assert "is stopped" in anneal("retrain", "stop", plan.pk).output
    assert anneal("retrain", "resume", plan.pk, "--json").json["enabled"]
    assert anneal("retrain", "delete", plan.pk).exit_code == 0 and not RetrainingPlan.objects.exists()
    assert anneal("retrain", "history", plan.pk).exit_code == 4
