"""Pools in the operator console: their form and price, and the tokens that admit machines."""

import datetime
import html
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from apps.accounts.models import Region
from apps.catalog.operations import set_price
from apps.catalog.queries import active_price
from apps.config.env import ROOT
from apps.core.database.clock import db_now
from apps.core.models import AuditEntry
from apps.finetuning.models import GpuPool, WorkerToken
from tests.factories.finetuning import make_pool
from tests.factories.serving import make_whole_model
from tests.support.pages import text
from tests.twins.control_plane import serve_control_plane


@pytest.mark.slow
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


def test_a_name_taken_is_said_at_its_field(console, floor):
    body = {"name": floor.pool.name, "gpu_type": "cpu", "region": "local", "price_policy": "firm", "memory_gib": "8"}
    response = console.post("/staff/pools", body)

    assert response.status_code == 422
    assert "A pool named" in response.content.decode()


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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
