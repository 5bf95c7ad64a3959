"""The page of a job that is opened before the job starts: it shows by itself all that the job then does."""

from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from apps.accounts.models import User
from apps.catalog.models import GpuType
from apps.contracts import runs as wire
from apps.finetuning.models import FineTuningJob, GpuPool
from apps.finetuning.runs import claims
from tests.factories.finetuning import TrainingSetup
from tests.support.attempts import Attempt, step
from tests.support.browser import wait_on


@pytest.fixture
def queued(floor: TrainingSetup) -> FineTuningJob:
    """A job in the queue of a pool of GPUs."""
    job = floor.job(suffix="triage")
    gpu, _ = GpuType.objects.get_or_create(key="h100-sxm", defaults={"name": "H100", "memory_bytes": 80 * 2**30})
    GpuPool.objects.filter(pk=floor.pool.pk).update(gpu_type=gpu)
    return job


@pytest.mark.slow
def test_a_page_opened_in_the_queue_shows_the_run_by_itself(
    open_page: Callable[..., Page], floor: TrainingSetup, queued: FineTuningJob, alice: User
) -> None:
    page = open_page(f"/jobs/{queued.pk}", user=alice)
    page.evaluate("() => { window.isFirstLoad = true; }")
    throughput = page.locator("[data-live=throughput]")
    expect(throughput).to_have_text("–")

    attempt = Attempt(claims.claim(worker=floor.worker, base_models=None)).start()
    measured = {"gpu_utilization": 0.5, "gpu_celsius": 61.0, "gpu_watts": 642.4}
    for number in (1, 2):
        attempt.report(wire.StepCompleted, **step(number, 3 / number), **measured)
    attempt.report(wire.EvaluationCompleted, step=2, valid_loss=1.25)
    attempt.checkpoint(step=2, seconds=4.0)

    expect(throughput).to_have_text("900")
    expect(page.locator("[data-live=gpu_watts]")).to_have_text("642")
    expect(page.get_by_role("tab", name="GPU load")).to_be_visible()
    expect(page.locator("#job-state")).to_contain_text("/ 10")
    expect(page.locator("[data-legend=checkpoints]")).to_be_visible()
    wait_on(page, lambda: _share_of_newest_step(page) < 0.3)  # the axis goes on to the last step of the run
    expect(page.locator("#loss-chart .chart-tip")).to_contain_text("best")
    assert page.evaluate("() => window.isFirstLoad")


def _share_of_newest_step(page: Page) -> float:
    """Point at the end of the axis, and return where the nearest step lies on it."""
    box = page.locator("#loss-chart .u-over").bounding_box()
    assert box
    page.mouse.move(box["x"] + box["width"] - 20, box["y"] + 40)
    page.mouse.move(box["x"] + box["width"] - 10, box["y"] + 50)
    points = page.locator("#loss-chart .u-cursor-pt").all()
    places = [place["x"] + place["width"] / 2 for point in points if (place := point.bounding_box())]
    return (max(places) - box["x"]) / box["width"] if places else 1.0
