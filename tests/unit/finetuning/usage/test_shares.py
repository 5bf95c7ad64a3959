"""Several organizations of one person: one share of queues and limits together, until one of them pays."""

from typing import Any

import pytest
from django.db import ProgrammingError, transaction

from apps.accounts.models import Organization
from apps.accounts.shares import get_share_holder, list_sharing
from apps.billing.operations import grant_paid_credit
from apps.core.database.clock import db_now
from apps.core.database.tenancy import system, tenant
from apps.core.errors import QuotaExceeded
from apps.core.messages import outbox
from apps.core.models import OutboxMessage
from apps.datasets.intake.versions import StorageFull
from apps.finetuning.models import FineTuningJob
from apps.finetuning.runs.queue.queue_order import queue_order
from apps.finetuning.usage.quotas import get_quota, reasons_to_wait, require_place_for_job, set_quota
from apps.finetuning.usage.storage import counted_bytes, stored_bytes
from apps.interfaces.gateway.admission import keys
from tests.factories.accounts import make_key, make_organization
from tests.factories.datasets import make_version
from tests.factories.finetuning import give_credit, make_job

pytestmark = pytest.mark.django_db


@pytest.fixture
def second(organization, alice) -> Organization:
    return make_organization("Second", owner=alice)


def pay(organization: Organization) -> None:
    grant_paid_credit(organization=organization, amount_nano=10**9, reference=f"paid:{organization.pk}", by="system")


def start_for(organization: Organization, floor: Any) -> str:
    give_credit(organization)
    return str(make_job(organization, floor.base_model).pk)


@pytest.mark.parametrize("leave", [pay, lambda one: set_quota(organization=one, by="op", now=db_now(), weight=2)])
def test_who_pays_or_is_given_limits_counts_alone(leave, organization, second, rival, alice):
    assert get_share_holder(organization=organization) == get_share_holder(organization=second) == alice.pk
    assert set(list_sharing(organizations=[second.pk])) == {organization.pk, second.pk}

    leave(second)

    assert list_sharing(organizations=[organization.pk, second.pk]) == {organization.pk: alice.pk, second.pk: second.pk}
    assert get_share_holder(organization=rival) == rival.founded_by_id


def test_an_organization_without_a_founder_counts_alone(organization, second):
    Organization.objects.update(founded_by=None)

    assert list_sharing(organizations=[organization.pk]) == {organization.pk: organization.pk}


def test_the_web_role_cannot_give_a_share(organization):
    denied = pytest.raises(ProgrammingError, match=r"may not set accounts_organization\.has_own_share")
    with denied, tenant(organization=organization):
        Organization.objects.update(has_own_share=True)


def test_the_queue_counts_a_founder_once(floor, organization, second, rival):
    first = [floor.job().pk, start_for(second, floor)]
    others = start_for(rival, floor)

    with system():
        order = [run.job_id for run in queue_order(pool=floor.pool, now=db_now(), limit=9)]
    assert order == [first[0], others, first[1]]

    pay(second)
    with system():
        assert [run.job_id for run in queue_order(pool=floor.pool, now=db_now(), limit=9)] == [*first, others]


def test_the_gpus_of_a_founders_organizations_count_together(floor, organization, second, claim):
    most = get_quota(organization=organization).concurrent_gpus
    for _ in range(most):
        floor.job()
        assert claim() is not None
    waiting = start_for(second, floor)

    assert claim() is None
    job = FineTuningJob.objects.get(pk=waiting)
    assert "concurrent GPUs" in reasons_to_wait(jobs=[job], now=db_now())[waiting]

    pay(second)
    assert claim() is not None


def test_unfinished_jobs_count_together_and_the_web_role_can_tell(floor, organization, second):
    for _ in range(get_quota(organization=second).queued_jobs):
        floor.job()

    with tenant(organization=second), pytest.raises(QuotaExceeded, match="all organizations of its founder"):
        require_place_for_job(organization=second)
    pay(second)
    with tenant(organization=second):
        require_place_for_job(organization=second)


def test_storage_counts_together_and_nothing_else_of_the_others_is_seen(organization, second, settings):
    make_version(organization)
    used = stored_bytes(organizations=[organization.pk]).total()
    settings.UNPAID_LIMITS = settings.UNPAID_LIMITS | {"storage_bytes": used + 10}

    with tenant(organization=second):
        assert stored_bytes(organizations=[second.pk])[second.pk] == 0
        assert counted_bytes(organization=second) == used
        assert list(Organization.objects.values_list("pk", flat=True)) == [second.pk]
        with pytest.raises(StorageFull, match="10 bytes of storage left"):
            make_version(second)
    pay(second)
    with tenant(organization=second):
        make_version(second)


def test_the_outbox_gives_a_founder_one_turn(organization, second, rival):
    with transaction.atomic():
        for name, owner in (("a1", organization), ("b1", second), ("a2", organization), ("r1", rival)):
            outbox.publish(topic="upload.closed", key=name, payload={}, organization=owner)

    def order() -> list[str]:
        names = dict(OutboxMessage.objects.values_list("pk", "key"))
        return [names[pk] for pk in outbox._in_turn("data-small", 4)]

    assert order() == ["a1", "r1", "b1", "a2"]
    OutboxMessage.objects.filter(key="a1").update(sent_at=db_now(), taken_at=db_now())
    assert order() == ["r1", "b1", "a2"]
    pay(second)
    assert order() == ["b1", "r1", "a2"]


def test_the_gateway_counts_a_founder_once(organization, second, alice):
    found = [keys._find(make_key(one, alice).secret)[1] for one in (organization, second)]

    assert {(one.share_holder, one.limits[0].owner_id) for one in found} == {(alice.pk, alice.pk)}
    assert found[0].cache_salt != found[1].cache_salt
