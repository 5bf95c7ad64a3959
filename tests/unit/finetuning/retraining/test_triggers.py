"""What begins a retraining, once, and what refuses to begin it."""

import datetime
from collections import Counter

import pytest

from apps.accounts.login.key_operations import issue_key
from apps.accounts.members.projects import create_project
from apps.accounts.models import Notification, OrganizationEvent, Project
from apps.accounts.roles import SCOPES, Member
from apps.billing.queries import get_balance
from apps.core.database.clock import db_now
from apps.core.errors import InvalidState, InvalidValue, NotFound, PermissionDenied, QuotaExceeded
from apps.core.money import dollars
from apps.finetuning.jobs.retraining import plans, triggers
from apps.finetuning.jobs.retraining.launches import require_actor
from apps.finetuning.jobs.retraining.schedules import Schedule
from apps.finetuning.jobs.retraining.triggers import begin_due
from apps.finetuning.lifecycle import Cadence, RetrainingStatus
from apps.finetuning.models import FineTuningJob, Retraining, RetrainingPlan
from apps.finetuning.tasks import retrain
from apps.finetuning.usage.quotas import set_quota
from tests.factories.accounts import make_service_account
from tests.factories.money import USD
from tests.factories.retraining import grow, make_plan, tick
from tests.support.database import at_once, beside

WEEKLY = Schedule(Cadence.WEEK, 1, hour_utc=3)
FRIDAY = datetime.datetime(2026, 11, 27, 15, 40, tzinfo=datetime.UTC)


@pytest.mark.parametrize(
    ("schedule", "after", "due"),
    [
        (Schedule(Cadence.DAYS, 1, 9), FRIDAY, "2026-11-28T09:00"),
        (Schedule(Cadence.DAYS, 30, 9), FRIDAY, "2026-12-27T09:00"),
        (WEEKLY, FRIDAY, "2026-11-30T03:00"),
        (Schedule(Cadence.WEEK, 5, 16), FRIDAY, "2026-11-27T16:00"),
        (Schedule(Cadence.WEEK, 5, 15), FRIDAY, "2026-12-04T15:00"),
        (Schedule(Cadence.MONTH, 28), FRIDAY, "2026-11-28T00:00"),
        (Schedule(Cadence.MONTH, 27, 15), FRIDAY, "2026-12-27T15:00"),
        (Schedule(Cadence.MONTH, 1), FRIDAY.replace(month=12), "2027-01-01T00:00"),
    ],
)
def test_a_schedule_is_due_at_the_next_of_its_hours(schedule: Schedule, after: datetime.datetime, due: str) -> None:
    assert schedule.next_due(after).isoformat().startswith(due)


@pytest.mark.parametrize(
    ("cadence", "value", "most"), [("days", 1, 31), ("days", 30, 2), ("days", 31, 1), ("week", 7, 5), ("month", 28, 1)]
)
def test_a_month_has_at_most_so_many_due_times(cadence: str, value: int, most: int) -> None:
    schedule, due = Schedule(Cadence(cadence), value), datetime.datetime(2026, 12, 31, 1, tzinfo=datetime.UTC)
    months = Counter[int]()
    for _ in range(366):
        due = schedule.next_due(due)
        months[due.year * 12 + due.month] += 1

    assert schedule.most_in_a_month() == most == max(months.values())


def test_a_plan_begins_once_for_each_growth_of_its_dataset(job, key) -> None:
    plan = make_plan(job, key)
    begin_due()
    grow(job, 15)  # three more than the job learned from
    begin_due()
    assert not Retraining.objects.exists()

    grow(job, 16)
    begin_due()
    begin_due()
    begun = Retraining.objects.get()
    assert (begun.trigger, begun.status, begun.created_by) == ("growth", "waiting", key.key.pk)
    with pytest.raises(InvalidState, match="has not ended"):
        plans.request_retraining(plan=plan, by=key.key.pk, now=db_now())

    retrain()
    started = FineTuningJob.objects.latest("created_at")
    assert (started.created_by, started.suffix, started.training_file.rows) == (key.key.pk, "support", 16)
    assert started.metadata == {"retraining_plan": plan.pk, "retraining": begun.pk}
    assert started.requested["asked"]["epochs"] == 2
    assert started.validation_file.dataset_id == plan.held_out_id
    assert started.spend_cap_nano <= plan.max_nano


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_two_ticks_at_once_begin_and_launch_one_retraining(job, key) -> None:
    make_plan(job, key)
    grow(job, 20)

    assert at_once(lambda _: retrain(), 2) == [None, None]
    assert at_once(lambda _: tick().status, 2)

    assert Retraining.objects.count() == 1
    assert FineTuningJob.objects.exclude(pk=job.pk).count() == 1


