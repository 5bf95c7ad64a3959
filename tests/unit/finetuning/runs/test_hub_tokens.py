"""A hub token goes only to a trainer that is about to measure the model behind it."""

import datetime
import json

import msgspec
import pytest
from django.db.models import F
from django.test import Client

from apps.catalog.operations import keep_hub_token
from apps.finetuning.models import ThroughputProbe, Worker
from tests.factories.catalog import make_base_model
from tests.factories.finetuning import CREDENTIAL, TrainingSetup, probe_report
from tests.support.attempts import post

pytestmark = pytest.mark.urls("apps.config.urls_internal")


@pytest.fixture
def gated(floor: TrainingSetup):
    """A model whose repository asks for a token, not measured yet in the pool."""
    model = floor.base_model
    ThroughputProbe.objects.all().delete()
    model.repo, model.path, model.is_gated = "owner/gated", "", True
    model.save()
    keep_hub_token(base_model=model, hub_token="hf_secret")
    return model


def tokens(query: str = "") -> set[str | None]:
    answer = Client().get(f"/internal/v1/probes/missing{query}", headers={"Authorization": f"Bearer {CREDENTIAL}"})
    return {probe["base_model"].get("hub_token") for probe in json.loads(answer.content)["probes"]}


def test_a_hub_token_goes_to_the_trainer_that_is_about_to_measure(gated):
    assert tokens() == {None}
    assert tokens("?base_model=another") == {None}
    assert tokens(f"?base_model={gated.pk}") == {"hf_secret"}


def test_a_trainer_gets_no_second_hub_token_before_it_reported_the_first_or_long_after(gated):
    other = make_base_model("other")
    type(gated).objects.filter(pk=other.pk).update(repo="owner/other", path="", is_gated=True)
    keep_hub_token(base_model=other, hub_token="hf_other")
    path, credential = "/internal/v1/probes/missing?base_model=", {"Authorization": f"Bearer {CREDENTIAL}"}

    assert tokens(f"?base_model={gated.pk}") == tokens(f"?base_model={gated.pk}") == {"hf_secret", None}
    assert Client().get(path + other.pk, headers=credential).status_code == 429
    post("probes", msgspec.json.encode(probe_report(other, "lora")), CREDENTIAL)
    assert Client().get(path + other.pk, headers=credential).status_code == 429  # another model's report ends nothing
    post("probes", msgspec.json.encode(probe_report(gated, "lora")), CREDENTIAL)
    assert tokens(f"?base_model={other.pk}") == {"hf_other", None}

    Worker.objects.update(measuring_since=F("measuring_since") - datetime.timedelta(minutes=31))
    assert tokens(f"?base_model={gated.pk}") == {"hf_secret", None}


@pytest.mark.parametrize(
    "state", [{"kind": "replica"}, {"cordoned_at": "2026-11-01T00:00Z"}, {"drain_requested_at": "2026-11-01T00:00Z"}]
)
def test_a_machine_that_takes_no_work_gets_no_hub_token(gated, state):
    Worker.objects.update(**state)

    assert tokens(f"?base_model={gated.pk}") == set()


def test_nor_does_one_of_a_closed_pool_or_one_that_measured_it(gated, floor):
    for method in ("lora", "qlora", "full"):
        post("probes", msgspec.json.encode(probe_report(gated, method)), CREDENTIAL)
    measured = tokens(f"?base_model={gated.pk}")
    ThroughputProbe.objects.all().delete()
    floor.pool.is_open = False
    floor.pool.save()

    assert (measured, tokens(f"?base_model={gated.pk}")) == (set(), set())
