"""The first page: how to begin, what runs, what needs attention."""

import re
from urllib.parse import quote

import pytest

from apps.billing.models import UsageSeries
from apps.catalog.models import PriceRule
from apps.contracts import runs as wire
from apps.contracts.failures import FailureCode
from apps.core.database.clock import db_now
from apps.finetuning.jobs.control import request_pause
from apps.finetuning.models import FineTuningJob
from tests.factories.accounts import make_key
from tests.factories.datasets import jsonl, make_ready_version
from tests.support.attempts import step
from tests.support.pages import text

RUNNING = {"HX-Request": "true", "HX-Target": "section#running"}
WHOLE = {"HX-Request": "true", "HX-Target": "div#overview"}


def poll_of(page: str) -> str:
    """Return the address from which the page reloads its running jobs."""
    return re.search(r'id="running".*?hx-get="([^"]+)"', page, re.DOTALL)[1]


@pytest.mark.slow
def test_every_member_sees_it_and_others_only_their_own(floor, client_for, alice, bob, vera, charlie, rival):
    floor.job(suffix="canary")

    pages = [client_for(person).get("/") for person in (alice, bob, vera)]

    assert [page.status_code for page in pages] == [200, 200, 200]
    assert all("canary" in text(page) for page in pages)
    assert "canary" not in text(client_for(charlie).get("/"))
    assert client_for(None).get("/").status_code == 302


@pytest.mark.slow
def test_a_new_organization_is_shown_four_steps_with_what_is_done(floor, organization, alice, client_for):
    before = text(client_for(alice).get("/"))
    version = make_ready_version(organization, dataset_name="tickets")
    make_key(organization, alice)
    after = text(client_for(alice).get("/"))

    assert "Train your first model" in before
    assert "-F file=@sample.jsonl" in before
    assert (before.count('class="done"'), after.count('class="done"')) == (1, 2)  # the credit, then the key too
    assert f'"training_file": "{version.pk}"' in after
    assert "Use my own data" in before and "Train on tickets" in after
    assert f"/jobs/new?dataset={version.pk}&model=anneal-demo" in after


@pytest.mark.slow
def test_the_steps_follow_the_first_job_until_its_adapter_has_answered(floor, claim, alice, client_for):
    job = floor.job()
    running = text(client_for(alice).get("/"))
    claim().succeed(floor.base_model)
    job.refresh_from_db()
    trained = text(client_for(alice).get("/"))
    UsageSeries.objects.create(
        organization=floor.organization,
        sku="inference:input:anneal-demo",
        price_rule=PriceRule.objects.all()[0],
        subject=job.adapter_version.model_name,
        adapter_version_id=job.adapter_version_id,
        day=db_now().date(),
        request_count=1,
    )
    asked = text(client_for(alice).get("/"))

    assert f'href="/jobs/{job.pk}"' in running and "Follow it live" in running
    assert "Try it" in trained and quote(job.adapter_version.model_name) in trained
    assert "Train your first model" not in asked


def test_a_running_job_shows_how_far_it_is_and_alone_to_htmx(floor, claim, alice, client_for):
    job = floor.job(suffix="triage")
    claim().start(total_steps=10).report(wire.StepCompleted, **step(4, 1.5))

    page = text(client_for(alice).get("/"))
    part = text(client_for(alice).get(poll_of(page), headers=RUNNING))

    assert f"/jobs/{job.pk}" in page
    assert "<html" not in part and "Balance" not in part
    assert "4 of 10 steps" in part


@pytest.mark.slow
def test_the_whole_overview_follows_when_a_job_begins_or_ends(floor, claim, alice, client_for):
    client = client_for(alice)
    idle = text(client.get("/"))
    job = floor.job(suffix="triage")
    begun = text(client.get("/", headers=WHOLE))
    claim().succeed(floor.base_model)
    ended = client.get(poll_of(begun), headers=RUNNING)
    after = text(client.get("/", headers=WHOLE))

    assert "every 30s" in idle and "every 4s" not in idle
    assert "Your job is running." in begun and f'id="running-{job.pk}"' in begun and "<html" not in begun
    assert (ended.status_code, ended.headers["HX-Trigger"]) == (204, '{"jobs": {}}')
    assert "Your first adapter is trained." in after and "Recent adapters" in after and "every 4s" not in after
    assert "1 finished this month" in after and '<hx-partial hx-target="#sidebar"' in after


@pytest.mark.slow
def test_a_paused_job_needs_attention_and_does_not_run(floor, claim, alice, client_for):
    job = floor.job(suffix="triage")
    attempt = claim().start()
    request_pause(job=FineTuningJob.objects.get(pk=job.pk), by=alice.pk, now=db_now())
    attempt.pause(step=5, seconds=47.0)

    page = text(client_for(alice).get("/"))

    assert "Your job is paused." in page and "paused at" in page
    assert f'id="running-{job.pk}"' not in page and "<span>0</span><small>running" in page


@pytest.mark.slow
def test_a_failed_job_offers_to_try_again_with_its_own_recipe(floor, claim, bob, vera, client_for):
    job = floor.job(suffix="triage", hyperparameters={"epochs": 4})
    claim().start().finish(wire.Failed(code=FailureCode.OUT_OF_MEMORY, message="CUDA out of memory at step 3."))

    page = text(client_for(bob).get("/"))

    assert "CUDA out of memory at step 3." in page
    assert f"/jobs/new?dataset={job.training_file_id}&model=anneal-demo&method=lora&suffix=triage&epochs=4" in page
    assert "/jobs/new?dataset=" not in text(client_for(vera).get("/"))


@pytest.mark.slow
def test_a_failed_job_is_dismissed_from_the_overview(floor, claim, bob, client_for):
    job = floor.job(suffix="triage")
    claim().start().finish(wire.Failed(code=FailureCode.OUT_OF_MEMORY, message="CUDA out of memory at step 3."))
    client = client_for(bob)

    client.post(f"/jobs/{job.pk}/dismiss")

    assert "CUDA out of memory" not in text(client.get("/"))
    assert "CUDA out of memory" in text(client.get(f"/jobs/{job.pk}"))


@pytest.mark.parametrize("name", ["<b>bold</b>"])
def test_a_name_is_text(name, floor, organization, alice, client_for):
    make_ready_version(organization, b'{"messages": []}\n' * 12, dataset_name=name)

    assert name not in client_for(alice).get("/").content.decode()


@pytest.mark.slow
def test_a_file_with_errors_needs_attention_until_a_newer_version_or_its_reader_settles_it(
    organization, alice, vera, client_for
):
    bad = jsonl() + b'{"messages": []}\n'
    replaced = make_ready_version(organization, bad, dataset_name="replaced")
    make_ready_version(organization, dataset_name="replaced")
    seen = make_ready_version(organization, bad, dataset_name="dismissed")
    make_ready_version(organization, b"%PDF-1.7", dataset_name="document", filename="a.pdf")
    client = client_for(alice)

    before = text(client.get("/"))
    client.post(f"/datasets/{seen.pk}/dismiss")
    after = text(client.get("/"))

    assert f"/datasets/{replaced.pk}" not in before and f"/datasets/{seen.pk}" in before
    assert "1 problem in its rows" in before and "The file is a PDF document, not training data." in before
    assert "lines cannot be read" not in before
    assert f"/datasets/{seen.pk}" not in after and "document" in after
    assert "Dismiss" in before and "Dismiss" not in text(client_for(vera).get("/"))
