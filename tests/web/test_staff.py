"""The operator console: who may open it, and what its forms do."""

import pytest

from apps.billing.queries import get_balance
from apps.catalog.queries import active_price
from apps.core.models import AuditEntry, OutboxMessage
from apps.finetuning.models import GpuPool, Worker, WorkerToken
from apps.finetuning.quotas import get_quota
from tests.factories.finetuning import Floor

PAGES = ("pools", "base-models", "prices", "quotas", "jobs", "organizations")


@pytest.fixture
def floor(organization) -> Floor:
    return Floor(organization)


@pytest.fixture
def console(client_for, olga):
    return client_for(olga)


@pytest.mark.parametrize("page", PAGES)
def test_pages_are_for_operators_only(page, floor, client_for, olga, alice, bob):
    floor.job()

    assert client_for(olga).get(f"/staff/{page}").status_code == 200
    assert client_for(alice).get(f"/staff/{page}").status_code == 403
    assert client_for(bob).get(f"/staff/{page}").status_code == 403
    assert client_for(None).get(f"/staff/{page}").status_code == 302


def test_an_effect_that_keeps_failing_is_shown_to_operators(console):
    OutboxMessage.objects.create(topic="mail", key="mail_1", attempts=3, last_error="OSError: early")
    OutboxMessage.objects.create(topic="mail", key="mail_2", attempts=9, last_error="OSError: refused")

    page = console.get("/staff/pools").content.decode()

    assert "mail_2" in page and "OSError: refused" in page
    assert "mail_1" not in page


def test_a_pool_is_created_priced_and_shown(console, floor):
    body = {"name": "big", "gpu_type": "cpu", "region": "eu-north", "memory_gib": "80"}
    created = console.post("/staff/pools", body)
    price = {"sku": "training:big", "price_usd": "2.69"}
    previewed = console.post("/staff/prices", price)
    assert active_price(sku="training:big") is None
    console.post("/staff/prices", price | {"confirmed": previewed.context["form"].previewed()})

    pool = GpuPool.objects.get(name="big")
    page = console.get(created["Location"])
    assert pool.memory_bytes == 80 * 2**30
    assert active_price(sku="training:big").price_nano == 2_690_000_000
    assert "$2.69" in page.content.decode()


def test_a_name_taken_is_said_at_its_field(console, floor):
    body = {"name": floor.pool.name, "gpu_type": "cpu", "region": "here", "memory_gib": "8"}
    response = console.post("/staff/pools", body)

    assert response.status_code == 422
    assert "There is a pool named" in response.content.decode()


def test_a_spot_pool_says_how_often_its_machines_are_taken_away(console, floor):
    body = {"name": "spot", "gpu_type": "cpu", "region": "eu", "memory_gib": "8", "is_spot": "on"}
    silent = console.post("/staff/pools", body)
    created = console.post("/staff/pools", body | {"interruptions_per_hour": "0.2"})
    page = console.get(created["Location"]).content.decode()
    often = console.post(created["Location"], body | {"interruptions_per_hour": "99", "is_open": "on"})

    assert (silent.status_code, often.status_code) == (422, 422)
    assert "Say how often a machine of a spot pool is taken away." in silent.content.decode()
    assert "at most 12 interruptions an hour" in often.content.decode()
    assert "Spot, about 0.2 interruptions an hour" in page
    assert GpuPool.objects.get(name="spot").interruptions_per_hour == 0.2

    console.post(created["Location"], {"region": "eu", "memory_gib": "8", "interruptions_per_hour": "0.2"})
    assert GpuPool.objects.get(name="spot").is_spot is False


def test_a_token_is_shown_once_with_its_command(console, floor):
    page = console.post(f"/staff/pools/{floor.pool.pk}/token", {"kind": "trainer"}).content.decode()

    assert "python -m gpu_workers.enroll --kind trainer --token annt_" in page
    assert WorkerToken.objects.count() == 1
    assert "annt_" not in console.get(f"/staff/pools/{floor.pool.pk}").content.decode()


def test_a_replica_needs_a_base_model(console, floor):
    response = console.post(f"/staff/pools/{floor.pool.pk}/token", {"kind": "replica"})

    assert response.status_code == 422
    assert not WorkerToken.objects.exists()


@pytest.mark.parametrize(
    ("action", "field"), [("cordon", "cordoned_at"), ("drain", "drain_requested_at"), ("revoke", "revoked_at")]
)
def test_workers_are_cordoned_drained_and_revoked(console, floor, action, field):
    console.post(f"/staff/workers/{floor.worker.pk}/{action}")

    assert getattr(Worker.objects.get(pk=floor.worker.pk), field) is not None
    assert AuditEntry.objects.filter(target=floor.worker.pk).exists()


def test_limits_are_set_and_an_empty_field_lifts_one(console, organization):
    body = {"concurrent_gpus": "3", "queued_jobs": "", "weight": "2"}
    console.post(f"/staff/quotas/{organization.pk}", body)

    quota = get_quota(organization=organization)
    assert (quota.concurrent_gpus, quota.queued_jobs, quota.weight) == (3, None, 2)


def test_credit_granted_twice_by_one_form_is_granted_once(console, organization):
    url = f"/staff/organizations/{organization.pk}/credit"
    once = console.get(url).context["once"]
    for _ in range(2):
        console.post(url, {"amount_usd": "12.50", "reason": "Welcome", "once": once})

    assert get_balance(organization=organization).available_nano == 12_500_000_000


@pytest.mark.parametrize("path", ["/staff/pools/pool_x", "/staff/quotas/org_x", "/staff/organizations/org_x/credit"])
def test_an_unknown_id_is_not_found(console, path):
    assert console.get(path).status_code == 404
