"""The documentation site as files in a folder: its search runs in the browser, its pages fit and are accessible."""

from pathlib import Path

from playwright.sync_api import Browser, expect

from scripts.assets.docs_site import build
from tests.support.browser import check_page


def test_the_search_of_the_site_finds_a_call_a_command_and_a_code(browser: Browser, tmp_path: Path) -> None:
    build(tmp_path)
    page = browser.new_page()
    page.goto((tmp_path / "index.html").as_uri())
    found = page.locator("[data-found] a")

    for words, address in {
        "jobs watch": "command-line.html#anneal-jobs-watch",
        "graders/validate": "reference.html#grader_validate_post",
        "invalid_api_key": "errors.html#invalid_api_key",
    }.items():
        page.get_by_role("searchbox").fill(words)
        expect(found.first).to_have_attribute("href", address)
    found.first.click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Errors")
    page.get_by_role("searchbox").fill("zzzznothing")
    expect(page.get_by_text("No page has these words")).to_be_visible()
    check_page(page, (390, 1440))
    page.close()
