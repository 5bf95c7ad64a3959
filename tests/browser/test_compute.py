"""The live form of the compute step in a real browser: with script, with keys alone, and without script."""

import datetime
import re
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, Request, Route, expect

from apps.accounts.models import User
from apps.billing.models import Hold
from apps.finetuning.models import FineTuningJob
from tests.factories.market import Market, join_machines
from tests.support.browser import WIDTHS, check_page, find_violations, wait_until

Open = Callable[..., Page]
RECORD_SHIFTS = """() => { window.shifted = 0; new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) if (!entry.hadRecentInput) window.shifted += entry.value;
}).observe({ type: "layout-shift", buffered: true }); }"""


@pytest.mark.slow
def test_the_compute_step_is_accessible_in_every_state(open_page: Open, market: Market, alice: User) -> None:
    join_machines()
    due = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=2)
    page = open_page(f"{market.wizard}&step=compute&several=1&needed_by={due:%Y-%m-%dT%H:%MZ}", user=alice)
    for summary in page.locator("summary").all():
        if summary.is_visible() and not summary.evaluate("(node) => node.parentElement.open"):
            summary.click()

    assert page.locator(".gpu-head").bounding_box()["height"] < 60, "its controls are on one line"
    check_page(page, WIDTHS)


@pytest.mark.slow
def test_changing_the_recipe_updates_the_panel_and_leaves_what_is_being_typed(
    open_page: Open, market: Market, alice: User
) -> None:
    page = open_page(f"{market.wizard}&step=compute", user=alice, is_fresh=True)
    asked: list[Request] = []
    page.on("request", lambda request: asked.append(request) if "/jobs/new" in request.url else None)
    price, l4 = page.locator(".price-hero b"), page.locator("tr:has(#g-l4)")
    first_price = price.inner_text()

    page.clock.install()
    page.clock.pause_at(datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1))
    page.get_by_label("Epochs").press("Control+a")
    page.get_by_label("Epochs").press_sequentially("12")  # faster than the pause it waits for
    page.clock.resume()
    expect(price).not_to_have_text(first_price)

    assert len(asked) == 1
    expect(page.get_by_label("Epochs")).to_be_focused()
    expect(page.get_by_label("Epochs")).to_have_value("12")
    expect(page.locator("#recipe-strip")).to_contain_text("12 epochs")
    assert page.locator("#price-live").get_attribute("aria-live") == "polite"

    expect(l4).to_contain_text("Needs ")
    page.get_by_label("Method").select_option("qlora")
    expect(l4).to_contain_text("GiB free")
    expect(page.locator("#price-lines")).to_contain_text("GPU used")
    page.get_by_label("Rank").select_option("64")
    expect(page.locator("#recipe-strip")).to_contain_text("QLoRA, rank 64")
    page.get_by_label("Longest row").fill("1024")
    expect(page.locator("#recipe-strip")).to_contain_text("1,024 tokens")
    page.get_by_label("Batch").fill("8")
    expect(page.locator("#recipe-strip")).to_contain_text("batch 8")
    assert find_violations(page) == []


def test_waiting_for_the_answer_dims_what_is_stale_and_moves_nothing(
    open_page: Open, market: Market, alice: User
) -> None:
    page = open_page(f"{market.wizard}&step=compute", user=alice)
    held: list[Route] = []
    page.route(re.compile("step=compute.*epochs=4"), lambda route: held.append(route))
    places = [page.locator(selector) for selector in ("#compute-live", "#compute-more", "#price-live", "#price-act")]
    before = [place.bounding_box() for place in places]
    page.evaluate(RECORD_SHIFTS)

    page.get_by_label("Epochs").fill("4")

    expect(page.locator("#wizard")).to_have_attribute("data-state", "stale")
    expect(page.locator("#compute-live")).to_have_css("opacity", "0.55")
    assert [place.bounding_box() for place in places] == before
    wait_until(lambda: page.wait_for_timeout(50) or held)
    held[0].continue_()
    expect(page.locator("#recipe-strip")).to_contain_text("4 epochs")
    expect(page.locator("#compute-live")).to_have_css("opacity", "1")
    assert page.evaluate("() => window.shifted") < 0.05


