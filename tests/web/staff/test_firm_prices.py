"""Firm prices on pages: what the customer reads, and what an operator sets, sees and continues."""

import pytest

from apps.finetuning.models import GpuPool
from tests.support.pages import text


def overrun(floor, claim):
    """Return a job that paused at the limit of its firm price."""
    job, attempt = floor.job(), claim().start()
    assert attempt.beat(training_seconds=180.0).is_pause_requested
    attempt.pause(step=5, seconds=180.0)
    return job


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("firm_factor", "0.5", "greater than or equal to 1"),
        ("firm_factor", "11", "less than or equal to 10"),
        ("firm_factor", "NaN", "Enter a number"),
        ("firm_factor", "9" * 400, "less than or equal to 10"),
        ("price_policy", "free", "Select a valid choice"),
    ],
)
def test_a_wrong_policy_is_said_at_its_field(field, value, message, console, floor):
    body = {"region": "local", "memory_gib": "8", "price_policy": "firm", "firm_factor": "2"}

    refused = console.post(f"/staff/pools/{floor.pool.pk}", body | {field: value})

    assert refused.status_code == 422
    assert message in str(refused.context["form"].errors[field])
    assert str(GpuPool.objects.get(pk=floor.pool.pk).firm_factor) == "3.00"


def test_an_operator_chooses_the_policy_of_a_pool(console, floor):
    body = {"region": "local", "memory_gib": "8", "price_policy": "metered", "firm_factor": "2.5"}
    console.post(f"/staff/pools/{floor.pool.pk}", body)

    pool = GpuPool.objects.get(pk=floor.pool.pk)
    assert (pool.price_policy, str(pool.firm_factor)) == ("metered", "2.50")
    assert 'value="metered"' in text(console.get(f"/staff/pools/{pool.pk}"))


@pytest.mark.slow
def test_an_operator_sees_an_overrun_and_its_loss_and_continues_it(console, floor, claim, reload, organization):
    job = overrun(floor, claim)

    home, margin = text(console.get("/staff/")), text(console.get("/staff/margin"))
    page = text(console.get(f"/staff/jobs/{job.pk}"))
    console.post(f"/staff/jobs/{job.pk}/continue")

    assert "1 job paused far above its quote" in home
    assert job.pk in margin and organization.name in margin and margin.count("$0.18") == 2
    assert "Continue at our expense" in page
    assert reload(job).status == "queued"
    assert "Continue at our expense" not in text(console.get(f"/staff/jobs/{job.pk}"))


@pytest.mark.slow
def test_a_customer_reads_what_the_job_costs_at_most(floor, claim, reload, client_for, bob, console):
    job = overrun(floor, claim)
    browser = client_for(bob)

    paused = text(browser.get(f"/jobs/{job.pk}"))
    browser.post(f"/jobs/{job.pk}/resume", {"cap": "5"})
    assert reload(job).status == "paused"
    console.post(f"/staff/jobs/{job.pk}/continue")
    running = text(browser.get(f"/jobs/{job.pk}"))
    claim().start(start_step=5).succeed(floor.base_model, seconds=30.0)
    receipt = text(browser.get(f"/why/{reload(job).hold_id}"))

    assert "We charge nothing for this run" in paused and f"/jobs/{job.pk}/resume" not in paused
    assert "you pay at most $0.06" in running
    assert "The price was firm: $0.06 at most. The $0.15 above the charge are at our expense." in receipt
