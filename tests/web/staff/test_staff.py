"""The operator console: who may open it, and what its forms do."""

import datetime
import html
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from apps.accounts.models import Organization, Region
from apps.billing.queries import get_balance
from apps.catalog.models import BaseModel, PriceRequest, PriceRule
from apps.catalog.operations import set_price
from apps.catalog.queries import active_price
from apps.config.env import ROOT
from apps.contracts import runs as wire
from apps.core.database.clock import db_now
from apps.core.models import AuditEntry, OutboxMessage
from apps.finetuning.jobs import control
from apps.finetuning.models import GpuPool, Worker, WorkerToken
from apps.finetuning.usage.quotas import get_quota
from apps.payments.models import CardRefund, TopUp
from tests.factories.accounts import make_organization, make_user
from tests.factories.finetuning import give_credit, make_job, make_pool
from tests.factories.serving import make_whole_model
from tests.support.pages import text
from tests.twins.control_plane import serve_control_plane

PAGES = ("pools", "base-models", "prices", "quotas", "jobs", "organizations")


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
    body = {"name": "big", "gpu_type": "cpu", "region": "local", "price_policy": "firm", "memory_gib": "80"}
    created = console.post("/staff/pools", body)
    assert 'href="/staff/prices?sku=training%3Abig"' in console.get(created["Location"]).content.decode()
    assert 'href="/staff/prices?sku=training%3Abig"' in console.get("/staff/pools").content.decode()
    assert '<option value="training:big" selected>' in console.get("/staff/prices?sku=training:big").content.decode()
    price = {"sku": "training:big", "price_usd": "2.69"}
    previewed = console.post("/staff/prices", price)
    assert active_price(sku="training:big") is None
    console.post("/staff/prices", price | {"confirmed": previewed.context["form"].previewed()})

    pool = GpuPool.objects.get(name="big")
    page = console.get(created["Location"])
    assert pool.memory_bytes == 80 * 2**30
    assert active_price(sku="training:big").price_nano == 2_690_000_000
    assert "$2.69" in page.content.decode()


def test_the_page_of_a_new_pool_says_that_its_price_waits(console, floor):
    set_price(
        sku="training:old", unit="gpu_ms", price_nano=10**9, per=3_600_000, by="user_1",
        now=db_now() - datetime.timedelta(days=40),
    )  # fmt: skip
    body = {"name": "gift", "gpu_type": "cpu", "region": "local", "price_policy": "firm", "memory_gib": "80"}
    created = console.post("/staff/pools", body | {"price_usd": "0.000001"}, follow=True)

    assert "Its price waits for another operator. Admit a worker." in text(created)
    assert active_price(sku="training:gift") is None


@pytest.mark.parametrize("sku", ["training:nonexistent", "inference:input:gpt-9", "storage:rows", "training:", ""])
def test_only_what_exists_here_gets_a_price(console, floor, sku):
    refused = console.post("/staff/prices", {"sku": sku, "price_usd": "1", "confirmed": f"{sku} 1  "})

    assert refused.status_code == 422
    assert "choose one from the list" in refused.content.decode() or not sku
    assert not PriceRule.objects.filter(sku=sku).exists()


def test_a_pool_is_edited_and_closed(console, floor):
    Region.objects.create(name="eu-south")
    console.post(f"/staff/pools/{floor.pool.pk}", {"region": "eu-south", "price_policy": "firm", "memory_gib": "12"})

    pool = GpuPool.objects.get(pk=floor.pool.pk)
    assert (pool.region_id, pool.memory_bytes, pool.is_open, pool.name) == (
        "eu-south",
        12 * 2**30,
        False,
        floor.pool.name,
    )
    assert AuditEntry.objects.get(target=pool.pk, action="pool.edited").actor.startswith("user_")
    assert (
        console.post(
            f"/staff/pools/{pool.pk}", {"region": "eu-south", "price_policy": "firm", "memory_gib": "0"}
        ).status_code
        == 422
    )


