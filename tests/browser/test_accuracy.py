"""Estimate against actual in a real browser: the public page, the job's own and the operator's, all accessible."""

from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from apps.accounts.models import Organization, User
from apps.core.database.clock import db_now
from apps.finetuning.pools import accuracy, calibrations
from apps.finetuning.runs import claims
from tests.factories.finetuning import TrainingSetup, give_credit, make_job
from tests.factories.outcomes import leave_queue, teach
from tests.support.attempts import Attempt
from tests.support.browser import check_page

WIDTHS = (1440, 390)


@pytest.fixture
def job_id(transactional_db: None, organization: Organization, rival: Organization) -> str:
    """A job that ran, on a pool that 50 runs of two organizations have taught, the later ones well estimated."""
    floor = TrainingSetup(organization)
    job = floor.job(suffix="triage")
    attempt = Attempt(claims.claim(worker=floor.worker, base_models=None))
    attempt.start()
    attempt.succeed(floor.base_model, seconds=1.9, tokens=6_000, peak_memory_bytes=2**30)
    give_credit(rival)
    teach(leave_queue(make_job(rival, floor.base_model)), 25)
    calibrations.refit_pools(now=db_now())
    teach(leave_queue(floor.job()), 25, time=1.02, time_factor=1.3)
    calibrations.refit_pools(now=db_now())
    accuracy.refresh_public_reports(now=db_now())
    return job.pk


@pytest.mark.slow
def test_the_pages_of_accuracy_are_accessible_and_reflow(
    open_page: Callable[..., Page], job_id: str, alice: User, olga: User
) -> None:
    staff = open_page("/staff/pools", user=olga)
    staff.get_by_role("link", name="local-cpu").click()
    staff.get_by_role("link", name="Calibrations").click()
    expect(staff.locator("tr", has_text="In use")).to_be_visible()
    pages = (open_page("/accuracy"), open_page(f"/jobs/{job_id}", user=alice), staff)

    for page in pages:
        check_page(page, WIDTHS)


@pytest.mark.slow
def test_an_operator_takes_a_calibration_back_and_the_newest_again(
    open_page: Callable[..., Page], job_id: str, olga: User
) -> None:
    page = open_page("/staff/pools", user=olga)
    page.get_by_role("link", name="local-cpu").click()
    page.get_by_role("link", name="Calibrations").click()

    page.get_by_role("button", name="Use 1").click()
    expect(page.get_by_text("Chosen by hand", exact=True)).to_be_visible()
    page.get_by_role("button", name="Use the newest, always").click()

    expect(page.locator("tr", has_text="In use").locator(".name")).to_have_text("2")
    expect(page.get_by_text("Chosen by hand", exact=True)).to_have_count(0)
