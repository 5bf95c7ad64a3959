"""Aliases and warmth through the API."""

import pytest
from rest_framework.test import APIClient

from apps.adapters.models import AdapterVersion
from apps.catalog.operations import set_price
from apps.core.database.clock import db_now
from apps.serving.models import LoadedAdapter, Placement
from apps.serving.operations import undeploy
from tests.factories.serving import dedicate, make_adapter, make_served_model, make_whole_model


@pytest.fixture
def version(db: None, organization) -> AdapterVersion:
    return make_adapter(organization, make_served_model("small", "unix:///nowhere", is_priced=False))


@pytest.fixture
def http(api_client, key) -> APIClient:
    return api_client(key)


def test_an_alias_is_made_listed_as_a_model_moved_and_deleted(http, organization, version) -> None:
    made = http.post("/api/v1/aliases", {"name": "production", "version": version.model_name}, format="json")
    alias = made.json()

    assert made.status_code == 200, alias
    assert alias["model"].endswith(":bot:production")
    listed = {model["id"]: model for model in http.get("/v1/models").json()["data"]}
    assert listed[alias["model"]]["alias_of"] == version.model_name
    assert http.get(f"/v1/models/{alias['model']}").json()["alias_of"] == version.model_name
    job = {"model": alias["model"], "training_file": "file-1"}
    for answer in (
        http.delete(f"/v1/models/{alias['model']}"),
        http.post("/v1/fine_tuning/jobs", job, format="json"),
        *(http.get(f"/api/v1/models/{alias['model']}/{of}") for of in ("files", "serving")),
    ):
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "model")
        assert f"alias of {version.model_name}" in error["message"] and f"/aliases/{alias['id']}" in error["message"]
    refused = http.post(f"/api/v1/aliases/{alias['id']}/rollback")
    assert (refused.status_code, "no earlier version" in refused.json()["error"]["message"]) == (400, True)
    assert http.get("/api/v1/aliases").json()["data"] == [alias]
    assert http.delete(f"/api/v1/aliases/{alias['id']}").json()["deleted"] is True
    assert http.get(f"/api/v1/aliases/{alias['id']}").status_code == 404


def test_a_bad_alias_names_the_field(http, version) -> None:
    answer = http.post("/api/v1/aliases", {"name": "P", "version": version.model_name}, format="json")

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "name")


def test_the_state_is_warm_loading_cold_or_off(http, version) -> None:
    path = f"/api/v1/models/{version.model_name}/serving"

    def state() -> str:
        return http.get(path).json()["state"]

    assert state() == "warm"
    LoadedAdapter.objects.update(state="loading")
    assert state() == "loading"
    Placement.objects.all().delete()
    LoadedAdapter.objects.all().delete()
    assert state() == "cold"
    undeploy(version=version, by="system", now=db_now())
    assert state() == "off"


def test_a_merged_model_is_files_only_until_a_replica_of_its_own_serves_it(http, organization, version) -> None:
    set_price(sku="warm:small", unit="warm_ms", price_nano=1, per=1, by="system", now=db_now())
    merged = make_whole_model(organization, version.adapter.base_model)
    path = f"/api/v1/models/{merged.model_name}/serving"

    before = http.get(path).json()
    dedicate(merged, "unix:///own")
    after = http.get(path).json()

    assert http.get(f"/v1/models/{merged.model_name}").json()["status"] == "no_certificate"
    assert (before["state"], before["warm_price"]) == ("files_only", None)
    assert (after["state"], after["reason"], after["warm_price"]) == ("warm", None, None)


def test_warmth_without_a_price_says_so(http, version) -> None:
    answer = http.post(f"/api/v1/models/{version.model_name}/serving", {"keep_warm": True}, format="json")

    assert answer.status_code == 400
    assert "price" in answer.json()["error"]["message"]
