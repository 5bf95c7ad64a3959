"""A person clicks from sign-up to an answer of their own model; an operator gives them credit on the way."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect

from tests.e2e.platform import BANKING, Platform, chat_rows, until
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


def test_from_sign_up_to_an_answer(visit: Any, platform: Platform, file_id: str, tmp_path: Path):
    person = visit()
    sign_up(person, platform, "nora@example.com", "Nora's Bakery")
    give_credit(visit(), platform, "Nora's Bakery")

    file = tmp_path / "questions.jsonl"
    file.write_text("".join(chat_rows(BANKING, 240)))
    person.goto("/datasets/upload")
    person.set_input_files("input[type=file]", file)
    person.get_by_role("button", name="Upload").click()
    expect(person.get_by_text("240", exact=True).first).to_be_visible(timeout=240_000)

    launch(person)
    expect(person.get_by_role("link", name="Try it")).to_be_visible(timeout=TRAINING_MS)
    with person.expect_navigation():
        person.get_by_role("link", name="Try it").click()

    person.get_by_label("Message", exact=True).fill("My card has not arrived yet")
    person.get_by_role("button", name="Send").click()
    for column in ("1", "2"):
        replies = person.get_by_role("region", name=f"Column {column}").get_by_role("log")
        expect(replies.locator(".bubble-assistant .txt")).to_contain_text(re.compile(r"\w"), timeout=120_000)


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
        found = [re.search(r"^http\S+$", mail, re.MULTILINE) for mail in mails if f"To: {email}" in mail]
        return found[0][0] if found and found[0] else None

    return until(look, 60, f"no mail to {email}")


def give_credit(page: Page, platform: Platform, organization: str) -> None:
    page.goto("/accounts/login/")
    page.get_by_label("Email").fill(platform.account["email"])
    page.get_by_label("Password").fill(platform.account["password"])
    page.get_by_role("button", name="Sign in").click()
    page.goto("/staff/organizations")
    page.get_by_role("link", name=f"Credit of {organization}").click()
    page.get_by_label("Amount in dollars").fill("5")
    page.get_by_label("Reason").fill("Welcome")
    page.get_by_role("button", name="Post, or ask for approval").click()
    expect(page).to_have_url(re.compile("/staff/books$"))


def launch(page: Page) -> None:
    page.goto("/jobs/new")
    proceed = page.locator("#wizard button.btn-primary[type=submit]")
    for title in ("Choose a base model", "Choose a method", "Choose compute", "Review and launch"):
        proceed.click()
        expect(page.locator("h1")).to_have_text(title)
        if title == "Choose compute":
            page.get_by_label("Spend cap").fill("1")  # a slow machine must not reach the suggested one
    page.get_by_role("button", name=re.compile("^Launch, hold")).click()
    expect(page).to_have_url(re.compile(r"/jobs/ftjob-"))
