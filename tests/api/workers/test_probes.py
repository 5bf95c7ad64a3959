"""Measurements through the internal API: of a base model, or of a shape with made-up weights."""

import json

import msgspec
import pytest
from django.test import Client

from apps.catalog.models import GpuType
from apps.contracts.worker_api import ProbeReport
from apps.finetuning.models import ThroughputProbe
from apps.finetuning.quotes.pool_facts import list_shape_probes, newest_probes
from tests.factories.catalog import make_base_model
from tests.factories.finetuning import CREDENTIAL, TrainingSetup, make_worker, probe_report

CONFIG = {"model_type": "llama", "hidden_size": 64}


@pytest.fixture
def floor(organization, settings) -> TrainingSetup:
    made = TrainingSetup(organization)
    settings.ROOT_URLCONF = "apps.config.urls_internal"
    return made


def post(report: ProbeReport, credential: str = CREDENTIAL) -> int:
    body = msgspec.json.encode(report)
    headers = {"Authorization": f"Bearer {credential}"}
    return Client().post("/internal/v1/probes", body, content_type="application/json", headers=headers).status_code


def test_a_point_on_made_up_weights_is_kept_with_its_shape(floor):
    measured = msgspec.structs.replace(
        probe_report(floor.base_model), base_model_id="", shape="llama-3.1-8b", config=CONFIG, peak_allocated_bytes=7
    )

    assert post(measured) == 204

    (probe,) = list_shape_probes(pool=floor.pool)
    assert (probe.shape, probe.method, probe.base_model, probe.worker) == ("llama-3.1-8b", "lora", None, floor.worker)
    assert msgspec.convert(probe.report, ProbeReport) == measured


def test_such_a_point_is_no_base_models_speed(floor):
    before = newest_probes(pool=floor.pool)
    post(msgspec.structs.replace(probe_report(floor.base_model), base_model_id="", shape="x", config=CONFIG))

    assert newest_probes(pool=floor.pool) == before
    assert floor.job().estimate["tokens_per_second"] is not None


@pytest.mark.parametrize("changes", [{}, {"shape": "x"}, {"config": CONFIG}, {"shape": "x" * 61, "config": CONFIG}])
def test_a_point_of_nothing_in_particular_is_refused(floor, changes):
    report = msgspec.structs.replace(probe_report(floor.base_model), base_model_id="", **changes)

    assert post(report) == 400
    assert not ThroughputProbe.objects.filter(base_model=None).exists()


@pytest.mark.parametrize("changes", [
    {"gpu_key": "h200"}, {"micro_batch_size": 0}, {"sequence_length": 0}, {"tokens_per_second": 5e-324},
    {"tokens_per_second_low": 5e-324},
])  # fmt: skip
def test_a_measurement_of_which_no_quote_can_be_made_is_refused(floor, changes):
    report = msgspec.structs.replace(probe_report(floor.base_model), **changes)

    assert post(report) == 400
    assert floor.job().estimate["tokens_per_second"] is not None


def test_a_stranger_reports_nothing(floor):
    report = msgspec.structs.replace(probe_report(floor.base_model), base_model_id="", shape="x", config=CONFIG)

    assert post(report, credential="annw_made-up") == 401


def test_each_worker_measures_each_model_of_a_hub_once_and_so_holds_it_before_a_job_needs_it(floor):
    def missing(credential: str) -> list[str]:
        answer = Client().get("/internal/v1/probes/missing", headers={"Authorization": f"Bearer {credential}"})
        return [probe["method"] for probe in json.loads(answer.content)["probes"]]

    post(probe_report(floor.base_model, "full"))
    make_worker(floor.pool, credential="annw_second")
    assert (missing(CREDENTIAL), missing("annw_second")) == ([], [])  # the model lies in a folder

    type(floor.base_model).objects.update(path="", repo="acme/tiny", revision="c" * 40)
    assert (missing(CREDENTIAL), missing("annw_second")) == ([], ["lora"])
    post(probe_report(floor.base_model), credential="annw_second")
    assert missing("annw_second") == []


def test_a_method_that_the_pool_has_never_measured_comes_first(floor):
    larger = make_base_model(name="larger")
    type(larger).objects.filter(pk=larger.pk).update(parameter_count=10 * larger.parameter_count)
    ThroughputProbe.objects.filter(pool=floor.pool, method="qlora").delete()

    answer = Client().get("/internal/v1/probes/missing", headers={"Authorization": f"Bearer {CREDENTIAL}"})

    found = [(probe["base_model"]["name"], probe["method"], probe["is_first"]) for probe in answer.json()["probes"]]
    first = [(floor.base_model.name, "qlora", True), ("larger", "qlora", True)]
    assert found == [
        *first,
        (floor.base_model.name, "full", False),
        ("larger", "lora", False),
        ("larger", "full", False),
    ]


@pytest.mark.parametrize(
    ("gpu_type", "parameters", "is_measured"), [("cpu", 1, True), ("cpu", 10**9, False), ("l4-24", 1, False)]
)
def test_full_training_is_measured_where_no_data_sheet_tells_its_speed_and_it_fits(
    floor, gpu_type, parameters, is_measured
):
    GpuType.objects.get_or_create(key=gpu_type, defaults={"name": gpu_type, "memory_bytes": floor.pool.memory_bytes})
    type(floor.pool).objects.filter(pk=floor.pool.pk).update(gpu_type=gpu_type)
    type(floor.base_model).objects.filter(pk=floor.base_model.pk).update(parameter_count=parameters)

    answer = Client().get("/internal/v1/probes/missing", headers={"Authorization": f"Bearer {CREDENTIAL}"})

    assert [probe["method"] for probe in answer.json()["probes"]] == ["full"] * is_measured
