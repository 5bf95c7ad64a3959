"""A person gets from the sign-up form to an answer of their own model in six clicks, without an operator."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect

from tests.e2e.platform import Platform, until
from tests.support.browser import browser_type_launch_args as browser_type_launch_args

PASSWORD = "correct-horse-battery"
TRAINING_MS = 240_000
expect.set_options(timeout=30_000)  # a busy machine


@pytest.fixture
def visit(browser: Browser, platform: Platform) -> Iterator[Any]:
    """Return a maker of people: each has a browser of their own, and no page of theirs may complain."""
    complaints: list[str] = []
    contexts = []

    def arrive() -> Page:
        context = browser.new_context(
            base_url=platform.url,
            viewport={"width": 1440, "height": 900},
            reduced_motion="reduce",  # painting a progress bar for minutes takes the cores from what it waits for
        )
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda said: complaints.append(said.text) if is_error(said) else None)
        return page

    yield arrive
    for context in contexts:
        context.close()
    assert complaints == []


def test_from_sign_up_to_an_answer_in_six_clicks(visit: Any, platform: Platform):
    person = visit()
    sign_up(person, platform, "nora@example.com", "Nora's Bakery")  # two clicks

    button = person.get_by_role("button", name=re.compile("^Train the sample, at most"))
    button.click(timeout=120_000)  # it appears when the worker has measured the model
    expect(person).to_have_url(re.compile(r"/jobs/ftjob-"))
    expect(person.get_by_role("link", name="Try it")).to_be_visible(timeout=TRAINING_MS)
    with person.expect_navigation():
        person.get_by_role("link", name="Try it").click()
    person.get_by_label("Message", exact=True).fill("My card has not arrived yet")
    person.get_by_role("button", name="Send").click()

    for column in ("1", "2"):
        replies = person.get_by_role("region", name=f"Column {column}").get_by_role("log")
        expect(replies.locator(".bubble-assistant .txt")).to_contain_text(re.compile(r"\w"), timeout=120_000)
    until(lambda: is_started(person), 60, "the first steps are still shown")


def is_started(page: Page) -> bool:
    """Return whether the overview has stopped to show the first steps; the use of the model is counted by then."""
    page.goto("/")
    return page.get_by_text("Train your first model").count() == 0


def is_error(said: ConsoleMessage) -> bool:
    """Return whether the console has an error, other than the gateway's 503 while the adapter is being loaded."""
    is_loading = "503" in said.text and said.location["url"].endswith("/v1/chat/completions")
    return said.type == "error" and not is_loading


def sign_up(page: Page, platform: Platform, email: str, organization: str) -> None:
    page.goto("/accounts/signup/")
    page.get_by_label(re.compile("^Your name")).fill("Nora")
    page.get_by_label("Email").fill(email)
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_label(re.compile("^Organization")).fill(organization)
    page.get_by_role("button", name="Create account").click()
    expect(page.get_by_text(str(platform.home / "mail"))).to_be_visible()
    page.goto(mailed_link(platform, email))
    page.get_by_role("button", name="Confirm").click()
    expect(page).not_to_have_url(re.compile("accounts"))


def mailed_link(platform: Platform, email: str) -> str:
    """Return the link of the mail to an address, from the folder of an installation that sends no mail."""

    def look() -> str | None:
        mails = [path.read_text() for path in (platform.home / "mail").glob("*.log")]
        found = [re.search(r": (http\S+)$", mail, re.MULTILINE) for mail in mails if f"To: {email}" in mail]
        return found[0][1] if found and found[0] else None

    return until(look, 60, f"no mail to {email}")
