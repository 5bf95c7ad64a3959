"""The dataset pages with script: upload with progress, checks that arrive by themselves, moving through rows."""

from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from apps.accounts.models import User
from apps.datasets.models import DatasetVersion
from apps.datasets.tasks import validate
from tests.browser.conftest import overflow
from tests.factories.accounts import make_organization, make_user
from tests.factories.catalog import make_base_model
from tests.factories.datasets import jsonl, make_ready_version

Open = Callable[..., Page]
BAD_LINE = b'{"messages": [{"role": "robot", "content": "x"}]}\n'


@pytest.fixture
def alice(transactional_db: None) -> User:
    alice = make_user("alice")
    make_organization("Acme", owner=alice)
    make_base_model()
    return alice


def test_an_uploaded_file_appears_checked_and_its_rows_can_be_walked(
    open_page: Open, alice: User, tmp_path: Path
) -> None:
    file = tmp_path / "cards.jsonl"
    file.write_bytes(jsonl(40))
    page = open_page("/datasets", user=alice)

    page.set_input_files("input[type=file]", file)
    page.get_by_role("button", name="Upload").click()
    expect(page.get_by_text("being checked line by line")).to_be_visible()
    validate(DatasetVersion.objects.get().pk)

    expect(page.get_by_text("Every row fits the model")).to_be_visible()
    page.locator("nav.rows a", has_text="Where is card 6?").click()
    expect(page.locator("nav.rows a[aria-current]")).to_contain_text("Where is card 6?")
    page.keyboard.press("j")
    expect(page.locator(".chat")).to_contain_text("Where is card 7?")
    page.get_by_role("link", name="JSON", exact=True).click()
    expect(page.locator("pre.out")).to_contain_text('"content": "Where is card 7?"')
    page.go_back()
    expect(page.locator(".chat mark")).to_contain_text("card_arrival")


def test_deleting_takes_the_whole_name(open_page: Open, alice: User) -> None:
    version = make_ready_version(alice.memberships.get().organization, filename="cards.jsonl")
    page = open_page(f"/datasets/{version.pk}", user=alice)

    page.get_by_role("button", name="Delete").first.click()
    confirm = page.locator("#delete-file").get_by_role("button", name="Delete", exact=True)
    page.get_by_label("Type cards.jsonl to confirm").fill("cards")
    expect(confirm).to_be_disabled()
    page.get_by_label("Type cards.jsonl to confirm").fill("cards.jsonl")
    confirm.click()

    expect(page.get_by_text("No datasets yet")).to_be_visible()


@pytest.mark.parametrize(("width", "theme"), [(1440, "light"), (390, "dark"), (320, "light")])
def test_every_page_is_accessible_and_fits(
    open_page: Open, violations: Callable[[Page], list[str]], alice: User, width: int, theme: str
) -> None:
    organization = alice.memberships.get().organization
    good = make_ready_version(organization)
    bad = make_ready_version(organization, jsonl() + BAD_LINE, filename=f"{'long-' * 20}.jsonl")
    paths = ["", "/upload", f"/{good.pk}", f"/{good.pk}?view=tokens", f"/{bad.pk}?line=13", f"/{good.pk}/delete"]

    for path in paths:
        page = open_page(f"/datasets{path}", user=alice, width=width, theme=theme)
        assert (path, overflow(page), violations(page)) == (path, 0, [])
