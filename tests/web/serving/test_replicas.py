"""The operator's replicas: their figures, and an upgrade by surge: the new one loads before the old one goes."""

import pytest
from django.test import Client

from apps.adapters.models import AdapterVersion
from apps.core.database.clock import db_now
from apps.core.models import AuditEntry
from apps.serving.isolation import isolate_replica
from apps.serving.metrics import metrics_token, render_metrics
from apps.serving.models import MeteringCheck, Replica
from apps.serving.queries import list_routes
from tests.factories.serving import dedicate, load, make_adapter, make_replica, make_served_model, make_whole_model


@pytest.fixture
def version(db: None, organization) -> AdapterVersion:
    return make_adapter(organization, make_served_model("small", "unix:///old", is_priced=False))


@pytest.fixture
def old(version) -> Replica:
    replica = version.adapter.base_model.replicas.get()
    replica.load = {"memory_bytes": 3 * 2**30, "tokens_per_second": 41.5, "waiting": 2}
    replica.save()
    return replica


@pytest.fixture
def console(client_for, olga) -> Client:
    return client_for(olga)


def urls(version: AdapterVersion) -> list[str]:
    route = next(route for route in list_routes() if route.adapter_version_id == version.pk)
    return [upstream.url for upstream in route.upstreams]


def test_pages_show_memory_adapters_queue_and_speed(console, version, old) -> None:
    index = console.get("/staff/replicas").content.decode()
    page = console.get(f"/staff/replicas/{old.pk}").content.decode()

    assert "1 of 56" in index
    for said in ("3.22 GB", "41.5", "2 waiting", version.model_name, "/internal/v1/metrics"):
        assert said in page


def test_what_an_engine_counted_is_shown_beside_what_was_metered(console, old) -> None:
    MeteringCheck.objects.create(
        replica=old, day="2026-11-03", counted_input_tokens=5000, counted_output_tokens=40, least_input_tokens=4000,
        most_input_tokens=4250, least_output_tokens=40, most_output_tokens=40, request_count=7, difference_share=0.15,
        is_within=False, checked_at="2026-11-04T01:00Z",
    )  # fmt: skip

    for path in ("/staff/replicas", f"/staff/replicas/{old.pk}"):
        page = console.get(path).content.decode()
        assert "3 Nov 2026" in page and "15.00 % differ" in page and "4,000 to 4,250" in page
    assert f'anneal_replica_metering_difference{{replica="{old.pk}",base_model="small"}} 0.15' in render_metrics()


def test_an_operator_accepts_the_room_that_a_replica_reports(console, old) -> None:
    Replica.objects.filter(pk=old.pk).update(reported_room={"capacity": 112, "slots": 16, "max_rank": 32})
    page = f"/staff/replicas/{old.pk}"
    before = console.get(page).content.decode()

    console.post(f"{page}/room", {"capacity": 112, "slots": 16, "max_rank": 32})

    after = console.get(page).content.decode()
    assert "It reports 112 places" in before and "of 56 places" in before
    assert "It reports" not in after and "of 112 places" in after


@pytest.mark.slow
def test_an_upgrade_by_surge_leaves_no_gap(console, organization, version, old) -> None:
    new = make_replica(version.adapter.base_model, "unix:///new")

    console.post(f"/staff/replicas/{old.pk}/drain")

    assert urls(version) == ["unix:///old"]  # it answers until the new one has it
    assert [one.adapter_version_id for one in new.placements.all()] == [version.pk]
    assert "1 of its adapters" in console.get(f"/staff/replicas/{old.pk}").content.decode()
    load(version, new)
    assert urls(version) == ["unix:///new"]
    Replica.objects.filter(pk=new.pk).update(observed_at="2000-01-01T00:00Z")  # lost meanwhile
    assert "1 of its adapters" in console.get(f"/staff/replicas/{old.pk}").content.decode()
    Replica.objects.filter(pk=new.pk).update(observed_at=db_now())
    assert "You can stop its agent" in console.get(f"/staff/replicas/{old.pk}").content.decode()

    console.post(f"/staff/replicas/{old.pk}/drain", {"off": "1"})
    assert urls(version) in (["unix:///old"], ["unix:///new"])  # one place is enough again


def test_an_isolated_replica_says_why_until_an_operator_trusts_it_again(console, version, old) -> None:
    isolate_replica(replica_id=old.pk, reason="use_1: counted 1e+12 input tokens")

    index = console.get("/staff/replicas").content.decode()
    page = console.get(f"/staff/replicas/{old.pk}").content.decode()
    routed = urls(version)
    console.post(f"/staff/replicas/{old.pk}/clear")

    assert "Isolated" in index
    assert "counted 1e+12 input tokens" in page and "found faulty 1 time:" in page
    assert (routed, urls(version)) == ([], ["unix:///old"])
    assert "Isolated" not in console.get(f"/staff/replicas/{old.pk}").content.decode()
    cleared = AuditEntry.objects.get(action="replica.cleared", target=old.pk)
    assert "1e+12" in cleared.details["fault"]
    assert f'anneal_replica_faults{{replica="{old.pk}",base_model="small"}} 1' in render_metrics()


def test_metrics_name_each_replica_and_adapter_for_those_with_the_token(version, old, settings) -> None:
    settings.ROOT_URLCONF = "apps.config.urls_internal"
    client = Client()

    refused = client.get("/internal/v1/metrics")
    text = client.get("/internal/v1/metrics", headers={"authorization": f"Bearer {metrics_token()}"}).content.decode()

    assert refused.status_code in (401, 403)
    assert f'anneal_replica_tokens_per_second{{replica="{old.pk}",base_model="small"}} 41.5' in text
    assert f'anneal_adapter_replicas{{model="{version.model_name}",organization="acme"}} 1' in text
    assert "# TYPE anneal_pool_queued_runs gauge" in text


def test_the_metrics_token_is_shown_on_demand_and_audited(console, old) -> None:
    page = f"/staff/replicas/{old.pk}"
    shown = console.post(page).content.decode()

    assert metrics_token() not in console.get(page).content.decode()
    assert metrics_token() in shown
    assert AuditEntry.objects.get(action="metrics_token.shown").target == old.pk


def test_a_replica_of_a_whole_model_says_whose_it_is(console, organization, version) -> None:
    whole = make_whole_model(organization, version.adapter.base_model)
    replica = dedicate(whole, "unix:///own")

    index = console.get("/staff/replicas").content.decode()
    page = console.get(f"/staff/replicas/{replica.pk}").content.decode()

    assert "whole model" in index
    assert "one whole model of Acme" in page and whole.model_name in page
    assert "rank up to" not in page and "Adapters loaded" not in page