def test_a_schedule_trains_new_rows_and_skips_without_any(job, key) -> None:
    plan = make_plan(job, key, schedule=WEEKLY, min_new_rows=None)

    def be_due() -> None:
        RetrainingPlan.objects.update(next_due_at=db_now() - datetime.timedelta(minutes=1))

    begin_due()
    assert not Retraining.objects.exists()

    be_due()
    retrain()
    skipped = tick()
    assert (skipped.status, skipped.code, skipped.job) == ("skipped", "nothing_new", None)
    plan.refresh_from_db()
    assert plan.next_due_at > db_now()
    assert not Notification.objects.filter(key__startswith="retraining").exists()

    grow(job, 13)
    be_due()
    retrain()
    assert tick().status == RetrainingStatus.TRAINING

    be_due()
    retrain()
    assert Retraining.objects.count() == 2, "one that is open must end first"


def test_a_version_that_began_a_retraining_begins_no_other_after_a_change_of_the_plan(job, key, caplog) -> None:
    plan = make_plan(job, key, max_nano=1)
    grow(job, 20)
    retrain()
    assert tick().status == RetrainingStatus.REFUSED
    RetrainingPlan.objects.update(seen_number=1, seen_rows=12)

    begin_due()

    plan.refresh_from_db()
    assert (plan.retrainings.count(), plan.seen_rows) == (1, 20) and not caplog.records


def test_a_stopped_plan_and_a_suspended_organization_begin_nothing(job, key, organization) -> None:
    plan = make_plan(job, key, is_enabled=False)
    grow(job, 20)
    begin_due()
    RetrainingPlan.objects.filter(pk=plan.pk).update(is_enabled=True)
    organization.suspended_at = db_now()
    organization.save(update_fields=["suspended_at"])
    begin_due()
    assert not Retraining.objects.exists()


def test_a_plan_begins_a_limited_number_a_day_and_keeps_a_limited_history(job, key, monkeypatch) -> None:
    plan = make_plan(job, key, max_nano=1)
    monkeypatch.setattr(triggers, "MAX_KEPT", 1)
    monkeypatch.setattr(triggers, "MAX_A_DAY", 3)
    for _ in range(3):
        plans.request_retraining(plan=plan, by=key.key.pk, now=db_now())
        assert tick().status == RetrainingStatus.REFUSED
    assert plan.retrainings.count() == 2
    monkeypatch.setattr(triggers, "MAX_A_DAY", 2)
    with pytest.raises(QuotaExceeded, match="a day"):
        plans.request_retraining(plan=plan, by=key.key.pk, now=db_now())
    grow(job, 20)
    begin_due()
    assert plan.retrainings.count() == 2


def test_a_price_above_the_maximum_is_refused_once_with_its_reason(job, key, organization, alice) -> None:
    plan = make_plan(job, key, max_nano=1_000)
    grow(job, 20)
    before = get_balance(organization=organization).available_nano

    retrain()
    refused = tick()
    retrain()

    assert (refused.status, refused.code, refused.job) == ("refused", "above_maximum", None)
    assert dollars(1_000) in refused.reason
    assert Retraining.objects.count() == 1 and FineTuningJob.objects.count() == 1
    assert get_balance(organization=organization).available_nano == before
    told = Notification.objects.get(key=f"retraining:{refused.pk}")
    assert told.user == alice and plan.name in told.title
    event = OrganizationEvent.objects.get(subject=refused.pk)
    assert (event.type, event.data) == ("retraining.refused", {"plan_id": plan.pk, "code": "above_maximum"})


def test_a_job_that_could_not_start_is_refused_as_for_a_person_and_owners_hear_of_a_service_account(
    job, key, organization, alice, ann, bob
) -> None:
    account = make_service_account(organization, alice)
    scopes = frozenset({"view", "job.write", "inference", "adapter.write"})
    issued = issue_key(
        organization=organization, name="ci", scopes=scopes, by=alice, expires_at=None, now=db_now(),
        service_account_id=account.pk,
    )  # fmt: skip
    plan = make_plan(job, issued)
    set_quota(organization=organization, by="system", now=db_now(), queued_jobs=0)
    grow(job, 20)

    retrain()

    refused = tick()
    assert (refused.status, refused.code, refused.job) == ("refused", "insufficient_quota", None)
    assert FineTuningJob.objects.count() == 1 and refused.created_by == plan.acts_as
    told = Notification.objects.filter(key=f"retraining:{refused.pk}").values_list("user_id", flat=True)
    assert set(told) == {alice.pk, ann.pk}


