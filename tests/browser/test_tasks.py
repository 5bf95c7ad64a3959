"""Ordinary tasks of customers and operators, each within its number of clicks.

A click is a press of the mouse or a choice in a list; typing and pressing Enter are free. The journey from sign-up to
an answer is in tests/e2e.
"""

import re
from collections.abc import Callable

from playwright.sync_api import Locator, Page, expect

from apps.accounts.members.invitations import invitation_token
from apps.accounts.models import Invitation, Membership, Organization, User
from apps.catalog.queries import active_price
from apps.datasets.models import DatasetVersion
from apps.finetuning.models import GpuPool
from apps.finetuning.quotes.pool_facts import training_sku
from apps.finetuning.runs import claims
from apps.finetuning.usage.quotas import get_quota
from tests.factories.datasets import jsonl, make_ready_version
from tests.factories.finetuning import TrainingSetup
from tests.factories.market import Market
from tests.support.attempts import Attempt

Open = Callable[..., Page]
BAD_LINE = b'{"messages": [{"role": "robot", "content": "x"}]}\n'


class Clicks:
    """The clicks of one task."""

    def __init__(self) -> None:
        self.count = 0

    def click(self, locator: Locator) -> None:
        self.count += 1
        locator.click()

    def choose(self, locator: Locator, label: str) -> None:
        self.count += 1
        locator.select_option(label=label)


def test_the_cheapest_gpu_for_a_deadline_takes_three_clicks(open_page: Open, market: Market, alice: User) -> None:
    page, clicks = open_page(f"{market.wizard}&step=compute", user=alice), Clicks()
    rows = page.locator("#compute-live tbody tr[data-pick]")

    clicks.choose(page.get_by_label("Needed within"), "Within 8 hours")
    clicks.click(page.locator("fieldset").get_by_text("Cost", exact=True))
    recommended = rows.filter(has_text="Recommended")
    expect(recommended).to_have_count(1)
    in_time = [row for row in rows.all_inner_texts() if "Late" not in row and "Needs" not in row]
    assert "Recommended" in in_time[0]
    pool = re.search(r"\S+", recommended.inner_text())
    with page.expect_navigation():
        clicks.click(page.get_by_role("button", name="Review run").first)

    expect(page.locator("h1")).to_have_text("Review and launch")
    assert pool and clicks.count <= 3


def test_a_line_of_the_ledger_is_explained_in_one_click(open_page: Open, floor: TrainingSetup, alice: User) -> None:
    job = floor.job(suffix="triage")
    Attempt(claims.claim(worker=floor.worker, base_models=None)).start().succeed(floor.base_model)
    page, clicks = open_page("/usage", user=alice), Clicks()

    clicks.click(page.locator("#ledger tr", has_text="Charge settled").get_by_role("link"))

    expect(page.locator("h1")).to_have_text("Why this charge")
    expect(page.locator("main")).to_contain_text(job.pk)
    assert clicks.count <= 2


def test_a_viewer_is_invited_and_joins_in_four_clicks(
    open_page: Open, floor: TrainingSetup, organization: Organization, alice: User
) -> None:
    page, clicks = open_page("/members", user=alice), Clicks()
    page.get_by_label("Email").fill("vera@example.com")
    page.get_by_role("region", name="Invite").get_by_label("Role").press("v")
    with page.expect_navigation():
        clicks.click(page.get_by_role("button", name="Send invitation"))

    guest = open_page(f"/invitations/accept/{invitation_token(Invitation.objects.get().pk)}")
    clicks.click(guest.get_by_role("link", name="Create an account"))
    guest.get_by_label(re.compile("^Your name")).fill("Vera")
    guest.get_by_label("Email").fill("vera@example.com")
    guest.get_by_label("Password").fill("correct-horse-battery")
    clicks.click(guest.get_by_role("button", name="Create account"))
    clicks.click(guest.get_by_role("button", name=re.compile("^Join")))

    expect(guest.locator("h1")).to_have_text("Overview")
    assert Membership.objects.get(user__email="vera@example.com").role == "viewer"
    assert clicks.count <= 4


def test_a_bad_row_is_found_and_fixed_in_three_clicks(
    open_page: Open, floor: TrainingSetup, organization: Organization, alice: User
) -> None:
    version = make_ready_version(organization, jsonl() + BAD_LINE)
    page, clicks = open_page("/datasets", user=alice), Clicks()

    clicks.click(page.locator("a.name").first)
    expect(page.locator("main")).to_contain_text("Line 13")
    clicks.click(page.get_by_role("link", name="Fix or remove 1 row", exact=True))
    expect(page.locator("main")).to_contain_text("Left out")
    with page.expect_navigation():
        clicks.click(page.get_by_role("button", name="Save as new version"))

    assert DatasetVersion.objects.filter(derived_from=version).exists()
    assert clicks.count <= 3


def test_a_pool_gets_its_price_and_a_customer_a_limit_in_six_clicks(
    open_page: Open, floor: TrainingSetup, organization: Organization, olga: User
) -> None:
    page, clicks = open_page("/staff/pools", user=olga), Clicks()
    page.get_by_label("Name", exact=True).fill("new-cards")
    clicks.choose(page.get_by_label("GPU type"), floor.pool.gpu_type.name)
    page.get_by_label("Price of a GPU-hour in dollars").fill("2.50")
    with page.expect_navigation():
        clicks.click(page.get_by_role("button", name="Create pool"))

    clicks.click(page.locator("a[href='/staff/quotas']"))
    clicks.click(page.get_by_role("link", name=f"Edit limits of {organization.name}"))
    page.get_by_label("Storage").fill("20 GB")
    with page.expect_navigation():
        clicks.click(page.get_by_role("button", name="Save"))

    pool = GpuPool.objects.get(name="new-cards")
    assert pool.memory_bytes == floor.pool.gpu_type.memory_bytes
    assert active_price(sku=training_sku(pool)).price_nano == 2_500_000_000
    assert get_quota(organization=organization).storage_bytes == 20 * 10**9
    assert clicks.count <= 6
