"""The operator's first page, and the pages of one organization and one job."""

import pytest

from apps.billing.books.adjustments import request_adjustment
from apps.billing.books.credit_requests import request_credit
from apps.billing.usage.metering import record_usage
from apps.contracts import runs as wire
from apps.contracts.failures import FailureCode
from apps.core.database.clock import db_now
from apps.core.templatetags.ui import usd
from apps.finetuning.jobs.progress import get_progress
from apps.finetuning.usage.quotas import set_quota
from tests.factories.usage import make_record
from tests.support.attempts import step
from tests.support.pages import text

USD = 1_000_000_000


@pytest.fixture
def operator_page(olga, client_for):
    client = client_for(olga)
    return lambda url: text(client.get(url))


def test_a_quiet_installation_shows_its_pools_and_no_alert(floor, operator_page):
    page = operator_page("/staff/")

    assert "Needs your attention" not in page
    assert floor.pool.name in page and "1 of 1" in page
    assert "No queued jobs" in page and "No failures" in page


def test_decisions_that_wait_are_counted_and_lead_to_their_page(floor, organization, alice, operator_page):
    request_credit(organization=organization, amount_nano=USD, note="", by=alice)
    for number in range(2):
        request_adjustment(
            organization=organization, amount_nano=500 * USD, reason=str(number), by="user_otto", now=db_now()
        )

    page = operator_page("/staff/")

    assert "1 request for credit" in page and "2 adjustments to approve" in page
    assert page.count('href="/staff/books"') >= 2


@pytest.mark.slow
def test_what_waits_and_what_failed_is_shown_with_its_reason_and_links(floor, claim, operator_page):
    failed = floor.job(suffix="failed")
    claim().start().finish(wire.Failed(code=FailureCode.OUT_OF_MEMORY, message="CUDA out of memory at step 3."))
    waiting = floor.job(suffix="waiting")
    set_quota(organization=floor.organization, by="system", now=db_now(), concurrent_gpus=0)

    page = operator_page("/staff/")

    assert "one of your 0 concurrent GPUs" in page and f"/staff/jobs/{waiting.pk}" in page
    assert "CUDA out of memory at step 3." in page and f"/staff/jobs/{failed.pk}" in page


@pytest.mark.slow
def test_charts_show_the_requests_of_each_hour_the_time_of_each_pool_and_what_an_organization_spent(
    floor, claim, operator_page
):
    quiet = operator_page("/staff/")
    floor.job()
    claim().start().finish(wire.Failed(code=FailureCode.OUT_OF_MEMORY, message="out"))
    refused = {
        "finish": "rate_limit", "request_count": 5, "slice_id": "", "input_price_id": None, "output_price_id": None,
    }  # fmt: skip
    record_usage(records=[make_record(organization_id=floor.organization.pk, occurred_at=db_now(), **refused)])

    page = operator_page("/staff/")

    assert "Requests by hour" not in quiet and "GPU-hours of" not in quiet
    assert "Refused: 5" in page
    assert f"GPU-hours of {floor.pool.name} on each of 14 days" in page
    spent = operator_page(f"/staff/organizations/{floor.organization.pk}")
    assert f"What {floor.organization.name} spent on each of the last 30 days" in spent


def test_a_job_shows_its_attempts_with_the_end_of_their_logs(floor, claim, operator_page):
    job = floor.job()
    claim().start().finish(wire.Failed(code=FailureCode.OUT_OF_MEMORY, message="out", log_tail="the last line"))

    page = operator_page(f"/staff/jobs/{job.pk}")

    assert "Attempt 1" in page and "the last line" in page
    assert f"/staff/organizations/{floor.organization.pk}" in page
    assert "Cancel this job" not in page


@pytest.mark.slow
def test_a_running_job_costs_the_same_for_its_customer_and_for_operators(floor, claim, bob, client_for, operator_page):
    job = floor.job()
    attempt = claim().start(total_steps=10)
    attempt.report(wire.StepCompleted, **step(3, 1.5))
    attempt.checkpoint(step=3, seconds=400.0)  # far above the minimum charge, which grows with the clock
    job.refresh_from_db()
    cost = usd(get_progress(job=job, now=db_now()).spent_nano)

    assert job.cost_nano == 0 and cost != usd(0)
    assert cost in text(client_for(bob).get("/jobs"))
    for page in ("jobs", f"jobs/{job.pk}", f"organizations/{floor.organization.pk}"):
        assert cost in operator_page(f"/staff/{page}"), page


def test_an_operator_cancels_a_job_and_it_is_audited(floor, olga, client_for):
    job = floor.job()
    client = client_for(olga)
    assert "Cancel this job" in text(client.get(f"/staff/jobs/{job.pk}"))

    client.post(f"/staff/jobs/{job.pk}/cancel")
    again = text(client.post(f"/staff/jobs/{job.pk}/cancel", follow=True))

    job.refresh_from_db()
    assert job.status == "cancelled"
    assert "it has ended as cancelled" in again
    assert "job.cancel_requested" in text(client.get(f"/staff/audit?organization={floor.organization.pk}"))


def test_an_organization_shows_its_money_use_people_and_jobs(floor, bob, operator_page):
    job = floor.job()

    page = operator_page(f"/staff/organizations/{floor.organization.pk}")

    assert bob.email in page and job.pk in page
    assert "Concurrent GPUs" in page
    assert "/staff/organizations/nothing" not in page


def test_a_refund_begins_with_the_job(floor, operator_page):
    page = operator_page(f"/staff/organizations/{floor.organization.pk}/adjust?refund_of=ftjob-1")

    assert 'value="ftjob-1"' in page
