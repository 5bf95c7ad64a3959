"""Estimate against actual: on the job's page, on the public page, and what operators may do about it."""

import pytest

from apps.core.database.clock import db_now
from apps.finetuning.models import FineTuningJob, GpuPool, PoolAccuracy
from apps.finetuning.pools import accuracy, calibrations
from tests.factories.finetuning import give_credit, make_job
from tests.factories.outcomes import leave_queue, teach


@pytest.fixture
def taught(floor, rival) -> FineTuningJob:
    """40 runs of two organizations, fitted and published."""
    job = leave_queue(floor.job(suffix="canary"))
    give_credit(rival)
    teach(job, 30)
    teach(leave_queue(make_job(rival, floor.base_model)), 10)
    calibrations.refit_pools(now=db_now())
    accuracy.refresh_public_reports(now=db_now())
    return job


@pytest.mark.slow
def test_a_finished_job_shows_its_estimate_beside_what_it_took(floor, claim, client_for, alice, charlie, rival):
    job = floor.job()
    claim().start().succeed(floor.base_model, seconds=20.0, tokens=4_000, peak_memory_bytes=3 * 2**30)

    page = client_for(alice).get(f"/jobs/{job.pk}").content.decode()

    table = page[page.index('id="outcome"') :].partition("</table>")[0]
    assert "3 GiB" in table
    assert ">20s<" in table
    assert ">200<" in table
    assert ">$0.02<" in table
    assert client_for(charlie).get(f"/jobs/{job.pk}").status_code == 404


def test_a_job_under_way_shows_no_outcome(floor, client_for, alice):
    job = floor.job()

    assert 'id="outcome"' not in client_for(alice).get(f"/jobs/{job.pk}").content.decode()


@pytest.mark.slow
def test_anybody_sees_the_errors_of_a_pool_and_nothing_of_its_tenants(taught, client_for, organization, rival):
    page = client_for(None).get("/accuracy")

    text = page.content.decode()
    assert page.status_code == 200
    assert "last 40 runs" in text
    assert "23.1%" in text  # 1 - 1 / 1.3
    assert "Running error of local-cpu" in text
    for secret in (organization.name, organization.slug, rival.name, organization.pk, taught.pk, "canary"):
        assert secret not in text


@pytest.mark.slow
def test_a_pool_below_the_floor_is_not_on_the_public_page(floor, client_for):
    teach(leave_queue(floor.job()), 60)
    accuracy.refresh_public_reports(now=db_now())

    text = client_for(None).get("/accuracy").content.decode()

    assert not PoolAccuracy.objects.exists()
    assert floor.pool.name not in text
    assert "Too few runs to show yet" in text


@pytest.mark.slow
def test_an_operator_sees_the_versions_and_goes_back(taught, client_for, olga):
    console = client_for(olga)
    address = f"/staff/pools/{taught.pool_id}/calibrations"

    shown = console.get(address).content.decode()
    none = console.post(f"{address}/use", {"number": ""}, follow=True).content.decode()

    assert "× 1.300" in shown
    assert "23.1% → 0.0%" in shown
    assert "Chosen by hand" in none
    assert GpuPool.objects.get(pk=taught.pool_id).calibration is None
    console.post(f"{address}/use", {"number": "1"})
    assert GpuPool.objects.get(pk=taught.pool_id).calibration.number == 1
    console.post(f"{address}/follow")
    assert GpuPool.objects.get(pk=taught.pool_id).calibration_pinned_at is None


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [("9", 404), ("x", 400), ("9" * 30, 400)])
def test_a_version_that_is_not_there_is_refused(taught, client_for, olga, number, status):
    answer = client_for(olga).post(f"/staff/pools/{taught.pool_id}/calibrations/use", {"number": number})

    assert answer.status_code == status
    assert GpuPool.objects.get(pk=taught.pool_id).calibration.number == 1


@pytest.mark.slow
def test_members_open_no_calibrations(taught, client_for, alice):
    assert client_for(alice).get(f"/staff/pools/{taught.pool_id}/calibrations").status_code == 403
