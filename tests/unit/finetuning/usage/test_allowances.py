"""What an organization lets a member, label or project use, at launch, in the queue, by key and in figures."""

import datetime

import pytest

from apps.accounts.members.projects import create_project
from apps.accounts.models import ApiKey
from apps.billing.budget_settings import set_key_labels
from apps.billing.models import TrafficHour
from apps.core.database.clock import db_now
from apps.core.database.tenancy import tenant
from apps.core.errors import DomainError, QuotaExceeded
from apps.core.models import AuditEntry
from apps.finetuning.jobs.creation import create_job
from apps.finetuning.jobs.requests import JobRequest
from apps.finetuning.jobs.waits import WaitCause, explain_wait
from apps.finetuning.models import Allowance, FineTuningJob, Run
from apps.finetuning.usage import allowances, quotas
from apps.finetuning.usage.quota_use import list_quota_use, list_target_use
from apps.finetuning.usage.rates import RateAllowance, RecentRequests, limits_of_key
from tests.factories.accounts import make_key, make_member_token, make_project_key
from tests.factories.finetuning import TrainingSetup, make_training_file

HOUR = datetime.timedelta(hours=1)
LONG = {"epochs": 40}


def job_of(floor: TrainingSetup, by: str, **request: object) -> FineTuningJob:
    version = make_training_file(floor.organization, floor.base_model)
    asked = JobRequest(base_model=floor.base_model.name, training_file=version.pk, **request)
    return create_job(organization=floor.organization, request=asked, by=by, now=db_now())


def allow(organization, scope: str, target: str, **limits: int) -> Allowance:
    return allowances.set_allowance(
        organization=organization, scope=scope, target=target, limits=limits, by="user_1", now=db_now()
    )


@pytest.fixture
def roomy(floor, organization) -> TrainingSetup:
    quotas.set_quota(organization=organization, by="system", now=db_now(), concurrent_gpus=4)
    return floor


def test_a_full_allowance_holds_back_its_own_runs_and_nobody_elses(roomy, organization, alice, bob, claim):
    allow(organization, "member", alice.pk, concurrent_gpus=1)
    first, second, theirs = (job_of(roomy, each.pk) for each in (alice, alice, bob))

    assert [claim().claimed.spec.job_id for _ in range(2)] == [first.pk, theirs.pk]
    assert claim() is None
    with tenant(organization=organization):
        wait = explain_wait(job=FineTuningJob.objects.get(pk=second.pk), now=db_now())
    assert wait is not None and wait.cause == WaitCause.QUOTA
    assert wait.reason == f"Waiting for a GPU: your organization allows {alice} 1 at once. An owner can allow more."
    allow(organization, "member", alice.pk, concurrent_gpus=2)
    assert claim().claimed.spec.job_id == second.pk


def test_the_month_of_a_label_hides_nobody_in_its_organization(roomy, organization, alice, claim):
    labelled = [job_of(roomy, alice.pk, metadata={"team": "search"}, hyperparameters=LONG) for _ in range(3)]
    other = job_of(roomy, alice.pk, metadata={"team": "ads"})
    allow(organization, "label", "team=search", gpu_seconds_per_month=1)

    assert claim().claimed.spec.job_id == other.pk
    assert claim() is None
    assert set(Run.objects.exclude(retry_at=None).values_list("job", flat=True)) == {job.pk for job in labelled}
    with tenant(organization=organization):
        reason = quotas.reasons_to_wait(jobs=[labelled[0]], now=db_now())[labelled[0].pk]
    assert "your organization allows the label team=search" in reason


def test_a_launch_above_an_allowance_names_it_and_who_can_raise_it(roomy, organization, alice, bob):
    allow(organization, "label", "team=search", queued_jobs=1)
    allow(organization, "member", bob.pk, gpu_seconds_per_month=1)
    job_of(roomy, alice.pk, metadata={"team": "search"})

    with pytest.raises(QuotaExceeded, match=r"allows the label team=search 1 unfinished jobs.*an owner for more"):
        job_of(roomy, alice.pk, metadata={"team": "search"})
    with pytest.raises(QuotaExceeded, match=rf"allows {bob} 1 this month.*an owner for more"):
        job_of(roomy, bob.pk, hyperparameters=LONG)
    assert FineTuningJob.objects.count() == 1
    job_of(roomy, alice.pk, metadata={"team": "ads"})


def test_a_job_counts_for_the_creator_of_its_key_and_the_labels_of_both(roomy, organization, alice, key):
    set_key_labels(organization=organization, key_id=key.key.pk, labels={"team": "ads", "stage": "test"}, by=alice.pk)

    job = job_of(roomy, key.key.pk, metadata={"team": "search", "kind": "nightly"})

    labels = {"team": "ads", "stage": "test", "kind": "nightly"}  # no key leaves the budget of its labels
    assert (job.member_id, job.labels) == (alice.pk, labels)


