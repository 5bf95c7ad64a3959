"""The dataset pages with script: upload with progress, checks that arrive by themselves, moving through rows."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from apps.accounts.models import User
from apps.datasets.models import DatasetVersion
from apps.datasets.tasks import inspect, validate
from tests.factories.accounts import make_organization, make_user
from tests.factories.catalog import make_base_model
from tests.factories.datasets import chat_row, jsonl, make_ready_version
from tests.support.browser import WIDTHS, check_page, hold_first, wait_on

Open = Callable[..., Page]
BAD_LINE = b'{"messages": [{"role": "robot", "content": "x"}]}\n'


@pytest.fixture
def alice(transactional_db: None) -> User:
    alice = make_user("alice")
    make_organization("Acme", owner=alice)
    make_base_model()
    return alice


@pytest.mark.slow
def test_an_uploaded_file_appears_checked_and_its_rows_can_be_walked(
    open_page: Open, alice: User, tmp_path: Path
) -> None:
    file = tmp_path / "cards.jsonl"
    file.write_bytes(jsonl(40))
    page = open_page("/datasets", user=alice)

    page.set_input_files("input[type=file]", file)
    page.get_by_role("button", name="Upload").click()
    expect(page.get_by_text("checking the file line by line")).to_be_visible()
    validate(DatasetVersion.objects.get().pk)

    page.locator("nav.rows a", has_text="Where is card 6?").click()
    expect(page.locator("nav.rows a[aria-current]")).to_contain_text("Where is card 6?")
    page.keyboard.press("j")
    expect(page.locator(".chat")).to_contain_text("Where is card 7?")
    page.get_by_role("link", name="JSON", exact=True).click()
    expect(page.locator("pre.out")).to_contain_text('"content": "Where is card 7?"')
    page.evaluate("() => { window.first = htmx; }")
    page.go_back()
    expect(page.locator(".chat mark")).to_contain_text("card_arrival")
    assert page.evaluate("() => !window.first || window.first === htmx"), "the library runs once"


@pytest.mark.slow
def test_what_is_shown_stays_while_the_page_follows_a_task(open_page: Open, alice: User) -> None:
    version = make_ready_version(alice.memberships.get().organization)  # not looked through
    page = open_page(f"/datasets/{version.pk}", user=alice)
    held = hold_first(page, "**/datasets/*", target="div#dataset")
    wait_on(page, lambda: bool(held))
    page.locator("nav.rows a", has_text="Where is card 6?").click()
    expect(page.locator("nav.rows a[aria-current]")).to_contain_text("Where is card 6?")
    held[0].continue_()

    for _ in range(2):
        _wait_for_poll(page)
        assert "Where is card 6?" in page.locator("nav.rows a[aria-current]").inner_text()
    expect(page).to_have_url(re.compile(r"line=7\b"))


def _wait_for_poll(page: Page) -> None:
    """Wait until the page is replaced by what it has asked for."""
    page.evaluate("() => { document.querySelector('#dataset').dataset.old = '1'; }")
    expect(page.locator("#dataset[data-old]")).to_have_count(0)


def test_deleting_takes_the_whole_name(open_page: Open, alice: User) -> None:
    version = make_ready_version(alice.memberships.get().organization, filename="cards.jsonl")
    page = open_page(f"/datasets/{version.pk}", user=alice)

    page.get_by_role("button", name="Delete").first.hover()
    page.mouse.down()
    for _ in range(2):  # a poll would replace the button, and a replaced button gets no click
        with page.expect_response(f"**/datasets/{version.pk}"):
            pass
    page.mouse.up()
    confirm = page.locator("#delete-file").get_by_role("button", name="Delete", exact=True)
    page.get_by_label("Type cards.jsonl to confirm").fill("cards")
    expect(confirm).to_be_disabled()
    page.keyboard.press("Control+Enter")
    with page.expect_response(f"**/datasets/{version.pk}"):
        pass
    expect(page.get_by_label("Type cards.jsonl to confirm")).to_have_value("cards")
    page.get_by_label("Type cards.jsonl to confirm").fill("cards.jsonl")
    confirm.click()

    expect(page.get_by_text("No datasets yet")).to_be_visible()


@pytest.mark.slow
def test_every_page_is_accessible_and_fits(open_page: Open, alice: User) -> None:
    organization = alice.memberships.get().organization
    good = make_ready_version(organization)
    bad = make_ready_version(organization, jsonl() + BAD_LINE, filename=f"{'long-' * 20}.jsonl")
    longer = make_ready_version(organization, jsonl(14))
    paths = [
        "", "/upload", f"/{good.pk}", f"/{good.pk}?view=tokens", f"/{bad.pk}?line=13", f"/{good.pk}/delete",
        f"/{good.pk}?q=card", f"/{good.pk}/row?line=1", f"/{longer.pk}/changes", f"/{bad.pk}/repair",
    ]  # fmt: skip

    page = open_page("/datasets", user=alice)
    for path in paths:
        page.goto(f"/datasets{path}")
        check_page(page, WIDTHS)


@pytest.fixture
def looked_at(alice: User) -> DatasetVersion:
    """A file with something of each finding, looked through."""
    long = "My card has not arrived although you said last week that it would be here by monday morning"
    rows = [chat_row(f"Where is card {n}?") for n in range(20)]
    rows += [chat_row(long), chat_row(long.upper()), chat_row(long + " at nine"), chat_row("Where? " * 300)]
    rows[3] = chat_row("Write to mira@example.com about it, please.")
    content = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    version = make_ready_version(alice.memberships.get().organization, content, filename="cards.jsonl")
    inspect(version.pk)
    return version


@pytest.mark.slow
def test_limit_and_split_are_chosen_in_place_and_findings_lead_to_rows(
    open_page: Open, alice: User, looked_at: DatasetVersion
) -> None:
    page = open_page(f"/datasets/{looked_at.pk}", user=alice)

    with page.expect_navigation():
        page.get_by_label("Longest row").select_option("256")
    expect(page.get_by_text("1 row over 256 tokens will be cut").first).to_be_visible()
    with page.expect_navigation():
        page.get_by_label("Held out for validation").select_option("20")
    expect(page.get_by_text(re.compile(r"\d+ train, \d+ held out"))).to_be_visible()
    page.get_by_role("link", name="Show 1 row over 256 tokens will be cut").click()
    expect(page.locator("nav.rows a")).to_have_count(1)
    expect(page.locator(".chat .cut-here")).to_be_visible()
    page.get_by_role("link", name="All rows").click()
    expect(page.locator("nav.rows a")).to_have_count(20)


@pytest.mark.slow
def test_the_viewer_is_accessible_and_fits(open_page: Open, alice: User, looked_at: DatasetVersion) -> None:
    page = open_page(f"/datasets/{looked_at.pk}", user=alice)
    for query in ("?limit=256&share=20&line=21&first=19", "?limit=256&find=over", "?limit=256&find=over&view=tokens"):
        page.goto(f"/datasets/{looked_at.pk}{query}")
        check_page(page, WIDTHS)
