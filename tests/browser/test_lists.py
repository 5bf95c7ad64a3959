"""Lists in a real browser: keys move between rows, and picked rows lead to one page that asks for their name."""

import datetime
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from apps.accounts.models import ApiKey, Membership, Organization, User
from apps.accounts.operations import save_view
from tests.factories.accounts import make_key
from tests.factories.datasets import make_ready_version, make_version
from tests.support.browser import DRAWN, WIDTHS, check_page

Open = Callable[..., Page]


@pytest.fixture
def lists(transactional_db: None, organization: Organization, alice: User) -> Organization:
    """Two keys, a dataset with two versions, and a saved view of it."""
    for _ in range(2):
        make_key(organization, alice)
        make_ready_version(organization, dataset_name="cards")
    membership = Membership.objects.get(user=alice)
    save_view(membership=membership, listing="web:dataset_list", name="Cards", query="q=cards")
    return organization


def test_keys_move_between_rows_and_picked_rows_are_revoked_after_the_number(
    open_page: Open, lists: Organization, alice: User
) -> None:
    page = open_page("/keys", user=alice)
    picks = page.locator("tbody .pick")

    page.keyboard.press("j")
    expect(picks.first).to_be_focused()
    page.keyboard.press("j")
    expect(picks.nth(1)).to_be_focused()
    page.keyboard.press("/")
    expect(page.get_by_label("Search API keys")).to_be_focused()
    page.get_by_label("Choose all on this page").check()
    page.get_by_role("button", name="Revoke", exact=True).click()

    expect(page.locator("h1")).to_have_text("Revoke 2 API keys?")
    check_page(page, WIDTHS)
    page.get_by_label("Type 2 API keys to confirm").fill("2 API keys")
    page.get_by_role("button", name="Revoke 2 API keys").click()
    expect(page.get_by_text("Revoked 2 API keys.")).to_be_visible()
    assert not ApiKey.objects.filter(revoked_at=None, kind="secret").exists()


def test_a_list_with_filters_views_and_older_versions_is_accessible_and_fits(
    open_page: Open, lists: Organization, alice: User
) -> None:
    page = open_page("/datasets", user=alice)
    page.get_by_role("link", name="Cards", exact=True).click()
    page.get_by_text("Older versions").click()
    page.get_by_text("Save this view").click()

    expect(page.get_by_role("link", name="Version 1")).to_be_visible()
    check_page(page, WIDTHS)


@pytest.mark.slow
def test_older_versions_stay_open_while_the_list_follows_a_check(
    open_page: Open, lists: Organization, alice: User
) -> None:
    make_version(lists, dataset_name="unchecked")
    page = open_page("/datasets", user=alice)
    page.get_by_text("Older versions").click()

    for _ in range(2):
        with page.expect_response(lambda response: "hx-request" in response.request.headers):
            pass

    page.evaluate(DRAWN)
    expect(page.get_by_role("link", name="Version 1")).to_be_visible()


@pytest.mark.parametrize(("language", "day"), [("en", "4 Oct 2030"), ("de", "04.10.2030")])
def test_a_day_is_written_as_the_language_of_the_page_writes_it(
    open_page: Open, organization: Organization, alice: User, language: str, day: str
) -> None:
    make_key(organization, alice, expires_at=datetime.datetime(2030, 10, 4, 12, tzinfo=datetime.UTC))
    User.objects.filter(pk=alice.pk).update(language=language)

    shown = open_page("/keys", user=alice).locator("time[data-time=date]")

    expect(shown).to_have_text([day])
    expect(shown).to_have_attribute("data-local", "1")


def test_a_form_typed_before_a_new_sign_in_is_sent_after_it(open_page: Open, lists: Organization, alice: User) -> None:
    page = open_page("/datasets?q=ca", user=alice)
    page.get_by_text("Save this view").click()
    page.locator("form [name=name]").fill("Of support")
    criteria = page.context.new_page()
    criteria.goto("/evals/new")

    page.context.clear_cookies(name="csrftoken")
    page.context.add_cookies([{"name": "their_csrf", "value": "x" * 32, "url": page.url}])  # of another program
    page.context.add_cookies([{"name": "csrftoken", "value": "n" * 32, "url": page.url}])  # as a sign-in renews it
    criteria.get_by_role("button", name="Add a criterion").click()
    page.get_by_role("button", name="Save", exact=True).click()

    expect(criteria.locator('[name$="-kind"]')).to_have_count(2)
    expect(page.get_by_role("link", name="Of support", exact=True)).to_be_visible()