def test_jobs_of_all_tenants_are_listed_with_whose_they_are(console, floor, rival):
    floor.job(suffix="ours")
    give_credit(rival)
    theirs = make_job(rival, floor.base_model, suffix="theirs")
    control.request_cancellation(job=theirs, by="key_test", now=db_now())

    def rows(query: str) -> list[tuple[str, str]]:
        page = console.get(f"/staff/jobs{query}")
        shown = [row["job"] for row in page.context["jobs"]]
        assert all(job.pk in page.content.decode() for job in shown)
        assert all(job.organization.name in page.content.decode() for job in shown)
        return [(job.organization.name, job.suffix) for job in shown]

    assert rows("") == [("Rival", "theirs"), ("Acme", "ours")]
    assert rows("?status=cancelled") == rows(f"?organization={rival.pk}") == [("Rival", "theirs")]
    of_rival = console.get(f"/staff/jobs?organization={rival.pk}").content.decode()
    assert "Jobs of Rival" in of_rival and f"?organization={rival.pk}&amp;status=failed" in of_rival
    assert f"/staff/jobs?organization={rival.pk}" in console.get(f"/staff/organizations/{rival.pk}").content.decode()
    assert len(rows("?organization=nobody")) == 2


@pytest.mark.parametrize("page", ["organizations", "quotas", "books"])
def test_organizations_are_searched_and_listed_25_a_page(console, organization, page):
    Organization.objects.bulk_create(
        Organization(name=f"Tenant {number:02}", slug=f"tenant-{number:02}") for number in range(60)
    )

    first, second = (console.get(f"/staff/{page}?q=tenant&page={number}").content.decode() for number in (1, 2))
    found = console.get(f"/staff/{page}?q={organization.pk}").content.decode()

    assert re.findall(r"Tenant \d\d</a>", first) == [f"Tenant {number:02}</a>" for number in range(25)]
    assert "?q=tenant&amp;page=2" in first
    assert "Tenant 25" in second and "Tenant 24" not in second and organization.name not in second
    assert organization.name in found and "Tenant" not in found


@pytest.mark.parametrize("page", ["organizations", "quotas", "books"])
def test_more_organizations_need_no_more_statements(console, organization, page, django_assert_max_num_queries):
    console.get(f"/staff/{page}")
    with CaptureQueriesContext(connection) as captured:
        console.get(f"/staff/{page}")
    for number in range(5):
        make_organization(f"Tenant {number}", owner=make_user(f"owner{number}"))

    with django_assert_max_num_queries(len(captured)):
        console.get(f"/staff/{page}")


def test_a_name_taken_is_said_at_its_field(console, floor):
    body = {"name": floor.pool.name, "gpu_type": "cpu", "region": "local", "price_policy": "firm", "memory_gib": "8"}
    response = console.post("/staff/pools", body)

    assert response.status_code == 422
    assert "A pool named" in response.content.decode()


def test_a_spot_pool_says_how_often_its_machines_are_taken_away(console, floor):
    body = {
        "name": "spot",
        "gpu_type": "cpu",
        "region": "local",
        "price_policy": "firm",
        "memory_gib": "8",
        "is_spot": "on",
    }
    silent = console.post("/staff/pools", body)
    created = console.post("/staff/pools", body | {"interruptions_per_hour": "0.2"})
    page = console.get(created["Location"]).content.decode()
    often = console.post(created["Location"], body | {"interruptions_per_hour": "99", "is_open": "on"})

    assert (silent.status_code, often.status_code) == (422, 422)
    assert "Say how often a machine of a spot pool is taken away." in silent.content.decode()
    assert "at most 12 interruptions an hour" in often.content.decode()
    assert "Spot, about 0.2 interruptions an hour" in page
    assert GpuPool.objects.get(name="spot").interruptions_per_hour == 0.2

    console.post(
        created["Location"],
        {"region": "local", "price_policy": "firm", "memory_gib": "8", "interruptions_per_hour": "0.2"},
    )
    assert GpuPool.objects.get(name="spot").is_spot is False


