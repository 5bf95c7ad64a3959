"""A merged model that answers: from its own replica alone, to its organization alone, at a price."""

import pytest

from tests.factories.serving import BASE_MODEL, dedicate, make_replica, make_served_model, make_tenant, make_whole_model
from tests.support.gateway.processes import HI, error_of, wait_for_usage, wait_until

pytestmark = pytest.mark.django_db


@pytest.mark.slow
def test_a_whole_model_answers_its_organization_under_its_name_and_is_metered_like_its_base(gateway, world, engine):
    tenant = make_tenant("Merged", world.base_model)
    version = make_whole_model(tenant.organization, world.base_model)
    replica = dedicate(version, engine.url)
    body = {"model": version.model_name, "messages": HI}

    answer = gateway.http(tenant.key).post("/v1/chat/completions", json=body)
    foreign = gateway.http(world.rival.key).post("/v1/chat/completions", json=body)

    assert (answer.status_code, answer.json()["model"]) == (200, version.model_name)
    assert foreign.status_code == 404
    assert engine.bodies[-1]["model"] == version.whole_model_name
    [event] = wait_for_usage(tenant, 1)
    assert (event.model_name, event.replica_id) == (version.model_name, replica.pk)
    assert event.output_price.sku == f"inference:output:{BASE_MODEL}"


@pytest.mark.slow
def test_a_replica_of_a_whole_model_answers_neither_for_its_base_nor_for_adapters(gateway, world, engine):
    base_model = make_served_model("lonely")
    dedicate(make_whole_model(world.acme.organization, base_model), engine.url)
    http = gateway.http(world.acme.key)
    body = {"model": "lonely", "messages": HI}

    refused = wait_until(
        lambda: (found := http.post("/v1/chat/completions", json=body)).status_code == 503 and found, "no 503"
    )
    asked = [seen["model"] for seen in engine.bodies]
    make_replica(base_model, engine.url)

    wait_until(lambda: http.post("/v1/chat/completions", json=body).status_code == 200, "no answer of its own replica")
    assert error_of(refused)["param"] == "model"
    assert base_model.served_name not in asked
    assert engine.bodies[-1]["model"] == base_model.served_name