def test_a_key_is_under_the_rates_of_its_member_its_labels_and_its_project(organization, alice, bob, key):
    project = create_project(organization=organization, name="Search", is_private=False, by=alice, now=db_now())
    of_member = allow(organization, "member", alice.pk, requests_per_minute=60)
    of_label = allow(organization, "label", "team=search", tokens_per_minute=5000)
    of_project = allow(organization, "project", project.pk, tokens_per_minute=700)
    allow(organization, "label", "team=ads", requests_per_minute=1)
    allow(organization, "member", bob.pk, queued_jobs=1)
    set_key_labels(organization=organization, key_id=key.key.pk, labels={"team": "search", "stage": "a"}, by=alice.pk)
    judge = make_member_token(organization, bob)
    ApiKey.objects.filter(pk=judge.key.pk).update(made_with=key.key.pk)
    in_search = make_project_key(project, alice)

    found = {
        each: limits_of_key(key_id=each.key.pk)[1]
        for each in (key, judge, in_search, make_key(organization, bob, scopes=frozenset({"inference"})))
    }

    member = RateAllowance(of_member.pk, f"The member {alice.pk}", 60, None)
    label = RateAllowance(of_label.pk, "The label team=search", None, 5000)
    in_project = RateAllowance(of_project.pk, "The project Search", None, 700)
    assert list(found.values()) == [[member, label], [label], [member, in_project], []]


def test_recent_requests_count_for_the_member_the_labels_and_the_project_of_their_key(organization, alice, key):
    other, now = make_key(organization, alice), db_now()
    set_key_labels(organization=organization, key_id=key.key.pk, labels={"team": "search"}, by=alice.pk)
    none = dict.fromkeys(("aborted", "over_quota", "not_found", "invalid", "failed", "cached_input_tokens"), 0)
    for used, hours, requests in ((key, 1, 5), (other, 1, 7), (key, 2, 9), (key, 24 * 40, 100)):
        TrafficHour.objects.create(
            organization=organization, model_name="m", key_id=used.key.pk, hour_at=now - hours * HOUR,
            requests=requests, rate_limited=1, input_tokens=10, output_tokens=requests, cost_nano=0,
            first_token_counts=[], latency_counts=[], **none,
        )  # fmt: skip
    allow(organization, "label", "team=search", requests_per_minute=3)

    with tenant(organization=organization):
        label, member = list_target_use(organization=organization, now=now)

    assert (label.name, label.recent.requests) == ("team=search", RecentRequests(12, 8, 34, 19))
    assert (member.target, member.recent.requests) == (alice.pk, RecentRequests(18, 10, 51, 32))
    rate = label.limits[-2]
    assert (rate.name, rate.limit, rate.used, rate.held) == ("requests_per_minute", 3, None, None)


def test_an_allowance_stays_within_the_quota_and_names_what_is_wrong(organization, alice, charlie):
    quotas.set_quota(organization=organization, by="system", now=db_now(), concurrent_gpus=4, queued_jobs=None)
    cases = [
        ("member", alice.pk, {"concurrent_gpus": 5}, "concurrent_gpus"),
        ("member", alice.pk, {"tokens_per_minute": 2_000_001}, "tokens_per_minute"),
        ("label", "team=a", {"storage_bytes": 1}, "storage_bytes"),
        ("member", charlie.pk, {"concurrent_gpus": 1}, "target"),
        ("label", "search", {"concurrent_gpus": 1}, "target"),
        ("label", "team=", {"concurrent_gpus": 1}, "target"),
        ("label", "t" * 65 + "=a", {"concurrent_gpus": 1}, "target"),
        ("label", "team=a", {}, None),
        ("label", "team=a", {"queued_jobs": -1}, "queued_jobs"),
        ("key", "key_1", {"queued_jobs": 1}, "scope"),
    ]
    for scope, target, limits, param in cases:
        with pytest.raises(DomainError) as refused:
            allow(organization, scope, target, **limits)
        assert refused.value.param == param
    assert not Allowance.objects.exists()

    made = allow(organization, "label", "team=a", queued_jobs=10**6)
    assert allow(organization, "label", "team=a", concurrent_gpus=4).pk == made.pk
    assert allowances.end_allowance(organization=organization, allowance_id=made.pk, by=alice.pk)
    actions = AuditEntry.objects.filter(target=made.pk).order_by("pk").values_list("action", flat=True)
    assert list(actions) == ["allowance.set", "allowance.set", "allowance.ended"]


def test_figures_say_what_is_used_held_and_available(roomy, organization, alice, claim):
    allow(organization, "member", alice.pk, concurrent_gpus=2, gpu_seconds_per_month=10_000, queued_jobs=5)
    running, waiting = (job_of(roomy, alice.pk, metadata={"team": "a"}, hyperparameters=LONG) for _ in range(2))
    claim()

    with tenant(organization=organization):
        of_all = {use.name: use for use in list_quota_use(organization=organization, now=db_now())}
        member, *others = list_target_use(organization=organization, now=db_now())

    own = {use.name: use for use in member.limits}
    held = own["gpu_seconds_per_month"].held
    expected = running.estimate["run_seconds_p50"] + waiting.estimate["run_seconds_p50"]
    assert held == pytest.approx(expected, abs=10) and of_all["gpu_seconds_per_month"].held == held
    assert (own["concurrent_gpus"].used, own["concurrent_gpus"].available) == (1, 1)
    assert (own["queued_jobs"].used, own["queued_jobs"].available) == (2, 3)
    left = own["gpu_seconds_per_month"]
    assert left.available == 10_000 - left.used - held
    assert (member.name, member.recent.gpus, member.recent.jobs) == (str(alice), 1, 2)
    assert all(other.allowance is None for other in others)
