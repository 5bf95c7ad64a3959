"""The operator's first page, and the pages of one organization and one job."""

import re

import pytest

from apps.billing.books.adjustments import request_adjustment
from apps.billing.books.credit_requests import request_credit
from apps.billing.usage.metering import UsageRecord, record_usage
from apps.contracts import runs as wire
from apps.contracts.failures import FailureCode
from apps.core.database.clock import db_now
from apps.core.templatetags.ui import usd
from apps.finetuning.jobs import control
from apps.finetuning.jobs.progress import get_progress
from apps.finetuning.models import FineTuningJob, Run
from apps.finetuning.usage.quotas import set_quota
from tests.factories.serving import make_version
from tests.factories.usage import make_record
from tests.support.attempts import step
from tests.support.pages import text

USD = 1_000_000_000


@pytest.fixture
def operator_page(olga, client_for):
    client = client_for(olga)
    return lambda url: text(client.get(url))


def refused_requests(floor, count: int) -> UsageRecord:
    refused = {
        "finish": "rate_limit", "request_count": count, "slice_id": "", "input_price_id": None, "output_price_id": None,
    }  # fmt: skip
    return make_record(organization_id=floor.organization.pk, occurred_at=db_now(), **refused)


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
    record_usage(records=[refused_requests(floor, 5)])

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
    assert "/staff/jobs/cancel" not in page


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
    client, address = client_for(olga), f"/staff/jobs/cancel?job={job.pk}"
    assert f'href="{address}"' in text(client.get(f"/staff/jobs/{job.pk}"))

    refused = client.post(address, {"job": job.pk, "confirm": "another"})
    job.refresh_from_db()
    assert (refused.status_code, job.status) == (422, "queued")
    done = client.post(address, {"job": job.pk, "confirm": job.pk})
    again = text(client.post(address, {"job": job.pk, "confirm": job.pk}, follow=True))

    job.refresh_from_db()
    assert (job.status, done.headers["Location"]) == ("cancelled", f"/staff/jobs/{job.pk}")
    assert "it has ended as cancelled" in again
    assert "job.cancel_requested" in text(client.get(f"/staff/audit?organization={floor.organization.pk}"))


def test_an_organization_shows_its_money_use_people_and_jobs(floor, bob, operator_page):
    job = floor.job()

    page = operator_page(f"/staff/organizations/{floor.organization.pk}")

    assert bob.email in page and job.pk in page
    assert "Concurrent GPUs" in page
    assert "/staff/organizations/nothing" not in page


def test_an_organization_shows_its_failures_its_traffic_and_its_adapters(floor, claim, operator_page):
    failed, done = floor.job(), floor.job()
    claim().start().finish(wire.Failed(code=FailureCode.OUT_OF_MEMORY, message="CUDA out of memory at step 3."))
    version = make_version(floor.organization, floor.base_model)
    FineTuningJob.objects.filter(pk=done.pk).update(adapter_version=version)
    record_usage(records=[refused_requests(floor, 5)])

    page = operator_page(f"/staff/organizations/{floor.organization.pk}")

    failures, _, rest = page.partition("Newest jobs")
    assert "CUDA out of memory at step 3." in failures and f'href="/staff/jobs/{failed.pk}"' in failures
    assert version.pk in rest and rest.count(f'href="/staff/jobs/{done.pk}"') == 2
    assert "Requests by day, 14 days: 5, 0 answered" in page
    for action in ("dataset.", "key."):
        assert f'href="/staff/audit?organization={floor.organization.pk}&action={action}"' in page


@pytest.mark.slow
def test_a_short_job_is_billed_the_minimum_and_trained_less(floor, claim, operator_page):
    job = floor.job()
    claim().start().finish(wire.Failed(code=FailureCode.OUT_OF_MEMORY, message="out"))
    Run.objects.update(billed_gpu_ms=2_000)
    FineTuningJob.objects.update(billed_gpu_ms=60_000)

    page = operator_page(f"/staff/jobs/{job.pk}")

    assert "<dt>Trained</dt><dd>2s</dd>" in page and "<dt>Billed</dt><dd>1m 00s, minimum charge</dd>" in page


# --- Pages that stay current -----------------------------------------------------------------------------------------


@pytest.fixture
def poll(olga, client_for):
    """Return a function that asks for a page's partial as htmx does, with the version that the page has."""
    client, versions = client_for(olga), {}

    def ask(path: str) -> str:
        response = client.get(path, {"version": versions.get(path, "")}, headers={"HX-Request": "true"})
        assert response.status_code == 200
        part = text(response)
        versions[path] = re.search(r'name="version" value="(\w+)"', part)[1]
        return part

    return ask


def test_home_a_pool_a_worker_and_a_job_stay_current(floor, claim, operator_page, poll):
    job = floor.job()
    then_and_now = {
        "/staff/": (job.pk, "No queued jobs"),
        f"/staff/pools/{floor.pool.pk}": ("waiting", job.pk),
        f"/staff/workers/{floor.worker.pk}": ("Idle", job.pk),
        f"/staff/jobs/{job.pk}": ("none yet", floor.worker.pk),
    }
    for path, (then, _) in then_and_now.items():
        page, first, same = operator_page(path), poll(path), poll(path)

        assert f'hx-get="{path}" hx-trigger="every 10s"' in page and "as of<time" in page
        assert then in first and 'id="now"' in first and "<html" not in first, path
        assert same.startswith("<hx-partial") and "as of<time" in same and 'id="now"' not in same, path

    claim()
    for path, (_, now) in then_and_now.items():
        assert now in poll(path), path


def test_a_poll_takes_no_secret_and_an_ended_job_ends_its_polls(floor, olga, client_for):
    client, path = client_for(olga), f"/staff/pools/{floor.pool.pk}"
    client.post(f"{path}/token", {"kind": "trainer"})
    client.get(path, headers={"HX-Request": "true"})
    assert "--token" in text(client.get(path))

    job = floor.job()
    control.request_cancellation(job=job, by="user_1", now=db_now())
    ended = client.get(f"/staff/jobs/{job.pk}", headers={"HX-Request": "true"})

    assert ended.headers["HX-Refresh"] == "true" and "every 10s" not in text(ended)


def test_a_refund_begins_with_the_job(floor, operator_page):
    page = operator_page(f"/staff/organizations/{floor.organization.pk}/adjust?refund_of=ftjob-1")

    assert 'value="ftjob-1"' in page
