"""The components behave: contrast, names and reflow; palette, keys, dialogs, tabs, theme, live figures."""

from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from apps.accounts.models import User
from tests.factories.accounts import make_organization
from tests.support.browser import WIDTHS, check_page

Open = Callable[..., Page]


@pytest.fixture
def reader(olga: User) -> User:
    make_organization("Northline", owner=olga)
    return olga


@pytest.mark.slow
def test_every_component_is_accessible_and_reflows(open_page: Open, reader: User) -> None:
    page = open_page("/styleguide", user=reader)
    page.locator("#loss-chart canvas").wait_for()

    check_page(page, WIDTHS, height=800)


def test_the_palette_filters_by_words_and_opens_what_is_chosen(open_page: Open, reader: User) -> None:
    page = open_page("/styleguide", user=reader)
    page.keyboard.press("Control+k")
    options = page.locator("#palette [role=option]:visible")

    page.keyboard.type("api key")
    expect(options).to_have_count(2)
    page.keyboard.press("ArrowDown")
    expect(options.nth(1)).to_have_attribute("aria-selected", "true")
    page.keyboard.press("Enter")

    expect(page).to_have_url("/keys")


def test_single_keys_lead_somewhere_except_from_fields(open_page: Open, reader: User) -> None:
    page = open_page("/styleguide", user=reader, is_fresh=True)

    page.locator("#id_name").press_sequentially("g m?")
    expect(page.locator("#id_name")).to_have_value("g m?")
    page.locator("h1").click()
    page.keyboard.press("?")
    expect(page.locator("#shortcuts")).to_be_visible()
    page.keyboard.press("Escape")
    page.clock.set_fixed_time("2026-11-22T12:00:00Z")  # however slowly this machine types
    page.keyboard.press("g")
    page.keyboard.press("m")

    expect(page).to_have_url("/members")


def test_a_typed_confirmation_opens_the_way_only_for_the_name(open_page: Open, reader: User) -> None:
    page = open_page("/styleguide", user=reader)
    opener = page.get_by_role("button", name="Typed confirmation")
    opener.click()
    delete = page.get_by_role("button", name="Delete dataset")

    expect(delete).to_be_disabled()
    page.get_by_label("Type support-tickets-v3 to confirm").fill("support-tickets-v3")
    expect(delete).to_be_enabled()
    page.keyboard.press("Escape")

    expect(page.locator("#delete")).to_be_hidden()
    expect(opener).to_be_focused()


def test_tabs_move_by_arrow_and_rows_choose_by_click(open_page: Open, reader: User) -> None:
    page = open_page("/styleguide", user=reader)

    page.get_by_role("tab", name="Samples").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#p-logs")).to_be_visible()
    expect(page.locator("#p-samples")).to_be_hidden()

    page.locator("tr:has(#g-b200) .c-cost").click()
    expect(page.locator("#g-b200")).to_be_checked()
    expect(page.locator(".price-hero")).to_contain_text("$2.18")


@pytest.mark.slow
def test_the_theme_is_kept_by_the_server(open_page: Open, reader: User) -> None:
    page = open_page("/styleguide", user=reader)

    page.get_by_role("button", name="Switch theme").click()
    page.reload()

    expect(page.locator("html")).to_have_attribute("data-theme", "dark")


def test_live_metrics_move_figures_bars_and_the_chart(open_page: Open, reader: User) -> None:
    page = open_page("/styleguide", user=reader)
    page.locator("#loss-chart canvas").wait_for()

    page.evaluate(
        """() => document.querySelector("#loss-chart").dispatchEvent(new CustomEvent("metric",
             {bubbles: true, detail: {data: JSON.stringify({step: 1400, train_loss: 0.7, percent: 64.7})}}))"""
    )

    expect(page.locator("[data-live=percent]")).to_have_text(["65", "65"])
    expect(page.locator("[role=progressbar][aria-label=Training]")).to_have_attribute("aria-valuenow", "65")
    page.locator("#loss-chart .u-over").hover(position={"x": 480, "y": 100})
    expect(page.locator("#loss-chart .chart-tip")).to_be_visible()


def test_menus_open_beside_their_button_and_copy_tells_so(open_page: Open, reader: User) -> None:
    page = open_page("/styleguide", user=reader)
    button = page.get_by_role("button", name="Menu", exact=True)
    button.click()
    menu = page.locator("#demo-menu")

    expect(menu).to_be_visible()
    gap = page.evaluate(
        """() => { const b = document.querySelector("[popovertarget=demo-menu]").getBoundingClientRect(),
                        m = document.querySelector("#demo-menu").getBoundingClientRect();
                   return Math.min(Math.abs(m.top - b.bottom), Math.abs(b.top - m.bottom)) }"""
    )
    assert gap < 8
    page.keyboard.press("Escape")

    page.locator("[data-copied='dataset ID copied']").click()
    expect(page.locator("[data-toasts]")).to_contain_text("dataset ID copied")
    assert page.evaluate("() => navigator.clipboard.readText()") == "ds_4mt0c9"
