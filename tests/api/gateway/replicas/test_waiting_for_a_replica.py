"""Requests that wait for a replica: cold and loading adapters, models that start, checkpoints that are named."""

from concurrent.futures import ThreadPoolExecutor
from time import sleep

import pytest
from django.db import transaction

from apps.accounts.models import home_region
from apps.adapters.models import AdapterVersion
from apps.core.models import OutboxMessage
from apps.finetuning.recipes.checkpoint_names import name_of
from apps.interfaces.gateway.engines.routes import MAX_LOAD_SECONDS, REFRESH_SECONDS
from apps.interfaces.gateway.requests.engine_request import MAX_ANSWER_VALUES
from apps.serving.models import Deployment, LoadedAdapter, Placement, ReplicaFleet
from apps.serving.operations import desired_state
from tests.factories.accounts import make_key
from tests.factories.finetuning import find_pool, make_checkpoint, make_pool
from tests.factories.serving import (
    CONTEXT_LENGTH,
    INPUT_NANO,
    OUTPUT_NANO,
    PER,
    load,
    make_adapter,
    make_replica,
    make_served_model,
    make_tenant,
)
from tests.support.gateway.processes import HI, error_of, wait_for_usage, wait_until, wait_until_known

pytestmark = pytest.mark.django_db


def test_a_model_without_replica_asks_the_client_to_come_back(gateway, world):
    make_served_model("waiting")
    http = gateway.http(world.acme.key)
    body = {"model": "waiting", "messages": HI}

    answer = wait_until(
        lambda: (found := http.post("/v1/chat/completions", json=body)).status_code == 503 and found, "no 503"
    )

    assert answer.headers["retry-after"]
    assert "x-should-retry" not in answer.headers


@pytest.mark.slow
def test_a_request_waits_for_an_adapter_that_is_being_loaded(gateway, world):
    with transaction.atomic():  # no moment in which it is loaded
        version = make_adapter(world.acme.organization, world.base_model)
        loading = LoadedAdapter.objects.filter(adapter_version=version)
        loading.update(state="loading")
    http = gateway.http(world.acme.key)

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(http.post, "/v1/chat/completions", json={"model": version.model_name, "messages": HI})
        sleep(REFRESH_SECONDS + 0.5)  # the request came before the gateway had ever heard the name
        was_waiting = not answer.done()
        loading.update(state="loaded")

        assert answer.result().status_code == 200, answer.result().text
    assert was_waiting


def test_a_request_for_a_cold_adapter_asks_for_it_back_and_waits(gateway, world, engine):
    with transaction.atomic():  # no moment in which it is loaded
        base_model = make_served_model("crowded", engine.url)
        base_model.replicas.update(capacity=1)
        version, held = (make_adapter(world.acme.organization, base_model) for _ in range(2))
        Placement.objects.filter(adapter_version=version).delete()
        LoadedAdapter.objects.filter(adapter_version=version).delete()
        Deployment.objects.filter(adapter_version=version).update(created_at="2000-01-01T00:00Z")
    replica = base_model.replicas.get()
    http = gateway.http(world.acme.key)

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(http.post, "/v1/chat/completions", json={"model": version.model_name, "messages": HI})
        wait_until(
            lambda: [a.version_id for a in desired_state(replica=replica).adapters] == [version.pk], "not asked back"
        )
        LoadedAdapter.objects.filter(adapter_version=held).delete()
        load(version, replica)

        assert answer.result().status_code == 200, answer.result().text
    replica.refresh_from_db()
    assert replica.generation > 0


@pytest.mark.slow
def test_requests_wait_for_the_first_replica_and_are_answered_and_counted_once(gateway, world, engine):
    tenant = make_tenant("Early", world.base_model)
    with transaction.atomic():
        base_model = make_served_model("asleep")
        version = make_adapter(tenant.organization, base_model)
        place = {"pool": find_pool() or make_pool(), "base_model": base_model, "region_id": home_region()}
        fleet = ReplicaFleet.objects.create(able_at="2100-01-01T00:00Z", **place)
    wait_until_known(gateway, world, "asleep")
    http = gateway.http(tenant.key)

    with ThreadPoolExecutor(2) as pool:
        answers = [
            pool.submit(http.post, "/v1/chat/completions", json={"model": name, "messages": said("asleep")})
            for name in ("asleep", version.model_name)
        ]
        wait_until(ReplicaFleet.objects.filter(pk=fleet.pk).exclude(last_requested_at=None).exists, "nothing asked")
        assert not any(answer.done() for answer in answers)
        replica = make_replica(base_model, engine.url)
        assert answers[0].result().status_code == 200, answers[0].result().text
        wait_until(Placement.objects.filter(adapter_version=version).exists, "its adapter has no place")
        assert not answers[1].done()
        load(version, replica)
        assert answers[1].result().status_code == 200, answers[1].result().text

    assert len(wait_for_usage(tenant, 2)) == 2
    assert sum(body.get("messages") == said("asleep") for body in engine.bodies) == 2


