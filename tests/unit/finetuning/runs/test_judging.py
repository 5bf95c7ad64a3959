"""The models that may judge a job, and the key with which its worker calls them."""

import datetime
from functools import partial

import pytest
from django.db import ProgrammingError, connection, transaction

from apps.accounts.login import key_operations
from apps.accounts.login.browser_tokens import sweep_expired_tokens
from apps.accounts.login.key_operations import issue_member_token, revoke_key
from apps.accounts.models import ApiKey, Membership, User
from apps.accounts.queries import KeyLimits, find_key, get_key_limits, list_keys
from apps.billing.budget_settings import set_budget, set_key_labels
from apps.billing.budgets import BudgetExceeded, attribution_of_key, period_of, room_nano
from apps.billing.models import Hold, UsageSeries
from apps.billing.usage.slices import close_slice, lease_slice
from apps.catalog.models import PriceRule
from apps.catalog.operations import set_price
from apps.contracts.evaluation import EvaluationPlan, Grader, GraderKind
from apps.core.database.clock import db_now
from apps.core.errors import InvalidValue, NotFound, PermissionDenied, RateLimited
from apps.finetuning.jobs import creation
from apps.finetuning.jobs.requests import JobRequest
from apps.finetuning.runs.judges import open_judge
from apps.finetuning.runs.leases import Lease, StaleLease
from tests.factories.accounts import make_key, make_organization, make_user
from tests.factories.finetuning import make_training_file
from tests.factories.money import USD, give_credit
from tests.factories.serving import make_adapter

pytestmark = pytest.mark.django_db


def judged_by(model: str) -> EvaluationPlan:
    return EvaluationPlan(grader=Grader(kind=GraderKind.JUDGE, model=model))


@pytest.fixture
def create(floor, bob):
    for way, nano in (("input", 70_000_000), ("output", 210_000_000)):
        sku = f"inference:{way}:{floor.base_model.name}"
        set_price(sku=sku, unit="tokens", price_nano=nano, per=1_000_000, by="system", now=db_now())

    def create(model: str = "", by: str = ""):
        request = JobRequest(
            base_model=floor.base_model.name,
            training_file=make_training_file(floor.organization, floor.base_model).pk,
            evaluation=judged_by(model or floor.base_model.name),
        )
        return creation.create_job(organization=floor.organization, request=request, by=by or bob.pk, now=db_now())

    return create


def test_the_key_is_for_inference_in_the_creators_name_for_minutes(create, claim, bob, floor, settings):
    settings.WORKER_GATEWAY_URL = "http://gateway:8002"
    create()

    access = open_judge(lease=claim().lease, now=db_now())

    assert (access.model, access.url) == (floor.base_model.name, "http://gateway:8002/v1")
    identity = find_key(secret=access.key)
    assert identity is not None and identity.scopes == {"inference"} and identity.created_by_id == bob.pk
    assert identity.expires_at < db_now() + datetime.timedelta(minutes=31)
    assert ApiKey.objects.get(pk=identity.key_id) not in list_keys(organization=floor.organization)


def test_a_trainer_that_was_taken_over_spends_little_more_with_its_keys_than_a_judge_needs(create, claim):
    job, attempt = create(), claim()
    calls = 2 * EvaluationPlan().max_answers

    keys = [find_key(secret=open_judge(lease=attempt.lease, now=db_now()).key) for _ in range(4)]

    assert {get_key_limits(key_id=key.key_id) for key in keys} == {KeyLimits(calls, 4_000 * calls, 2)}
    with pytest.raises(RateLimited):
        open_judge(lease=attempt.lease, now=db_now())
    assert ApiKey.objects.filter(name=f"Judge of {job.pk}").count() == 4
    ApiKey.objects.filter(name=f"Judge of {job.pk}").update(expires_at=db_now())
    with pytest.raises(RateLimited):
        open_judge(lease=attempt.lease, now=db_now())


