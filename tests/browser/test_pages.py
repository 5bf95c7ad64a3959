"""Every page of the product in a real browser: readable by everybody, no policy broken, and the wizard to its end."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from playwright.sync_api import Page, expect

from apps.accounts.models import Organization, User
from apps.adapters.operations import record_verdict
from apps.billing.models import Hold
from apps.billing.usage.metering import record_usage
from apps.contracts import runs as wire
from apps.contracts.failures import FailureCode
from apps.contracts.parity import ParityResult
from apps.core.database.clock import db_now
from apps.core.templatetags.ui import usd
from apps.datasets.inspection.inspections import inspect_version
from apps.finetuning.models import FineTuningJob, GpuPool, PricePolicy
from apps.finetuning.runs import claims
from apps.serving.operations import deploy
from tests.factories.finetuning import TrainingSetup, make_pool, make_training_file, make_worker
from tests.factories.usage import make_record
from tests.support.attempts import REPORT, Attempt, step
from tests.support.browser import DRAWN, check_page, find_overflow, hold_first, wait_on

Open = Callable[..., Page]
WIDTHS = (1440, 390)
CERTIFIED = ParityResult(
    tokens=627,
    tuned_difference=0.0123,
    base_difference=0.0137,
    largest_difference=0.12,
    effect=2.18,
    tolerance=0.05,
    is_template_equal=True,
    engine="vllm 0.32.0",
)


@dataclass(frozen=True)
class SeededOrganization:
    """An organization where something has happened: a job that ended, one failed, one under way, one at its cap."""

    floor: TrainingSetup
    done: FineTuningJob
    failed: FineTuningJob
    running: FineTuningJob
    capped: FineTuningJob

    @property
    def wizard(self) -> str:
        return f"/jobs/new?dataset={self.done.training_file_id}&model={self.floor.base_model.name}"

    def paths(self) -> list[str]:
        adapter = f"/adapters/{self.done.adapter_version_id}"
        return [
            "/", "/adapters", adapter, f"{adapter}/delete", "/usage", "/usage/traffic?days=1",
            f"/playground?model={self.done.adapter_version.model_name}", "/playground/saved",
            "/nowhere", "/jobs", f"/jobs/{self.done.pk}", f"/jobs/{self.failed.pk}", f"/jobs/{self.running.pk}",
            *(f"/jobs/{self.running.pk}?tab={tab}" for tab in ("samples", "log", "events", "dataset", "checkpoints")),
            f"/jobs/{self.capped.pk}", f"/jobs/compare?job={self.done.pk}&job={self.running.pk}",
            "/jobs/new", f"/jobs/new?dataset={self.done.training_file_id}", self.wizard,
            f"{self.wizard}&method=lora", f"{self.wizard}&method=lora&epochs=900",
            f"{self.wizard}&method=lora&pool={self.floor.pool.name}",
        ]  # fmt: skip


@pytest.fixture
def wizard(floor: TrainingSetup, organization: Organization) -> str:
    """The wizard for a dataset of an organization that has trained nothing."""
    version = make_training_file(organization, floor.base_model)
    return f"/jobs/new?dataset={version.pk}&model={floor.base_model.name}&method=lora"


@pytest.fixture
def running(floor: TrainingSetup) -> FineTuningJob:
    return run_some_steps(floor)


def run_some_steps(floor: TrainingSetup) -> FineTuningJob:
    running = floor.job(suffix="escalations")
    attempt = claim(floor)
    for number in range(1, 5):
        attempt.report(wire.StepCompleted, **step(number, 3 / number))
    return running


def claim(floor: TrainingSetup) -> Attempt:
    attempt = Attempt(claims.claim(worker=floor.worker, base_models=None))
    attempt.start()
    return attempt


@pytest.fixture
def lived(floor: TrainingSetup) -> SeededOrganization:
    make_pool("idle")
    make_pool("tiny", memory_bytes=2**20)
    done = floor.job(suffix="triage")
    claim(floor).succeed(floor.base_model, report=REPORT)
    GpuPool.objects.update(price_policy=PricePolicy.METERED)
    capped = floor.job(suffix="capped", spend_cap_nano=60_000_000)
    attempt = claim(floor)
    attempt.beat(training_seconds=46.0)
    attempt.checkpoint(step=5, seconds=47.0)
    attempt.finish(wire.Stopped(reason="paused", step=5, training_seconds=47.0))
    failed = floor.job(suffix="refunds")
    claim(floor).finish(wire.Failed(code=FailureCode.OUT_OF_MEMORY, message="CUDA out of memory at step 3."))
    running = run_some_steps(floor)
    done.refresh_from_db()
    of_adapter = {"organization_id": floor.organization.pk, "model_name": done.adapter_version.model_name}
    request = {"input_price_id": None, "output_price_id": None, "slice_id": "", "occurred_at": db_now()}
    record_usage(records=[make_record(**of_adapter, **request), make_record(**of_adapter, **request, finish="quota")])
    deploy(version=done.adapter_version, by="system")
    record_verdict(version=done.adapter_version, is_accepted=True, reason="", parity=CERTIFIED, now=db_now())
    return SeededOrganization(floor, done, failed, running, capped)


def test_a_log_grows_while_the_job_runs(open_page: Open, floor: TrainingSetup, alice: User) -> None:
    job = floor.job()
    attempt = claim(floor)
    for number in range(60):
        attempt.report(wire.LogLine, level="info", message=f"line {number}")
    page = open_page(f"/jobs/{job.pk}?tab=log&q=line", user=alice)
    log = page.get_by_role("region", name="Log lines")
    page.get_by_role("searchbox", name="Search the log").fill("kept")

    attempt.report(wire.LogLine, level="warn", message="the newest line")
    page.evaluate("() => htmx.trigger('#job-live', 'log')")

    expect(log.get_by_text("the newest line")).to_be_visible()
    wait_on(page, lambda: log.evaluate("n => n.scrollTop > 0 && n.scrollHeight - n.scrollTop - n.clientHeight < 2"))
    expect(page.get_by_role("searchbox", name="Search the log")).to_have_value("kept")


def test_a_job_shows_its_newest_state_when_answers_are_late(
    open_page: Open, running: FineTuningJob, alice: User
) -> None:
    page = open_page(f"/jobs/{running.pk}", user=alice)
    held = hold_first(page, f"**/jobs/{running.pk}", target="div#job-state")
    page.evaluate("() => htmx.trigger('#job-live', 'state')")
    wait_on(page, lambda: bool(held))
    late = held[0].fetch()
    FineTuningJob.objects.filter(pk=running.pk).update(total_steps=4321)
    page.evaluate("() => htmx.trigger('#job-live', 'state')")
    held[0].fulfill(response=late)

    expect(page.locator("#job-state")).to_contain_text("4,321")


@pytest.mark.slow
def test_the_palette_and_single_keys_find_objects_and_walk_lists(
    open_page: Open, lived: SeededOrganization, alice: User
) -> None:
    page = open_page("/jobs", user=alice)
    page.keyboard.press("j")
    expect(page.locator("a.name").first).to_be_focused()
    page.keyboard.press("j")
    expect(page.locator("a.name").nth(1)).to_be_focused()
    page.keyboard.press("k")
    expect(page.locator("a.name").first).to_be_focused()

    page.keyboard.press("/")
    expect(page.get_by_label("Search fine-tunes")).to_be_focused()
    page.keyboard.press("Control+k")
    page.keyboard.type("refunds")
    options = page.locator("#palette [role=option]:visible")
    expect(options).to_have_text([re.compile("refunds"), re.compile("Payments")])  # and a page of the help
    check_page(page, WIDTHS[:1])
    page.keyboard.press("Enter")
    expect(page).to_have_url(f"/jobs/{lived.failed.pk}")


def test_a_late_answer_to_other_words_is_not_offered(open_page: Open, floor: TrainingSetup, alice: User) -> None:
    for suffix in ("triage", "refunds", "escalations"):
        floor.job(suffix=suffix)
    page = open_page("/jobs", user=alice)
    held = hold_first(page, "**/search?*", target="div#palette-found", count=2)
    page.keyboard.press("Control+k")
    page.keyboard.type("refunds")
    wait_on(page, lambda: bool(held))
    late = held[0].fetch()

    page.locator("#palette input").fill("escalations")
    wait_on(page, lambda: len(held) == 2)
    held[0].fulfill(response=late)
    page.evaluate("() => fetch('/jobs')")  # its answer comes after the late one
    page.evaluate(DRAWN)
    assert page.locator("#palette-found [role=option]").all_inner_texts() == []

    held[1].continue_()
    expect(page.locator("#palette-found [role=option]")).to_have_text([re.compile("escalations")])
    page.context.set_offline(True)
    page.locator("#palette input").fill("triage")
    expect(page.locator("[data-palette-none]")).to_have_text("The search did not answer. Try again.")
    expect(page.locator("#palette-found [role=option]")).to_have_count(0)
    expect(page.locator("[data-lost]")).to_contain_text("You are offline")
    page.context.set_offline(False)
    expect(page.locator("[data-lost]")).to_be_hidden()
    complaints: list[str] = open_page.complaints  # type: ignore[attr-defined]
    complaints[:] = [text for text in complaints if "Failed to fetch" not in text and "ERR_INTERNET" not in text]


@pytest.mark.slow
def test_a_list_keeps_its_rows_when_an_answer_fails_and_says_so(
    open_page: Open, running: FineTuningJob, alice: User
) -> None:
    page = open_page("/jobs", user=alice)
    page.route("**/jobs", lambda route: route.fulfill(status=502, body="<h1>Bad gateway</h1>"))

    expect(page.locator("[data-lost]")).to_contain_text("could not be updated", timeout=30_000)
    expect(page.locator("a.name").first).to_be_visible()
    page.keyboard.press("Control+k")
    page.locator("#palette input").fill(running.pk)
    expect(page.locator("#palette-found [role=option]")).to_have_count(1)  # another answer, and the list still fails
    page.keyboard.press("Escape")
    expect(page.locator("[data-lost]")).to_be_visible()
    page.unroute_all()
    expect(page.locator("[data-lost]")).to_be_hidden()
    complaints: list[str] = open_page.complaints  # type: ignore[attr-defined]
    complaints[:] = [text for text in complaints if "502" not in text]


def test_live_figures_are_written_as_the_page_wrote_them(open_page: Open, running: FineTuningJob, alice: User) -> None:
    page = open_page(f"/jobs/{running.pk}", user=alice)

    figures = {"train_loss": 0.3912, "throughput": 1255.4}
    shown = page.evaluate(
        """(data) => {
          document.dispatchEvent(new CustomEvent("metric", {detail: {data}}));
          return Object.keys(data).map((key) => document.querySelector(`[data-live=${key}]`).textContent);
        }""",
        figures,
    )

    assert shown == ["0.391", "1,255"]  # read at once: the stream of the job sends its own figures at any moment


def test_the_dialog_that_cancels_a_job_follows_its_state(open_page: Open, floor: TrainingSetup, alice: User) -> None:
    job = floor.job(suffix="waiting")
    page = open_page(f"/jobs/{job.pk}", user=alice)
    page.get_by_role("button", name="Cancel", exact=True).click()
    dialog = page.locator("#cancel-job")
    expect(dialog).to_contain_text("It leaves the queue. You pay nothing")

    claim(floor)
    page.evaluate("() => htmx.trigger('#job-live', 'state')")

    expect(dialog).to_contain_text("no checkpoint is kept. You pay about")
    expect(dialog).to_be_visible()
    dialog.get_by_role("button", name="Cancel the job").click()
    expect(page.locator("h1")).to_have_text("Cancel waiting?")  # it has started meanwhile


def test_the_charts_legend_names_what_is_drawn(open_page: Open, running: FineTuningJob, alice: User) -> None:
    page = open_page(f"/jobs/{running.pk}", user=alice)
    page.locator("#loss-chart canvas").wait_for()
    legend = page.locator("[data-legend]:visible")

    expect(legend).to_have_text(["Train"])
    page.get_by_role("tab", name="Speed").click()
    expect(legend).to_have_text(["Speed"])


@pytest.mark.slow
def test_every_page_is_accessible_reflows_and_breaks_no_policy(
    open_page: Open, lived: SeededOrganization, alice: User
) -> None:
    page = open_page("/", user=alice)

    for path in lived.paths():
        page.goto(path)
        check_page(page, WIDTHS, height=4000)  # the dock at its foot covers nothing
        _forget_refusals(page, open_page)


@pytest.mark.slow
def test_a_comparison_names_its_jobs_beside_each_value_on_a_phone(
    open_page: Open, lived: SeededOrganization, alice: User
) -> None:
    page = open_page(f"/jobs/compare?job={lived.done.pk}&job={lived.running.pk}", user=alice, width=390)
    results = page.locator("section:has(#results-h)")

    expect(results.get_by_role("link").filter(has_not_text="CSV")).to_have_text(["triage", "escalations"])
    cell = results.locator("td:visible").first
    assert cell.evaluate("n => getComputedStyle(n, '::before').content") == '"triage"'


def test_the_first_page_of_a_new_organization_is_accessible(open_page: Open, floor: TrainingSetup, alice: User) -> None:
    check_page(open_page("/", user=alice), WIDTHS[-1:])


@pytest.mark.slow
def test_the_wizard_leads_from_a_dataset_to_a_launched_job(
    open_page: Open, floor: TrainingSetup, organization: Organization, alice: User
) -> None:
    make_training_file(organization, floor.base_model, rows=4_000)
    GpuPool.objects.update(price_policy=PricePolicy.METERED)  # a cap above the quote is held
    page = open_page("/jobs/new", user=alice)
    proceed = page.locator("#wizard button.btn-primary[type=submit]")

    proceed.click()
    expect(page.locator("h1")).to_have_text("Choose a base model")
    with page.expect_navigation():
        proceed.click()
    expect(page.locator("h1")).to_have_text("Choose a method")
    first_price = page.locator(".price-hero b").inner_text()
    page.get_by_label("Epochs").fill("9")
    page.get_by_label("Epochs").press("Tab")
    expect(page.locator(".price-hero b")).not_to_have_text(first_price)  # without leaving the step
    price = page.locator(".price-hero b").inner_text()
    proceed.click()
    expect(page.locator("h1")).to_have_text("Choose compute")
    expect(page.locator(".price-hero b")).to_have_text(price)
    page.get_by_label("Spend cap").fill("3.25")
    proceed.click()
    expect(page.locator("h1")).to_have_text("Review and launch")
    expect(page.locator(".price-hero b")).to_have_text(price)
    page.get_by_role("button", name="Launch, hold $3.25").click()

    expect(page).to_have_url(re.compile(r"/jobs/ftjob-"))
    job = FineTuningJob.objects.get()
    assert usd(job.estimate["cost_nano_p50"]) == price
    assert Hold.objects.get(pk=job.hold_id).amount_nano == 3_250_000_000
    assert job.hyperparameters["epochs"] == 9


def test_a_price_that_comes_later_moves_nothing(
    open_page: Open, floor: TrainingSetup, organization: Organization, alice: User
) -> None:
    version = make_training_file(organization, floor.base_model)
    inspect_version(version=version)
    page = open_page("/datasets", user=alice)
    held = hold_first(page, "**/datasets/*", target="span#least-price")
    page.goto(f"/datasets/{version.pk}")
    wait_on(page, lambda: bool(held))

    def places() -> list[tuple[float, float]]:
        boxes = [page.locator(selector).bounding_box() for selector in (".page-head .metaline", ".stats")]
        return [(box["y"], box["height"]) for box in boxes if box]

    before = places()
    held[0].continue_()

    expect(page.locator("#least-price")).to_contain_text("from")
    assert len(before) == 2 and places() == before


def test_another_pool_changes_the_estimate_and_the_call_to_copy(
    open_page: Open, floor: TrainingSetup, wizard: str, alice: User
) -> None:
    other = make_pool("second")
    make_worker(other, credential="annw_another", base_model=floor.base_model)
    page = open_page(wizard, user=alice)

    page.locator(f"tr:has(#g-{other.name}) .c-cost").click()

    expect(page.locator(f"#g-{other.name}")).to_be_checked()
    expect(page.locator("#price-lines")).to_contain_text(other.name)
    expect(page.locator("#copy-as-python-code")).to_contain_text(f'"pool": "{other.name}"')


def test_the_wizard_works_without_script(open_page: Open, wizard: str, alice: User) -> None:
    page = open_page("/", user=alice)
    context = page.context.browser.new_context(
        base_url=page.url.rsplit("/", 1)[0], java_script_enabled=False, storage_state=page.context.storage_state()
    )
    plain = context.new_page()
    plain.goto(wizard)
    plain.locator("#wizard button.btn-primary[type=submit]").click()
    plain.get_by_role("button", name=re.compile("^Launch, hold")).click()

    plain.wait_for_url(re.compile(r"/jobs/ftjob-"))
    context.close()


def _forget_refusals(page: Page, open_page: Open) -> None:
    """A page that refuses a value answers 422, which Chromium writes to its console as a failed resource."""
    complaints: list[str] = open_page.complaints  # type: ignore[attr-defined]
    if "epochs=900" in page.url or page.url.endswith("/nowhere"):
        complaints[:] = [text for text in complaints if "422" not in text and "404" not in text]


@pytest.mark.slow
def test_german_is_as_narrow_as_the_narrowest_window(open_page: Open, lived: SeededOrganization, alice: User) -> None:
    User.objects.filter(pk=alice.pk).update(language="de")
    page = open_page("/account", user=alice, width=390)

    expect(page.locator("html")).to_have_attribute("lang", "de")
    wide = {}
    paths = [path for path in lived.paths() if path != "/nowhere" and "epochs=" not in path]  # these are refused
    for path in ("/account", "/members", "/keys", "/budgets", "/datasets", *paths):
        page.goto(path)
        if excess := find_overflow(page):
            wide[path] = excess
    assert not wide
