"""Pages of jobs in a real browser: one opened before its job starts, and estimates against actual figures."""

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from apps.accounts.models import Organization, User
from apps.catalog.models import GpuType
from apps.contracts import runs as wire
from apps.core.database.clock import db_now
from apps.finetuning.models import FineTuningJob, GpuPool
from apps.finetuning.pools import accuracy, calibrations
from apps.finetuning.runs import claims
from apps.interfaces.web.shell import live
from tests.factories.finetuning import TrainingSetup, give_credit, make_job
from tests.factories.outcomes import leave_queue, teach
from tests.support.attempts import Attempt, step
from tests.support.browser import check_page, wait_on

WIDTHS = (1440, 390)


@pytest.fixture
def job_id(transactional_db: None, organization: Organization, rival: Organization) -> str:
    """A job that ran, on a pool that 50 runs of two organizations have taught, the later ones well estimated."""
    floor = TrainingSetup(organization)
    job = floor.job(suffix="triage")
    attempt = Attempt(claims.claim(worker=floor.worker, base_models=None))
    attempt.start()
    attempt.succeed(floor.base_model, seconds=1.9, tokens=6_000, peak_memory_bytes=2**30)
    give_credit(rival)
    teach(leave_queue(make_job(rival, floor.base_model)), 25)
    calibrations.refit_pools(now=db_now())
    teach(leave_queue(floor.job()), 25, time=1.02, time_factor=1.3)
    calibrations.refit_pools(now=db_now())
    accuracy.refresh_public_reports(now=db_now())
    return job.pk


@pytest.mark.slow
def test_the_pages_of_accuracy_are_accessible_and_reflow(
    open_page: Callable[..., Page], job_id: str, alice: User, olga: User
) -> None:
    staff = open_page("/staff/pools", user=olga)
    staff.get_by_role("link", name="local-cpu").click()
    staff.get_by_role("link", name="Calibrations").click()
    expect(staff.locator("tr", has_text="In use")).to_be_visible()
    pages = (open_page("/accuracy"), open_page(f"/jobs/{job_id}", user=alice), staff)

    for page in pages:
        check_page(page, WIDTHS)


@pytest.mark.slow
def test_a_page_that_may_not_follow_its_job_says_why_and_asks_again(
    open_page: Callable[..., Page], floor: TrainingSetup, alice: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as full:
        full.setattr(live, "MAX_OF_PERSON", 0)
        full.setattr(live, "_FULL_SECONDS", 1)
        page = open_page(f"/jobs/{floor.job().pk}", user=alice)

        expect(page.locator("[data-live-lost]")).to_be_visible()
        expect(page.locator("[data-toasts]")).to_contain_text("You follow 0 live pages at once, the most allowed.")
    expect(page.locator("[data-live-lost]")).to_be_hidden()
    complaints: list[str] = open_page.complaints  # type: ignore[attr-defined]
    complaints[:] = [text for text in complaints if "429" not in text]  # Chromium's notes on the refusals


@pytest.mark.slow
def test_an_operator_takes_a_calibration_back_and_the_newest_again(
    open_page: Callable[..., Page], job_id: str, olga: User
) -> None:
    page = open_page("/staff/pools", user=olga)
    page.get_by_role("link", name="local-cpu").click()
    page.get_by_role("link", name="Calibrations").click()

    page.get_by_role("button", name="Use 1").click()
    expect(page.get_by_text("Chosen by hand", exact=True)).to_be_visible()
    page.get_by_role("button", name="Use the newest, always").click()

    expect(page.locator("tr", has_text="In use").locator(".name")).to_have_text("2")
    expect(page.get_by_text("Chosen by hand", exact=True)).to_have_count(0)


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


@pytest.mark.slow
def test_a_step_that_is_sampled_while_the_page_is_open_can_be_chosen(
    open_page: Callable[..., Page], floor: TrainingSetup, alice: User
) -> None:
    job = floor.job()
    attempt = Attempt(claims.claim(worker=floor.worker, base_models=None))
    attempt.start()
    page = open_page(f"/jobs/{job.pk}?tab=samples", user=alice)
    expect(page.get_by_label("Step", exact=True)).to_have_count(0)

    for number in (0, 2, 4):
        sample = wire.Sample(prompt="Charged twice", reference="billing", answer=f"answer {number}")
        attempt.report(wire.SamplesGenerated, step=number, samples=(sample,))

    expect(page.get_by_label("Step", exact=True).locator("option")).to_have_text(["Step 4", "Step 2"])
    page.get_by_label("Step", exact=True).select_option("2")
    expect(page.locator("#tab-news")).to_contain_text("answer 2")
    attempt.report(wire.SamplesGenerated, step=6, samples=(sample,))
    expect(page.get_by_label("Step", exact=True).locator("option")).to_have_count(3)
    expect(page.get_by_label("Step", exact=True)).to_have_value("2")


@pytest.mark.slow
def test_an_open_overview_follows_a_job_from_its_start_to_its_end(
    open_page: Callable[..., Page], floor: TrainingSetup, alice: User
) -> None:
    page = open_page("/", user=alice)
    page.get_by_text("Do this from the command line").click()
    expect(page.get_by_text("Nothing is running")).to_be_visible()

    floor.job(suffix="triage")
    page.evaluate("() => document.dispatchEvent(new Event('visibilitychange'))")
    running = page.locator("#running")
    expect(running).to_contain_text("triage")
    expect(page.locator("#train-step")).to_contain_text("Your job is running.")
    expect(page.locator(".side .live")).to_contain_text("1")

    attempt = Attempt(claims.claim(worker=floor.worker, base_models=None)).start()
    attempt.succeed(floor.base_model)
    expect(page.locator("#train-step")).to_contain_text("Your first adapter is trained.")
    expect(page.locator("section:has(#recent-adapters-h)")).to_contain_text("triage")
    expect(running).to_contain_text("Nothing is running")
    expect(running).not_to_have_attribute("hx-get", re.compile("."))
    expect(page.locator(".side .live")).to_have_count(0)
    expect(page.get_by_text("export ANNEAL_API_KEY")).to_be_visible()  # what was opened stays open