@pytest.mark.parametrize("is_own", [False, True])
def test_a_judge_that_loops_spends_at_most_twice_what_its_calls_cost(create, claim, floor, is_own):
    create(make_adapter(floor.organization, floor.base_model).model_name if is_own else "")
    attempt = claim()
    key_id = find_key(secret=open_judge(lease=attempt.lease, now=db_now()).key).key_id
    limit = ApiKey.objects.get(pk=key_id).spend_limit_nano
    price = PriceRule.objects.get(sku=f"inference:output:{floor.base_model.name}")
    assert limit == 2 * 4_000 * 2 * EvaluationPlan().max_answers * 210
    lease = partial(lease_slice, organization=floor.organization, by="gateway", key_id=key_id)
    give_credit(floor.organization, 100 * limit)

    first, second = lease(required_nano=210), lease(by="another gateway", required_nano=210)
    assert first.amount_nano == limit // 8 and 210 < second.amount_nano < limit // 8
    with pytest.raises(BudgetExceeded, match="limit of its key"):
        lease(required_nano=limit)
    close_slice(hold_id=first.hold_id, by="gateway")
    Hold.objects.filter(pk=second.hold_id).update(used_nano=420)
    UsageSeries.objects.create(  # recorded and not charged yet: two tokens of the second slice, and others
        organization=floor.organization, price_rule=price, sku=price.sku, subject="m", key_id=key_id,
        day=db_now().date(), quantity=(limit - second.amount_nano) // 210 + 1,
    )  # fmt: skip

    left = limit - (second.amount_nano - 420) - 210 * ((limit - second.amount_nano) // 210 + 1)
    assert lease(required_nano=10).amount_nano == max(left // 8, 10)
    with pytest.raises(BudgetExceeded, match="limit of its key"):
        lease(required_nano=left)
    again = ApiKey.objects.get(pk=find_key(secret=open_judge(lease=attempt.lease, now=db_now()).key).key_id)
    assert again.spend_limit_nano == left - max(left // 8, 10)
    with pytest.raises(BudgetExceeded, match="limit of its key"):
        lease(required_nano=1)


def test_a_judge_has_the_limits_and_labels_of_the_key_that_created_its_job(create, claim, alice, floor):
    made = make_key(floor.organization, alice, limits=KeyLimits(requests_per_minute=7)).key
    set_key_labels(organization=floor.organization, key_id=made.pk, labels={"team": "search"}, by=alice.pk)
    create(by=made.pk)

    token = find_key(secret=open_judge(lease=claim().lease, now=db_now()).key).key_id

    limits = get_key_limits(key_id=token)
    attribution = attribution_of_key(organization=floor.organization, key_id=token)
    assert (limits.requests_per_minute, limits.concurrent_requests) == (7, 2)
    assert attribution.labels == {"team": "search"}


def test_a_budget_that_is_set_later_in_the_month_counts_what_a_judge_spent(create, claim, alice, floor):
    made = make_key(floor.organization, alice).key
    set_key_labels(organization=floor.organization, key_id=made.pk, labels={"team": "search"}, by=alice.pk)
    create(by=made.pk)
    token, now = find_key(secret=open_judge(lease=claim().lease, now=db_now()).key).key_id, db_now()
    price = PriceRule.objects.earliest("pk")
    UsageSeries.objects.create(
        organization=floor.organization, price_rule=price, sku=price.sku, subject="m", key_id=token, day=now.date(),
        posted_nano=5,
    )  # fmt: skip

    sweep_expired_tokens(now=now + datetime.timedelta(days=3))

    for scope, target in (("key", made.pk), ("label", "team=search"), ("member", alice.pk)):
        budget = set_budget(
            organization=floor.organization, scope=scope, target=target, limit_nano=USD, mode="alert", by=alice.pk,
            now=now,
        )  # fmt: skip
        assert period_of(budget, now).spent_nano == 5, scope


def test_a_judge_spends_from_the_budget_of_the_key_that_created_its_job(create, claim, alice, floor):
    made = make_key(floor.organization, alice).key
    create(by=made.pk)
    attempt = claim()
    budget = set_budget(
        organization=floor.organization, scope="key", target=made.pk, limit_nano=USD, mode="block", by=alice.pk,
        now=db_now(),
    )  # fmt: skip

    token = ApiKey.objects.get(pk=find_key(secret=open_judge(lease=attempt.lease, now=db_now()).key).key_id)

    with transaction.atomic():
        attribution = attribution_of_key(organization=floor.organization, key_id=token.pk)
        room = room_nano(organization=floor.organization, attribution=attribution)
    assert room is not None and room[1] == budget
    revoke_key(organization=floor.organization, key_id=made.pk, by=alice, now=db_now())
    token.refresh_from_db()
    assert token.revoked_at is not None


def test_a_judges_key_keeps_no_expired_key_acting(create, claim, alice, floor):
    made = make_key(floor.organization, alice).key
    create(by=made.pk)
    attempt = claim()
    open_judge(lease=attempt.lease, now=db_now())
    ApiKey.objects.filter(pk=made.pk).update(expires_at=db_now())

    with pytest.raises(PermissionDenied, match="has expired"):
        open_judge(lease=attempt.lease, now=db_now())


def test_a_judges_keys_leave_its_creators_playground_open(create, claim, bob, monkeypatch):
    monkeypatch.setattr(key_operations, "MAX_MEMBER_TOKENS", 1)
    create()
    open_judge(lease=claim().lease, now=db_now())

    assert issue_member_token(membership=Membership.objects.get(user=bob), now=db_now()).secret


@pytest.mark.parametrize("has_key", [True, False])
def test_the_worker_api_opens_a_judge_under_its_own_database_role_and_reads_no_people(
    create, claim, alice, bob, floor, has_key
):
    create(by=make_key(floor.organization, alice).key.pk if has_key else "")
    lease = claim().lease

    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SET LOCAL ROLE anneal_internal")
        access = [open_judge(lease=lease, now=db_now()) for _ in range(2)][1]  # the second takes from the first
        for refused in (Membership.objects.update, ApiKey.objects.update):
            with pytest.raises(ProgrammingError, match="permission denied"), transaction.atomic():
                refused(created_at=db_now())
        with pytest.raises(ProgrammingError, match="permission denied"), transaction.atomic():
            User.objects.exists()
        cursor.execute("RESET ROLE")

    identity = find_key(secret=access.key)
    assert identity is not None and identity.created_by_id == (alice if has_key else bob).pk


def test_a_member_who_left_judges_nothing(create, claim, bob, floor):
    create()
    attempt = claim()
    Membership.objects.filter(user=bob).delete()

    with pytest.raises(PermissionDenied, match="has left"):
        open_judge(lease=attempt.lease, now=db_now())


def test_without_its_creator_a_job_has_no_judge(create, claim, bob, floor):
    create()
    attempt = claim()
    Membership.objects.filter(user=bob).update(role="viewer")

    with pytest.raises(PermissionDenied):
        open_judge(lease=attempt.lease, now=db_now())


def test_a_revoked_key_judges_nothing(create, claim, alice, floor):
    key = make_key(floor.organization, alice).key
    create(by=key.pk)
    attempt = claim()
    assert open_judge(lease=attempt.lease, now=db_now()).key

    revoke_key(organization=floor.organization, key_id=key.pk, by=alice, now=db_now())

    with pytest.raises(PermissionDenied, match="revoked"):
        open_judge(lease=attempt.lease, now=db_now())


def test_only_the_lease_of_a_judged_run_opens_a_judge(floor, claim):
    floor.job()
    attempt = claim()

    with pytest.raises(NotFound):
        open_judge(lease=attempt.lease, now=db_now())
    with pytest.raises(StaleLease):
        open_judge(lease=Lease(id=attempt.lease.id, token="made-up"), now=db_now())


@pytest.mark.parametrize("model", ["gpt-4", "ft:tiny:other::x"])
def test_a_judge_that_cannot_be_asked_is_refused(create, model):
    with pytest.raises(InvalidValue, match="does not exist"):
        create(model)


def test_an_own_version_may_judge_and_anothers_does_not_exist(create, floor):
    own = make_adapter(floor.organization, floor.base_model)
    foreign = make_adapter(make_organization("Rival", owner=make_user("rival")), floor.base_model)

    assert create(own.model_name).pk
    with pytest.raises(InvalidValue, match="does not exist"):
        create(foreign.model_name)
