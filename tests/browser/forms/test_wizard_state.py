"""What the wizard keeps and what it never shows: edits stand in the address, and no figure is for other values."""

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, Route, expect

from apps.accounts.models import User
from tests.factories.market import Market
from tests.support.browser import check_page, wait_on

Open = Callable[..., Page]
PRICE = ".price-hero b"


def proceed(page: Page) -> None:
    page.locator("#wizard .btn-primary[type=submit]").click()


@pytest.mark.slow
def test_reload_back_forward_and_a_shared_address_show_what_was_on_the_form(
    open_page: Open, market: Market, alice: User
) -> None:
    page = open_page(f"{market.wizard}&step=method", user=alice)
    page.get_by_label("Epochs").fill("3")
    page.get_by_label("Learning rate").fill("0.0005")
    page.locator("#id_suffix").fill("support-de")
    expect(page).to_have_url(re.compile("suffix=support-de"))

    page.reload()
    expect(page.get_by_label("Epochs")).to_have_value("3")
    expect(page.get_by_label("Learning rate")).to_have_value("0.0005")
    expect(page.locator("#id_suffix")).to_have_value("support-de")

    page.get_by_label("Epochs").fill("4")
    proceed(page)  # before the address has followed
    expect(page.locator("h1")).to_have_text("Choose compute")
    page.get_by_label("Epochs").fill("5")
    page.get_by_label("Batch").fill("8")
    page.get_by_text("Cost", exact=True).first.click()
    page.get_by_label("Spend cap").fill("2.50")
    expect(page).to_have_url(re.compile(r"(?=.*epochs=5)(?=.*batch_size=8)(?=.*sort=cost)(?=.*cap=2.50)"))
    shared = page.url
    page.reload()
    for label, value in (("Epochs", "5"), ("Batch", "8"), ("Spend cap", "2.50")):
        expect(page.get_by_label(label)).to_have_value(value)
    expect(page.locator("[name=sort][value=cost]")).to_be_checked()

    page.go_back()
    expect(page.locator("h1")).to_have_text("Choose a method")
    expect(page.get_by_label("Epochs")).to_have_value("4")
    expect(page.get_by_label("Learning rate")).to_have_value("0.0005")
    page.go_forward()
    expect(page.locator("h1")).to_have_text("Choose compute")
    expect(page.get_by_label("Epochs")).to_have_value("5")
    other = open_page(shared, user=alice)
    expect(other.get_by_label("Epochs")).to_have_value("5")
    expect(other.get_by_label("Spend cap")).to_have_value("2.50")


def test_another_step_opens_with_what_is_on_the_form(open_page: Open, market: Market, alice: User) -> None:
    page = open_page(f"{market.wizard}&step=compute", user=alice)
    page.get_by_label("Epochs").fill("6")
    page.locator(".steps").get_by_role("link", name="Method").click()

    expect(page.locator("h1")).to_have_text("Choose a method")
    expect(page.get_by_label("Epochs")).to_have_value("6")
    page.get_by_label("Epochs").fill("7")
    page.locator(".recipe").get_by_role("link", name=re.compile("Base model")).click()
    expect(page.locator("h1")).to_have_text("Choose a base model")
    proceed(page)
    expect(page.locator("#recipe-strip")).to_contain_text("7 epochs")


def test_a_step_begins_at_its_heading_and_the_keyboard_sends_it(open_page: Open, market: Market, alice: User) -> None:
    page = open_page(f"{market.wizard}&step=method", user=alice)

    expect(page.locator("h1")).to_be_focused()
    page.keyboard.press("Control+Enter")
    expect(page.locator("h1")).to_have_text("Choose compute")
    expect(page.locator("h1")).to_be_focused()
    page.keyboard.press("Control+Enter")
    expect(page.locator("h1")).to_have_text("Review and launch")