def test_a_token_is_shown_once_with_its_command(console, floor):
    pool = f"/staff/pools/{floor.pool.pk}"
    elsewhere = make_pool("elsewhere")
    made = console.post(f"{pool}/token", {"kind": "trainer"})

    assert (made.status_code, made.headers["Location"]) == (302, pool)  # a reload makes no other token
    assert "annt_" not in console.get(f"/staff/pools/{elsewhere.pk}").content.decode()
    page = console.get(pool).content.decode()
    assert "python -m gpu_workers.common.enrolment --kind trainer --token annt_" in page
    assert WorkerToken.objects.count() == 1
    assert "annt_" not in console.get(pool).content.decode()


@pytest.mark.parametrize("kind", ["trainer", "replica"])
def test_the_printed_command_admits_a_machine_that_has_no_settings(console, floor, settings, tmp_path, kind):
    with serve_control_plane() as plane:
        settings.INTERNAL_URL = plane.url
        body = {"kind": kind} | ({"base_model": floor.base_model.pk} if kind == "replica" else {})
        page = console.post(f"/staff/pools/{floor.pool.pk}/token", body, follow=True).content.decode()
        command = html.unescape(re.search(r"ANNEAL_INTERNAL_URL=[^<]+", page)[0])
        plane.one_time_token = command.split()[-1]
        environment = {"HOME": str(tmp_path), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        done = subprocess.run(
            command, shell=True, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
        )

    assert done.returncode == 0, done.stderr
    [enrolled] = plane.enrollments
    assert enrolled.kind == kind
    assert re.fullmatch("" if kind == "trainer" else r"http://[\w.-]+:8003", enrolled.listen_url)
    assert (tmp_path / ".anneal-worker/credential.json").stat().st_mode & 0o777 == 0o600
    assert "Start it with" in done.stdout


def test_a_replica_needs_a_base_model(console, floor):
    response = console.post(f"/staff/pools/{floor.pool.pk}/token", {"kind": "replica"})

    assert response.status_code == 422
    assert not WorkerToken.objects.exists()


def test_a_pool_that_allows_it_admits_a_replica_for_one_whole_model(console, floor, organization):
    version = make_whole_model(organization, floor.base_model)
    pool, token = f"/staff/pools/{floor.pool.pk}", f"/staff/pools/{floor.pool.pk}/token"
    body = {"kind": "replica", "whole_model": version.model_name}

    refused = console.post(token, body)
    hidden = console.get(pool).content.decode()
    console.post(
        pool,
        {"region": "local", "price_policy": "firm", "memory_gib": "12", "is_open": "on", "serves_whole_models": "on"},
    )
    shown = console.get(pool).content.decode()
    unknown = console.post(token, body | {"whole_model": "ft:nobody"})
    admitted = console.post(token, body, follow=True)

    assert (refused.status_code, unknown.status_code, admitted.status_code) == (422, 422, 200)
    assert "No customer has a model of this name." in unknown.content.decode()
    assert 'name="whole_model"' in refused.content.decode()  # where its error stands
    assert "This pool does not serve whole models" in refused.content.decode()
    assert ('name="whole_model"' in hidden, 'name="whole_model"' in shown) == (False, True)
    assert "--kind replica --token annt_" in admitted.content.decode()
    assert WorkerToken.objects.get().whole_model == version


@pytest.mark.parametrize("is_for_everybody", [False, True])
def test_a_price_that_gives_something_away_waits_for_a_second_operator(
    is_for_everybody, console, client_for, organization, floor
):
    sku = f"training:{floor.pool.name}"
    price = {"sku": sku, "price_usd": "0"} | ({} if is_for_everybody else {"organization": organization.pk})
    previewed = console.post("/staff/prices", price)
    console.post("/staff/prices", price | {"confirmed": previewed.context["form"].previewed()})
    wanted = PriceRequest.objects.get()
    own = console.get("/staff/prices").content.decode()
    console.post(f"/staff/prices/requests/{wanted.pk}", {"decision": "approve"})
    before = active_price(sku=sku, organization=organization)
    second = client_for(make_user("otto", is_operator=True))

    both = second.get("/staff/prices").content.decode(), console.get("/staff/prices").content.decode()

    assert "Withdraw" in own and "Approve" not in own and "manage.py createoperator" in own
    assert "Approve" in both[0] and all("manage.py createoperator" not in page for page in both)
    second.post(f"/staff/prices/requests/{wanted.pk}", {"decision": "approve"})
    after = active_price(sku=sku, organization=organization)
    assert before and after and (before.price_nano > 0, after.price_nano) == (True, 0)


def test_a_large_refund_waits_on_the_payments_page(console, client_for, organization):
    topup = TopUp.objects.create(
        organization=organization, origin="user", amount_cents=50_000, requested_by="user_1", status="paid",
        paid_at=db_now(),
    )  # fmt: skip
    refund = CardRefund.objects.create(
        organization=organization, topup=topup, credit_cents=20_000, reason="r", status="waiting", needs_approval=True,
        requested_by="user_other",
    )  # fmt: skip

    assert "Approve" in console.get("/staff/payments").content.decode()
    console.post(f"/staff/payments/refunds/{refund.pk}", {"decision": "approve"})

    refund.refresh_from_db()
    assert refund.status == "requested"


@pytest.mark.parametrize(("action", "field"), [("cordon", "cordoned_at"), ("drain", "drain_requested_at")])
def test_workers_are_cordoned_and_drained(console, floor, action, field):
    console.post(f"/staff/workers/{floor.worker.pk}/{action}")

    assert getattr(Worker.objects.get(pk=floor.worker.pk), field) is not None
    assert AuditEntry.objects.filter(target=floor.worker.pk).exists()


def test_a_worker_is_revoked_once_its_name_is_typed(console, floor, claim):
    floor.job()
    claim()
    worker, address = floor.worker, f"/staff/workers/revoke?worker={floor.worker.pk}"
    asked = " ".join(console.get(address).content.decode().split())
    refused = console.post(address, {"worker": worker.pk, "confirm": "another"})
    kept = Worker.objects.get(pk=worker.pk).revoked_at
    done = console.post(address, {"worker": worker.pk, "confirm": worker.hostname})

    assert "1 job loses its work since the last checkpoint" in asked and worker.hostname in asked
    assert (refused.status_code, kept, done.headers["Location"]) == (422, None, f"/staff/workers/{worker.pk}")
    assert Worker.objects.get(pk=worker.pk).revoked_at is not None
    assert AuditEntry.objects.filter(target=worker.pk, action="worker.revoked").exists()


def test_a_base_model_is_retired_once_its_name_is_typed(console, floor):
    base_model = floor.base_model
    address = f"/staff/base-models/retire?model={base_model.pk}"
    asked = console.get(address).content.decode()
    refused = console.post(address, {"model": base_model.pk, "confirm": ""})
    kept = BaseModel.objects.get(pk=base_model.pk).retired_at
    console.post(address, {"model": base_model.pk, "confirm": base_model.display_name})

    assert "Its adapters keep answering" in asked
    assert (refused.status_code, kept) == (422, None)
    assert BaseModel.objects.get(pk=base_model.pk).retired_at is not None


def test_a_cordon_is_undone_from_its_message(console, floor):
    page = console.post(f"/staff/workers/{floor.worker.pk}/cordon", follow=True).content.decode()

    assert f'<form method="post" action="/staff/workers/{floor.worker.pk}/uncordon">' in page and "Undo" in page

    console.post(f"/staff/workers/{floor.worker.pk}/drain")
    page = console.post(f"/staff/workers/{floor.worker.pk}/uncordon", follow=True).content.decode()
    assert "takes work again" in page and "Undo" not in page  # a cordon would not begin the drain again


def test_a_worker_shows_its_load_its_attempts_and_its_changes(console, floor, claim):
    another, job = floor.job(), floor.job()
    claim()
    claim().start().report(
        wire.StepCompleted, step=1, total_steps=10, epoch=0.1, train_loss=1.0, learning_rate=1e-3, grad_norm=None,
        trained_tokens=5, tokens_per_second=1.0, training_seconds=1.0, gpu_utilization=0.5, memory_bytes=3 * 2**30,
    )  # fmt: skip
    console.post(f"/staff/workers/{floor.worker.pk}/cordon")

    page = html.unescape(console.get(f"/staff/workers/{floor.worker.pk}").content.decode())
    pool = console.get(f"/staff/pools/{floor.pool.pk}").content.decode()

    assert f'href="/staff/jobs/{job.pk}"' in page and f'href="/staff/jobs/{job.pk}"' in pool
    assert f'href="/staff/workers/{floor.worker.pk}"' in pool and f'href="/staff/jobs/{another.pk}"' in pool
    assert "Drain, moves 2 jobs" in page and "on 2 of 4 GPUs" in " ".join(pool.split())
    assert "worker.cordoned" in page and "Olga" in page and "Cordoned" in page
    assert "50%" in page and "3 GiB" in page
    assert f'href="/staff/workers/{floor.worker.pk}"' in console.get("/staff/audit").content.decode()
    assert f'href="/staff/workers/{floor.worker.pk}"' in console.get(f"/staff/jobs/{job.pk}").content.decode()
    assert console.get("/staff/workers/worker_x").status_code == 404


def test_limits_are_set_and_an_empty_field_lifts_one(console, organization):
    body = {"concurrent_gpus": "3", "queued_jobs": "", "weight": "2"}
    console.post(f"/staff/quotas/{organization.pk}", body)

    quota = get_quota(organization=organization)
    assert (quota.concurrent_gpus, quota.queued_jobs, quota.weight) == (3, None, 2)


def test_limits_have_units_beside_what_the_organization_uses(console, floor, organization):
    floor.job()
    path = f"/staff/quotas/{organization.pk}"
    page = console.get(path).content.decode()
    body = {"weight": "1", "storage_bytes": "1.5 TB", "gpu_seconds_per_month": "90 hours a month"}

    wrong = console.post(path, body | {"queued_jobs": "many"})
    console.post(path, body | {"tokens_per_minute": "2 million tokens"})

    assert 'value="20 GB"' in page and 'value="100 hours"' in page
    assert "Now 1. At most 1 in the last 30 days." in page
    assert wrong.status_code == 422
    assert "Write a number with its unit, such as 20 jobs." in wrong.content.decode()
    quota = get_quota(organization=organization)
    assert (quota.storage_bytes, quota.gpu_seconds_per_month) == (1_500 * 10**9, 90 * 3600)
    assert quota.tokens_per_minute == 2_000_000
    listed = console.get("/staff/quotas").content.decode()
    assert "0s of 90 hours" in listed and "of 1.5 TB" in " ".join(listed.split())


def test_credit_granted_twice_by_one_form_is_granted_once(console, organization):
    url = f"/staff/organizations/{organization.pk}/adjust"
    once = console.get(url).context["form"]["once"].value()
    for _ in range(2):
        console.post(url, {"amount_usd": "12.50", "reason": "Welcome", "once": once})

    assert get_balance(organization=organization).available_nano == 12_500_000_000


@pytest.mark.parametrize("path", ["/staff/pools/pool_x", "/staff/quotas/org_x", "/staff/organizations/org_x/adjust"])
def test_an_unknown_id_is_not_found(console, path):
    assert console.get(path).status_code == 404
