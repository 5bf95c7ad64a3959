"""The forms of evals, whose criteria come and go."""

from collections.abc import Callable

import pytest
from playwright.sync_api import Page, Request, Route, expect

from apps.accounts.models import Organization, User
from apps.datasets.models import DatasetVersion
from tests.factories.datasets import jsonl, make_ready_version
from tests.factories.money import give_credit
from tests.factories.serving import BASE_MODEL, make_served_model
from tests.support.browser import wait_on

Open = Callable[..., Page]
OTHER = "other"


@pytest.fixture
def rows(transactional_db: None, organization: Organization) -> DatasetVersion:
    for name in (BASE_MODEL, OTHER):
        make_served_model(name, "unix:///nowhere")
    give_credit(organization)
    return make_ready_version(organization, jsonl(12), dataset_name="held")


@pytest.mark.slow
def test_a_criterion_that_is_added_right_after_a_change_is_there_however_slow_the_answer(
    open_page: Open, rows: DatasetVersion, alice: User
) -> None:
    page = open_page("/evals/new", user=alice, is_fresh=True)
    held, prices = list[Route](), list[Request]()
    page.route(
        "**/evals/new",
        lambda route: held.append(route) if "&add=1" in (route.request.post_data or "") else route.continue_(),
    )
    page.on("request", lambda request: prices.append(request) if request.method == "POST" and held else None)

    page.locator("#id_temperature").fill("0.5")
    page.get_by_role("button", name="Add a criterion").click()
    wait_on(page, lambda: any("&add=1" not in (request.post_data or "") for request in prices))
    held[0].continue_()

    expect(page.locator("#id_criterion-1-kind")).to_be_visible()
    expect(page.locator("#id_temperature")).to_have_value("0.5")
