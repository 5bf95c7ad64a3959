"""The memory, GPU and speed of a job, which its page loads again when its state changes."""

import html
import re

import pytest

from apps.catalog.models import GpuType
from apps.contracts import runs as wire
from apps.datasets.tasks import validate
from apps.finetuning.models import FineTuningJob, GpuPool
from apps.finetuning.tasks import admit_waiting
from tests.support.attempts import step

PART = {"HX-Request": "true", "HX-Target": "div#tab-machine"}


@pytest.fixture
def show(client_for, alice):
    client = client_for(alice)
    return lambda job, **headers: html.unescape(client.get(f"/jobs/{job.pk}", headers=headers).content.decode())


@pytest.fixture
def of_gpus(floor):
    """Return a function that makes the pool, and what was queued there, one of GPUs."""

    def make() -> None:
        gpu, _ = GpuType.objects.get_or_create(key="h100-sxm", defaults={"name": "H100", "memory_bytes": 80 * 2**30})
        GpuPool.objects.filter(pk=floor.pool.pk).update(gpu_type=gpu)

    return make


def test_a_job_in_the_queue_has_a_place_for_what_it_will_measure(floor, show, of_gpus):
    job = floor.job()
    on_cpu = show(job)
    of_gpus()
    on_gpu = show(job)

    assert '<span data-live="throughput" data-format="int">–</span>' in on_cpu
    assert 'data-live="gpu_percent"' not in on_cpu and 'data-live="gpu_percent"' in on_gpu
    assert '<template data-when="gpu_percent">' in on_cpu


@pytest.mark.slow
def test_a_job_gets_its_figures_once_its_files_are_valid(floor, show, client_for, bob):
    page = client_for(bob)
    form = re.findall(r'name="(once|model|cap_nano)"\s+value="([^"]*)"', page.get("/").content.decode())
    page.post("/first-job", dict(form))
    job = FineTuningJob.objects.get()
    assert job.status == "validating_files"
    before = show(job)
    validate(job.training_file_id)
    admit_waiting()
    part = show(job, **PART)

    assert '<div id="tab-machine" hidden' in before and "Throughput now" not in before
    assert "Throughput now" in part and "hidden" not in part.partition(">")[0]
    assert "<html" not in part and 'id="job-state"' not in part


def test_the_part_has_the_newest_figures(floor, show, claim):
    job = floor.job()
    claim().start().report(wire.StepCompleted, **step(1, 3.5), gpu_utilization=0.5, gpu_celsius=61.0)

    part = show(job, **PART)

    assert ">900</span>" in part and ">50</span>%" in part and ">61</span>" in part


def test_the_chart_names_the_best_checkpoint_and_the_epochs(floor, claim, client_for, alice):
    job = floor.job(hyperparameters={"epochs": 2})
    client, address = client_for(alice), f"/jobs/{job.pk}/chart"
    attempt = claim().start()
    begun = client.get(address).json()
    for number, loss in ((4, 1.25), (6, 1.5)):
        attempt.report(wire.StepCompleted, **step(number, 2.0))
        attempt.report(wire.EvaluationCompleted, step=number, valid_loss=loss)
        attempt.checkpoint(step=number, seconds=4.0)
    curves = client.get(address).json()

    assert (begun["total"], begun["epochs"], begun["best"]) == (10, [5], None)
    assert (curves["checkpoints"], curves["best"]) == ([4, 6], 4)