@pytest.mark.slow
@pytest.mark.parametrize("step", ["method", "compute"])
def test_offline_hides_what_is_for_other_values_and_the_connection_brings_it_back(
    step: str, open_page: Open, market: Market, alice: User
) -> None:
    page = open_page(f"{market.wizard}&step={step}", user=alice)
    before = page.locator(PRICE).inner_text()
    page.context.set_offline(True)

    page.get_by_label("Epochs").fill("4")

    notice = page.get_by_role("alert").filter(has_text="You are offline")
    expect(notice).to_be_visible()
    expect(page.locator(PRICE)).to_be_hidden()
    for figure in page.locator(".choice .num, .choice .needs, .c-cost > *, #price-act .price, #compute-more").all():
        expect(figure).to_be_hidden()
    check_page(page, (1440, 390))
    page.context.set_offline(False)
    expect(notice).to_be_hidden()
    expect(page.locator(PRICE)).to_be_visible()
    expect(page.locator(PRICE)).not_to_have_text(before)
    expect(page.get_by_label("Epochs")).to_have_value("4")
    _forget(open_page, "ERR_INTERNET_DISCONNECTED")


@pytest.mark.slow
def test_a_failed_answer_is_said_and_asked_for_again(open_page: Open, market: Market, alice: User) -> None:
    page = open_page(f"{market.wizard}&step=method", user=alice)
    before = page.locator(PRICE).inner_text()
    page.route(re.compile("epochs=4"), lambda route: route.fulfill(status=502, body="<h1>Bad gateway</h1>"))

    page.get_by_label("Epochs").fill("4")
    expect(page.get_by_role("alert").filter(has_text="could not be updated")).to_be_visible()
    expect(page.get_by_text("Bad gateway")).to_have_count(0)
    page.unroute_all()
    page.get_by_role("button", name="Try again").click()

    expect(page.locator(PRICE)).not_to_have_text(before)
    expect(page.locator("[data-live-failed]")).to_be_hidden()
    _forget(open_page, "502")


@pytest.mark.slow
def test_an_answer_to_values_that_changed_meanwhile_is_not_shown(open_page: Open, market: Market, alice: User) -> None:
    page = open_page(f"{market.wizard}&step=compute", user=alice, is_fresh=True)
    held: list[Route] = []
    page.route(re.compile("[?&]epochs=4(&|$)"), lambda route: held.append(route))
    before = page.locator(PRICE).inner_text()
    page.get_by_label("Epochs").fill("4")
    wait_on(page, lambda: bool(held))
    late = held[0].fetch()

    page.clock.install()
    page.clock.pause_at(page.evaluate("() => Date.now() + 60000"))
    page.get_by_label("Epochs").fill("9")  # its own request waits for a pause in typing
    with page.expect_response(lambda response: response.request == held[0].request):
        held[0].fulfill(response=late)
    expect(page.locator("#wizard")).to_have_attribute("data-state", "stale")
    expect(page.locator(PRICE)).to_have_text(before)
    page.clock.resume()

    expect(page.locator("#recipe-strip")).to_contain_text("9 epochs")
    expect(page.locator("#wizard")).to_have_attribute("data-state", "")


def test_an_error_goes_with_the_value_that_caused_it(open_page: Open, market: Market, alice: User) -> None:
    page = open_page(f"{market.wizard}&step=method", user=alice)
    page.get_by_label("Epochs").fill("9999")
    proceed(page)
    expect(page.locator("#wizard .error")).to_contain_text("from 1 to 100")
    expect(page.get_by_text("There's a problem with 1 field.")).to_be_visible()

    page.get_by_label("Epochs").fill("3")

    expect(page.locator("#wizard .error, #wizard [aria-invalid], .summary-errors, [data-problem]")).to_have_count(0)
    expect(page.locator(PRICE)).to_contain_text("$")
    _forget(open_page, "422")


def _forget(open_page: Open, note: str) -> None:
    """Chromium writes a failed request to its console."""
    complaints: list[str] = open_page.complaints  # type: ignore[attr-defined]
    complaints[:] = [text for text in complaints if note not in text and "Failed to fetch" not in text]