@pytest.mark.slow
def test_what_nobody_can_pay_for_starts_no_replica_and_takes_no_place(gateway, world, engine):
    tenant = make_tenant("Penniless", world.base_model, credit_nano=1)
    with transaction.atomic():
        asleep, crowded = make_served_model("unpaid"), make_served_model("unpaid-cold", engine.url)
        crowded.replicas.update(capacity=1)
        version, _ = (make_adapter(tenant.organization, crowded) for _ in range(2))
        Placement.objects.filter(adapter_version=version).delete()
        LoadedAdapter.objects.filter(adapter_version=version).delete()
        Deployment.objects.filter(adapter_version=version).update(created_at="2000-01-01T00:00Z")
        place = {"pool": find_pool() or make_pool(), "base_model": asleep, "region_id": home_region()}
        fleet = ReplicaFleet.objects.create(able_at="2100-01-01T00:00Z", **place)
    checkpoint = make_checkpoint(tenant.organization, world.base_model, step=7)
    wait_until_known(gateway, world, "unpaid")
    sleep(REFRESH_SECONDS + 0.5)

    for name in ("unpaid", version.model_name, name_of(checkpoint)):
        key = make_key(tenant.organization, tenant.owner)  # a refusal is remembered for a second, by key
        answer = gateway.http(key).post("/v1/chat/completions", json={"model": name, "messages": HI})
        assert answer.status_code == 429 and error_of(answer)["code"] == "insufficient_quota", (name, answer.text)

    fleet.refresh_from_db()
    assert fleet.last_requested_at is None
    assert Deployment.objects.get(adapter_version=version).last_requested_at is None
    assert not OutboxMessage.objects.filter(topic="checkpoint.named", share=tenant.organization.pk).exists()


@pytest.mark.slow
def test_a_model_without_replica_reserves_no_more_than_the_answers_may_have(gateway, world):
    with transaction.atomic():
        base_model = make_served_model("long-asleep")
        base_model.context_length = 2**17
        base_model.save()
    prompt_nano, answer_nano = 2**17 * INPUT_NANO // PER, MAX_ANSWER_VALUES * OUTPUT_NANO // PER
    tenant = make_tenant("Careful", world.base_model, credit_nano=prompt_nano + answer_nano)
    wait_until_known(gateway, world, "long-asleep")
    body = {"model": "long-asleep", "messages": HI, "n": 128}
    http = gateway.http(tenant.key)

    answer = http.post("/v1/chat/completions", json=body)

    with transaction.atomic():  # other modules ask the same gateway how large a body may be
        base_model.context_length = CONTEXT_LENGTH
        base_model.save()
    large = b"x" * 2**20
    wait_until(lambda: http.post("/v1/chat/completions", content=large).status_code == 413, "still a large model")
    assert answer.status_code == 503, answer.text


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.mark.slow
def test_a_checkpoint_that_is_named_for_the_first_time_is_made_and_answers(gateway, world):
    checkpoint = make_checkpoint(world.acme.organization, world.base_model, step=7)
    body = {"model": name_of(checkpoint), "messages": HI}
    stranger = gateway.http(world.rival.key).post("/v1/chat/completions", json=body)
    asked = OutboxMessage.objects.filter(topic="checkpoint.named")

    assert stranger.status_code == 404 and not asked.exists()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(gateway.http(world.acme.key).post, "/v1/chat/completions", json=body)
        wait_until(asked.exists, "the checkpoint's model was not asked for")
        with transaction.atomic():  # as the outbox's handler and a replica do
            version = make_adapter(world.acme.organization, world.base_model)
            AdapterVersion.objects.filter(pk=version.pk).update(model_name=body["model"], number=None)

        assert answer.result().status_code == 200, answer.result().text


def test_an_adapter_that_no_replica_could_load_is_not_waited_for(gateway, world):
    with transaction.atomic():  # no moment in which it is loaded
        version = make_adapter(world.acme.organization, world.base_model)
        LoadedAdapter.objects.filter(adapter_version=version).update(state="failed")

    answer = gateway.http(world.acme.key).post(
        "/v1/chat/completions", json={"model": version.model_name, "messages": HI}, timeout=MAX_LOAD_SECONDS / 2
    )

    assert (answer.status_code, error_of(answer)["param"]) == (503, "model")