def test_a_bad_value_is_said_and_a_good_one_brings_the_prices_back(
    open_page: Open, market: Market, alice: User
) -> None:
    page = open_page(f"{market.wizard}&step=compute", user=alice)

    page.get_by_label("Epochs").fill("900")
    expect(page.locator("#compute-live")).to_contain_text("epochs must be a whole number from 1 to 100.")
    expect(page.locator("#price-live")).to_contain_text("Fix the highlighted fields")
    expect(page.locator("#price-act button")).to_be_disabled()
    expect(page.locator("#dock-act button")).to_be_disabled()
    assert find_violations(page) == []
    page.get_by_label("Epochs").fill("2")
    expect(page.locator("#g-h100")).to_be_visible()
    expect(page.locator("#price-act button")).to_be_enabled()
    expect(page.locator("#dock-act button")).to_be_enabled()
    complaints: list[str] = open_page.complaints  # type: ignore[attr-defined]
    complaints[:] = [text for text in complaints if "422" not in text]  # Chromium's note on a refused value


def test_a_deadline_is_typed_in_the_readers_zone_and_sent_in_utc(open_page: Open, market: Market, alice: User) -> None:
    page = open_page(f"{market.wizard}&step=compute", user=alice)
    moment = page.evaluate(
        "() => new Date(Date.now() + 7200e3 - new Date().getTimezoneOffset() * 60e3).toISOString().slice(0, 16)"
    )
    utc = page.evaluate("(text) => new Date(text).toISOString().slice(0, 16) + 'Z'", moment)

    with page.expect_request(lambda request: "needed_by=" in request.url) as asked:
        page.get_by_label("Needed by").fill(moment)

    assert f"needed_by={utc.replace(':', '%3A')}" in asked.value.url
    expect(page.locator("tr:has(#g-a100)")).to_contain_text("Late")
    expect(page.locator("#compute-more")).to_contain_text("due ")


@pytest.mark.slow
def test_a_way_to_make_it_fit_is_one_click_and_the_job_launches_as_shown(
    open_page: Open, market: Market, alice: User
) -> None:
    page = open_page(f"{market.wizard}&step=compute", user=alice)

    ways = page.locator("tr.ways:has-text('QLoRA')").first
    ways.locator("summary").click()
    with page.expect_navigation():
        ways.get_by_role("link", name=re.compile("^Apply Use QLoRA")).first.click()
    expect(page.get_by_label("Method")).to_have_value("qlora")
    page.locator("tr:has(#g-l4) .c-cost").click()
    expect(page.locator("#price-lines")).to_contain_text(re.compile(r", l4\b"))
    price = page.locator(".price-hero b").inner_text()
    page.locator("#price-act button").click()
    expect(page.locator("h1")).to_have_text("Review and launch")
    expect(page.locator(".price-hero b")).to_have_text(price)
    page.get_by_role("button", name=re.compile("^Launch, hold")).click()

    expect(page).to_have_url(re.compile(r"/jobs/ftjob-"))
    job = FineTuningJob.objects.get()
    assert (job.pool.name, job.method) == ("l4", "qlora")
    assert Hold.objects.get(pk=job.hold_id).amount_nano == job.spend_cap_nano


def test_without_script_the_button_updates_the_table(open_page: Open, market: Market, alice: User) -> None:
    page = open_page("/", user=alice)
    context = page.context.browser.new_context(
        base_url=page.url.rsplit("/", 1)[0], java_script_enabled=False, storage_state=page.context.storage_state()
    )
    plain = context.new_page()
    plain.goto(f"{market.wizard}&step=compute")
    plain.get_by_label("Method").select_option("qlora")
    plain.get_by_role("button", name="Update").click()

    expect(plain.locator("h1")).to_have_text("Choose compute")
    expect(plain.locator("tr:has(#g-l4)")).to_contain_text("GiB free")
    context.close()


def test_another_method_renews_what_was_only_shown_and_keeps_what_was_typed(
    open_page: Open, market: Market, alice: User
) -> None:
    page = open_page(f"{market.wizard}&step=method", user=alice)
    page.get_by_label("Epochs").fill("7")
    page.get_by_label("Grade answers by").select_option("regex")

    page.get_by_role("radio", name="Full fine-tuning").check()

    expect(page.get_by_label("Learning rate")).to_have_value("2e-05")
    expect(page.get_by_label("Epochs")).to_have_value("7")
    expect(page.get_by_role("radio", name="Full fine-tuning")).to_be_focused()
    expect(page.get_by_label("Pattern")).to_be_visible()
    expect(page.get_by_label("Rank", exact=True)).to_be_hidden()
    assert find_violations(page) == []
