"""Only what surely beats production is promoted; each end has its reason."""

import datetime
from collections.abc import Callable

import pytest
from django.db import transaction
from django.db.models import F

from apps.accounts.models import Membership, Notification, OrganizationEvent
from apps.core.database.clock import db_now
from apps.finetuning.jobs.control import request_cancellation
from apps.finetuning.jobs.retraining import progress as steps
from apps.finetuning.jobs.retraining import triggers
from apps.finetuning.lifecycle import RetrainingStatus
from apps.finetuning.models import FineTuningJob, Retraining, RetrainingPlan, Run
from apps.finetuning.tasks import retrain
from apps.serving.aliases import point_alias
from apps.serving.evals import progress
from apps.serving.evals.models import EvalRun
from apps.serving.models import Alias, Deployment
from tests.factories.retraining import REGRESSION, answer, grow, make_plan, tick, train
from tests.support.attempts import paused_at


@pytest.mark.slow
def test_both_models_answer_the_held_out_rows_within_what_the_job_left_of_the_maximum(compared) -> None:
    plan, job = compared.plan, compared.job
    runs = [compared.new_run, compared.production_run]

    assert compared.status == RetrainingStatus.COMPARING
    assert [run.model_name for run in runs] == [job.adapter_version.model_name, plan.alias.version.model_name]
    assert job.cost_nano + sum(run.cost_limit_nano for run in runs) <= plan.max_nano
    for run in runs:
        progress.prepare(run.pk)
        run.refresh_from_db()
        assert (run.status, run.total, run.error) == ("in_progress", 12, None)
        assert 0 < run.highest_cost_nano <= run.cost_limit_nano


def move_alias(retraining: Retraining) -> None:
    """Put the new model into production by hand."""
    point_alias(version=retraining.job.adapter_version, name="production", by="user_1", now=db_now())


def begin_canary(retraining: Retraining) -> None:
    version = retraining.job.adapter_version
    point_alias(version=version, name="production", by="user_1", now=db_now(), canary_percent=10)


def lower_role(retraining: Retraining) -> None:
    Membership.objects.update(role="viewer")


def nothing(retraining: Retraining) -> None:
    pass


Answers = dict[str, int]
DECISIONS: list[tuple[Answers, Answers, Callable[[Retraining], None], str, str]] = [
    ({"passed": 36}, {"passed": 18}, nothing, "promoted", "better"),
    ({"passed": 18}, {"passed": 18}, nothing, "kept", "not_better"),
    ({"passed": 21}, {"passed": 18}, nothing, "kept", "not_better"),  # by chance
    ({"passed": 9}, {"passed": 18}, nothing, "kept", "not_better"),
    ({"passed": 36}, {"passed": 18}, move_alias, "kept", "alias_moved"),
    ({"passed": 36}, {"passed": 18}, begin_canary, "kept", "alias_moved"),
    ({"passed": 36}, {"passed": 18}, lower_role, "kept", "insufficient_permissions"),
    ({"passed": 36}, {"passed": 18, "errors": 20}, nothing, "failed", "comparison_failed"),
]


@pytest.mark.slow
def test_only_a_model_that_surely_beats_production_takes_its_place(compared) -> None:
    for new, production, meanwhile, status, code in DECISIONS:
        with transaction.atomic():
            _check_decision(compared, new, production, meanwhile, status, code)
            transaction.set_rollback(True)


def _check_decision(
    compared: Retraining,
    new: Answers,
    production: Answers,
    meanwhile: Callable[[Retraining], None],
    status: str,
    code: str,
) -> None:
    before = Alias.objects.get().version
    answer(compared.new_run, **new)
    answer(compared.production_run, **production)

    decided = tick()
    meanwhile(decided)
    target = Alias.objects.get().version
    ended = tick()

    assert (ended.status, ended.code) == (status, code), ended.reason
    is_promoted = status == "promoted"
    alias = Alias.objects.get()
    assert alias.version == (ended.job.adapter_version if is_promoted else target)
    assert not is_promoted or alias.previous_version == before
    assert Notification.objects.filter(key=f"retraining:{ended.pk}").count() == 1
    if code != "comparison_failed":
        result = ended.held_out_result
        assert (result["rows"], result["new_passed"]) == (40, new["passed"])


@pytest.mark.slow
def test_a_gain_below_the_plans_is_no_reason_to_promote(compared) -> None:
    RetrainingPlan.objects.update(min_gain_points=60.0)
    answer(compared.new_run, passed=36)
    answer(compared.production_run, passed=18)

    ended = tick()

    assert (ended.status, ended.code) == ("kept", "not_better")
    assert "36 of 40" in ended.reason and "+45.0 points" in ended.reason and "+60" in ended.reason