def test_organizations_take_turns_and_a_tick_begins_a_limited_number(job, key, rival, monkeypatch) -> None:
    plans_of_acme = [make_plan(job, key, name=f"plan {number}") for number in range(3)]
    grow(job, 20)
    fields = {"name", "source_job_id", "dataset_id", "held_out_id", "testing_criteria", "min_new_rows", "max_nano"}
    copied = {name: getattr(plans_of_acme[0], name) for name in fields}
    RetrainingPlan.objects.create(
        organization=rival, alias=None, min_gain_points=0.0, acts_as="user_1", created_by="user_1", **copied
    )
    monkeypatch.setattr(triggers, "MAX_BEGUN", 2)

    begin_due()
    assert sorted(Retraining.objects.values_list("organization__name", flat=True)) == ["Acme", "Rival"]
    begin_due()
    assert Retraining.objects.count() == 4


def test_a_plan_acts_as_who_changed_it_last_and_counts_growth_from_its_dataset(job, key, alice, monkeypatch) -> None:
    plan = make_plan(job, key, schedule=WEEKLY)
    due = plan.next_due_at
    asked = plans.request_of(plan)

    changed = plans.change_plan(plan=plan, request=asked, by=alice.pk, now=db_now())
    assert (changed.acts_as, changed.created_by, changed.next_due_at) == (alice.pk, key.key.pk, due)
    assert (changed.seen_number, changed.seen_rows) == (1, 12)

    begun = plans.request_retraining(plan=plan, by=alice.pk, now=db_now())
    require_actor(begun, db_now())
    with pytest.raises(InvalidValue, match="has this name"):
        make_plan(job, key)
    monkeypatch.setattr(plans, "MAX_PLANS", 1)
    with pytest.raises(QuotaExceeded, match="at most 1"):
        make_plan(job, key, name="another", max_nano=USD)


@pytest.mark.parametrize("hidden", ["the job's", "the key's"])
def test_a_plan_begins_nothing_in_a_project_that_its_key_does_not_see_any_more(
    job, organization, alice, bob, hidden
) -> None:
    other, theirs = (
        create_project(organization=organization, name=name, is_private=False, by=alice, now=db_now())
        for name in ("Search", "Support")
    )
    made = issue_key(
        organization=organization, name="k", scopes=frozenset(SCOPES) & Member.permissions, by=bob, expires_at=None,
        now=db_now(), project_id=other.pk,
    )  # fmt: skip
    FineTuningJob.objects.filter(pk=job.pk).update(project=theirs)
    job.refresh_from_db()
    plan = make_plan(job, made)
    begun = plans.request_retraining(plan=plan, by=made.key.pk, now=db_now())
    require_actor(begun, db_now())

    Project.objects.filter(pk=theirs.pk if hidden == "the job's" else other.pk).update(is_private=True)

    with pytest.raises(PermissionDenied, match="no longer sees its job"):
        require_actor(begun, db_now())


def test_a_plan_that_was_deleted_meanwhile_is_not_found(job, key) -> None:
    plan, by = make_plan(job, key), key.key.pk
    request = plans.request_of(plan)
    plans.delete_plan(plan=RetrainingPlan.objects.get(), by=by, now=db_now())

    with pytest.raises(NotFound):
        plans.change_plan(plan=plan, request=request, by=by, now=db_now())
    with pytest.raises(NotFound):
        plans.request_retraining(plan=plan, by=by, now=db_now())


@pytest.mark.django_db(transaction=True)
def test_a_plan_that_is_deleted_while_a_retraining_begins_takes_it_along(job, key) -> None:
    plan, by = make_plan(job, key), key.key.pk

    _, deleted = beside(
        lambda: plans.request_retraining(plan=plan, by=by, now=db_now()),
        lambda: plans.delete_plan(plan=plan, by=by, now=db_now()),
    )

    assert deleted is None
    assert not RetrainingPlan.objects.exists() and not Retraining.objects.exists()
