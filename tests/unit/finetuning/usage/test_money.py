"""What billing decides about jobs that wait or ran: nothing starts for who is suspended, idle hours are counted."""

import datetime
from typing import Any

import pytest

from apps.accounts.login.key_operations import IssuedKey
from apps.accounts.members.projects import create_project
from apps.accounts.models import ApiKey, User, default_project_id
from apps.billing.budget_settings import set_budget
from apps.billing.models import BudgetPeriod
from apps.billing.operations import set_spending
from apps.core.database.clock import db_now
from apps.finetuning.jobs import control
from apps.finetuning.jobs.creation import create_job
from apps.finetuning.jobs.requests import JobRequest
from apps.finetuning.jobs.waits import WaitCause, explain_wait
from apps.finetuning.models import FineTuningJob, Run, Worker
from apps.finetuning.pools.margins import list_margins
from apps.finetuning.runs import leases
from apps.finetuning.runs.queue.queue_order import queue_positions
from apps.finetuning.usage.quotas import set_quota
from tests.factories.finetuning import make_training_file
from tests.factories.money import USD
from tests.support.attempts import TrainingSetup


def test_what_a_suspended_organization_queued_waits_until_it_has_paid(floor: TrainingSetup, claim) -> None:
    job = floor.job()
    set_spending(organization=floor.organization, stopped_because="You owe $5.00. Top up to continue.")

    assert claim() is None
    assert queue_positions(pool=floor.pool, runs=[job.runs.get()], now=db_now()) == {}

    set_spending(organization=floor.organization, stopped_because="")
    assert claim() is not None


def test_a_suspended_organizations_running_jobs_keep_a_checkpoint_and_pause(floor: TrainingSetup, claim) -> None:
    job = floor.job()
    claim().start()

    for expected in (1, 0):
        assert control.pause_jobs_of(organization_id=floor.organization.pk, now=db_now()) == expected

    assert FineTuningJob.objects.get(pk=job.pk).status == "pausing"


def test_a_job_that_ends_just_before_it_is_asked_to_pause_does_not_keep_the_others_running(
    floor: TrainingSetup, claim, monkeypatch
) -> None:
    floor.job(), floor.job()
    for _ in range(2):
        claim().start()
    ask, asked = control.request_pause, []

    def end_first(*, job: FineTuningJob, by: str, now: datetime.datetime) -> FineTuningJob:
        if not asked:
            ask(job=job, by="key_test", now=now)  # it is not running any more
        asked.append(job.pk)
        return ask(job=job, by=by, now=now)

    monkeypatch.setattr(control, "request_pause", end_first)

    assert control.pause_jobs_of(organization_id=floor.organization.pk, now=db_now()) == 1
    assert set(FineTuningJob.objects.values_list("status", flat=True)) == {"pausing"}


def job_by(floor: TrainingSetup, by: str, **request: Any) -> FineTuningJob:
    version = make_training_file(floor.organization, floor.base_model)
    asked = JobRequest(base_model=floor.base_model.name, training_file=version.pk, **request)
    return create_job(organization=floor.organization, request=asked, by=by, now=db_now())


@pytest.mark.parametrize("scope", ["organization", "label", "key", "rotated key", "member", "project"])
def test_a_used_up_budget_that_pauses_lets_no_queued_job_start_and_says_why(
    floor: TrainingSetup, key: IssuedKey, alice: User, bob: User, claim, scope: str
) -> None:
    organization, now = floor.organization, db_now()
    set_quota(organization=organization, by="system", now=now, concurrent_gpus=4)
    search = create_project(organization=organization, name="Search", is_private=False, by=alice, now=now)
    targets = {"organization": "", "label": "team=a=b", "member": alice.pk, "project": default_project_id(organization)}
    ApiKey.objects.filter(pk=key.key.pk).update(first_key="key_first" if scope == "rotated key" else "")
    asked: dict[str, Any] = {
        "organization": organization, "scope": scope.removeprefix("rotated "), "by": alice.pk, "now": now,
        "target": targets.get(scope, key.key.pk), "limit_nano": 99 * USD,
    }  # fmt: skip
    running, lost, waiting = (job_by(floor, key.key.pk, metadata={"team": "a=b"}) for _ in range(3))
    claim().start()
    attempt = claim().start()
    attempt.fall_silent()
    leases.reclaim(attempt.run.pk)
    other = job_by(floor, bob.pk, project=search.pk)
    budget = set_budget(mode="alert", **asked)
    BudgetPeriod.objects.update(spent_nano=budget.limit_nano)
    set_budget(mode="pause", **asked)

    assert control.pause_jobs_of_budget(budget_id=budget.pk, now=now) == 1
    taken = [attempt.claimed.spec.job_id for attempt in (claim(), claim(), claim()) if attempt]

    assert taken == ([] if scope == "organization" else [other.pk])
    assert FineTuningJob.objects.get(pk=running.pk).status == "pausing"
    for job in (lost, waiting):
        wait = explain_wait(job=FineTuningJob.objects.get(pk=job.pk), now=now)
        assert wait is not None and wait.cause == WaitCause.BUDGET and wait.reason.endswith("wait until next month.")
    set_budget(mode="pause", **(asked | {"limit_nano": 100 * USD}))
    Run.objects.update(retry_at=None)
    assert claim() is not None


@pytest.mark.parametrize(("gpus", "idle_seconds"), [(1, 3 * 3600), (4, 0)])
def test_idle_is_the_time_online_that_no_run_had_of_each_gpu(
    floor: TrainingSetup, claim, gpus: int, idle_seconds: int
) -> None:
    job = floor.job()
    claim()
    now = db_now().replace(day=15, hour=12)
    Worker.objects.update(
        created_at=now - datetime.timedelta(hours=1), last_seen_at=now, gpus=[{"index": n} for n in range(4)]
    )
    FineTuningJob.objects.filter(pk=job.pk).update(gpu_count=gpus)
    Run.objects.update(leased_at=now - datetime.timedelta(hours=1))

    (margin,) = list_margins(month=now.date().replace(day=1), now=now)

    assert margin.online_gpu_seconds == 4 * 3600
    assert margin.idle_gpu_seconds == idle_seconds