@pytest.mark.slow
def test_a_better_model_that_forgets_regression_rows_is_kept_aside(floor, job, key, claim) -> None:
    make_plan(job, key, regression=REGRESSION, max_loss_points=20.0)
    grow(job, 20)
    retrain()
    tick()
    train(floor, claim)
    asked = tick()
    limits = asked.new_run.cost_limit_nano
    answer(asked.new_run, passed=36)
    answer(asked.production_run, passed=18)
    checking = tick()
    assert checking.status == RetrainingStatus.CHECKING and checking.new_run != asked.new_run
    spent = checking.job.cost_nano + 2 * (limits + checking.new_run.cost_limit_nano)
    assert spent <= checking.max_nano and checking.comparison_nano <= checking.max_nano

    for passed, status in ((28, "kept"), (38, "promoted")):
        with transaction.atomic():
            answer(checking.new_run, passed=passed)
            answer(checking.production_run, passed=38)
            tick()
            ended = tick()
            assert (ended.status, ended.regression_result["new_passed"]) == (status, passed), ended.reason
            transaction.set_rollback(True)


@pytest.mark.slow
def test_a_model_that_no_replica_has_loaded_is_tried_again_and_not_for_ever(compared) -> None:
    compared.job.adapter_version.loaded.all().delete()
    answer(compared.new_run, passed=36)
    answer(compared.production_run, passed=18)
    assert tick().status == RetrainingStatus.PROMOTING

    waiting = tick()
    assert (waiting.status, waiting.attempts) == ("promoting", 1)
    deployment = Deployment.objects.get(adapter_version=compared.job.adapter_version)
    assert deployment.last_requested_at is not None
    assert waiting.next_at > db_now() + datetime.timedelta(seconds=90)

    for _ in range(10):
        ended = tick()
    assert (ended.status, ended.code) == ("kept", "version_not_loaded")


@pytest.mark.slow
@pytest.mark.parametrize(("run_status", "message"), [("failed", "no room"), ("canceled", "canceled")])
def test_a_comparison_that_did_not_end_well_ends_the_retraining_with_its_reason(compared, run_status, message) -> None:
    EvalRun.objects.filter(pk=compared.new_run_id).update(
        status=run_status, error={"code": "x", "message": "no room"} if run_status == "failed" else None
    )

    ended = tick()

    assert (ended.status, ended.code) == ("failed", "comparison_failed") and message in ended.reason
    assert Alias.objects.get().version == compared.production
    assert EvalRun.objects.get(pk=compared.production_run_id).status == "canceled", "it asks nothing more"


def be_due() -> None:
    """Have the plan be due by a schedule, and begin what is due."""
    RetrainingPlan.objects.update(cadence="days", cadence_value=1, next_due_at=db_now() - datetime.timedelta(minutes=1))
    retrain()


@pytest.mark.slow
def test_a_version_is_not_trained_again_after_its_comparison_failed(compared, monkeypatch) -> None:
    EvalRun.objects.filter(pk=compared.new_run_id).update(status="canceled")
    assert tick().code == "comparison_failed"
    jobs = FineTuningJob.objects.count()
    monkeypatch.setattr(triggers, "MAX_KEPT", 1)

    for _ in range(3):
        be_due()
        assert (tick().status, tick().code) == ("skipped", "nothing_new")

    assert FineTuningJob.objects.count() == jobs


def test_a_job_that_fails_ends_the_retraining_and_is_tried_three_times_by_a_schedule(job, key) -> None:
    make_plan(job, key)
    grow(job, 20)
    retrain()
    for _ in range(3):
        begun = tick()
        request_cancellation(job=begun.job, by=key.key.pk, now=db_now())
        ended = tick()
        assert (ended.status, ended.code, ended.reason) == ("failed", "job_failed", "The job is cancelled.")
        retrain()
        assert tick() == ended
        be_due()

    assert (tick().status, tick().code) == ("skipped", "nothing_new")


def test_a_job_that_stays_paused_ends_the_retraining_and_stays_paused(job, key, claim) -> None:
    make_plan(job, key)
    grow(job, 20)
    retrain()
    begun = tick()
    paused_at(claim().start(), begun.job, step=1, seconds=1.0)
    assert tick().status == RetrainingStatus.TRAINING

    Run.objects.filter(job=begun.job).update(finished_at=F("finished_at") - steps.MAX_PAUSED)
    ended = tick()

    assert (ended.status, ended.code) == ("failed", "job_paused") and "3 days" in ended.reason
    assert FineTuningJob.objects.get(pk=begun.job_id).status == "paused"
    assert OrganizationEvent.objects.get(subject=ended.pk).type == "retraining.failed"
    be_due()
    assert tick().code == "nothing_new", "another job would train on the same rows"


def test_an_unforeseen_error_is_tried_again_and_stops_no_other(job, key, monkeypatch) -> None:
    def broken(retraining: Retraining, now: datetime.datetime) -> None:
        raise RuntimeError("broken")

    make_plan(job, key)
    grow(job, 20)
    monkeypatch.setitem(steps._STEPS, RetrainingStatus.WAITING, broken)
    retrain()
    assert (tick().attempts, tick().attempts) == (2, 3)

    for _ in range(10):
        ended = tick()
    assert (ended.status, ended.code) == ("refused", "internal_error")
