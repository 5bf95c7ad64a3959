"""The job pages: who sees them, and what they show."""

import json
import re
from decimal import Decimal

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from apps.contracts import runs as wire
from apps.contracts.failures import FailureCode
from apps.contracts.hyperparameters import Method
from apps.core.money import nano_to_usd
from apps.core.templatetags.ui import usd
from apps.finetuning.models import FineTuningJob, JobEvent
from apps.interfaces.web.jobs.curves import thinned
from tests.factories.accounts import make_key
from tests.support.attempts import step
from tests.support.pages import text


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/jobs", "/jobs/{id}", "/jobs/{id}/chart"])
def test_pages_are_seen_by_every_member_and_nobody_else(path, floor, client_for, alice, bob, vera, charlie, rival):
    url = path.format(id=floor.job().pk)

    assert [client_for(person).get(url).status_code for person in (alice, bob, vera)] == [200, 200, 200]
    assert client_for(charlie).get(url).status_code == (200 if path == "/jobs" else 404)
    assert client_for(None).get(url).status_code == 302


def test_another_tenants_jobs_are_not_in_the_list(floor, client_for, charlie, rival):
    job = floor.job(suffix="canary")

    page = client_for(charlie).get("/jobs").content.decode()

    assert "canary" not in page
    assert job.pk not in page


def test_a_viewer_cannot_cancel_and_a_member_can(floor, client_for, bob, vera, reload):
    job = floor.job()

    assert client_for(vera).post(f"/jobs/{job.pk}/cancel").status_code == 403
    assert reload(job).status == "queued"
    assert client_for(bob).post(f"/jobs/{job.pk}/cancel").status_code == 302
    assert reload(job).status == "cancelled"


@pytest.mark.slow
def test_a_job_that_started_is_cancelled_by_its_name_after_its_loss_is_shown(floor, claim, client_for, bob, reload):
    job = floor.job(suffix="triage")
    browser, by_name = client_for(bob), f"/jobs/cancel?job={job.pk}"
    assert by_name not in browser.get(f"/jobs/{job.pk}").content.decode()
    run = claim()
    assert by_name in browser.get(f"/jobs/{job.pk}").content.decode()

    answer = browser.post(f"/jobs/{job.pk}/cancel")
    early = browser.get(by_name).content.decode()
    FineTuningJob.objects.filter(pk=job.pk).update(step=120, total_steps=500, status="running")
    later = browser.get(by_name).content.decode()

    assert (answer.headers["Location"], reload(job).cancel_requested_at) == (by_name, None)
    assert "It has not finished a step, so no checkpoint is kept. You pay about" in early
    assert "It saves a checkpoint at its current step, 120 of 500, and stops. You pay about" in later
    answer = browser.post("/jobs/cancel", {"job": job.pk, "confirm": "triage"})
    assert answer.headers["Location"] == f"/jobs/{job.pk}"
    assert run and reload(job).cancel_requested_at is not None


@pytest.mark.slow
def test_cancelling_several_locks_all_of_them_before_the_first_change(floor, client_for, bob, reload):
    """A claim locks a job, and then the share that the end of another one has locked."""
    jobs = [floor.job(), floor.job()]
    browser = client_for(bob)

    with CaptureQueriesContext(connection) as captured:
        browser.post("/jobs/cancel", {"job": [job.pk for job in jobs], "confirm": "2 fine-tunes"})

    of_runs = [query["sql"] for query in captured if "finetuning_" in query["sql"]]
    changed = next(place for place, sql in enumerate(of_runs) if sql.startswith("UPDATE"))
    locked = [sql for sql in of_runs[:changed] if "FOR UPDATE" in sql]
    assert [reload(job).status for job in jobs] == ["cancelled", "cancelled"]
    assert all(job.pk in locked[0] for job in jobs)
    assert 'FROM "finetuning_queueshare"' in locked[1]


@pytest.mark.slow
def test_the_page_shows_what_a_running_job_has_done(floor, client_for, alice, claim):
    job = floor.job(suffix="triage")
    attempt = claim().start()
    attempt.report(wire.StepCompleted, **step(1, 3.5))
    attempt.report(
        wire.StepCompleted,
        **step(2, 2.25),
        memory_bytes=3 * 2**29,
        gpu_utilization=0.5,
        gpu_celsius=61.0,
        gpu_watts=642.4,
        eta_seconds=90.9,
    )
    attempt.checkpoint(step=2, seconds=4.0)

    page = client_for(alice).get(f"/jobs/{job.pk}").content.decode()
    curves = client_for(alice).get(f"/jobs/{job.pk}/chart").json()

    assert "2.250" in page
    assert (curves["x"], curves["series"]["train_loss"], curves["checkpoints"]) == ([1, 2], [3.5, 2.25], [2])
    assert (curves["series"]["memory_gib"], curves["series"]["gpu_percent"]) == ([None, 1.5], [None, 50.0])
    assert (curves["series"]["gpu_celsius"][1], curves["series"]["gpu_watts"][1]) == (61.0, 642.4)
    assert "GPU load" in page and ">61</span>°C" in page and ">642</span>W" in page
    assert re.search(r'<span data-live="time_left">\d+h \d\dm</span>', page)  # its two steps took half an hour
    assert '<span data-live="percent">20</span>%' in page and "<title>20% " in page
    assert '<span data-live="throughput" data-format="int">900</span>' in page


def test_every_value_of_the_recipe_stands_on_the_page_with_its_reason(floor, client_for, alice):
    own = {"early_stopping_patience": 3, "validation_share": 0.2}
    job = floor.job(hyperparameters=own)

    page = text(client_for(alice).get(f"/jobs/{job.pk}"))

    reasons = page.partition("All values and reasons")[2].partition("</dl>")[0]
    assert 'after 3 evaluations without a lower loss<span class="faint">You set it.' in reasons
    assert "<dt>Schedule</dt><dd>Cosine: falls smoothly to zero.</dd>" in reasons
    assert "Beta" not in reasons


@pytest.mark.parametrize(
    ("asked", "named", "has_rank"),
    [
        ({"method": Method.FULL}, "Full fine-tuning", False),
        ({"method": Method.LORA, "hyperparameters": {"use_dora": True, "epochs": 2}}, "DoRA, rank 16", True),
    ],
)
def test_a_job_is_named_by_its_method_and_its_call_would_create_the_same(
    asked, named, has_rank, floor, client_for, alice
):
    job = floor.job(**asked)

    page = text(client_for(alice).get(f"/jobs/{job.pk}"))
    body = json.loads(re.search(r"-d '(\{.*?\n\})'", page, re.DOTALL)[1])

    assert f"<span>{named}</span>" in page
    assert ("Rank, alpha" in page) is has_rank
    assert body["recipe"]["epochs"] == job.hyperparameters["epochs"]
    assert body["recipe"].get("method") == (None if has_rank else "full")
    assert body.get("lora", {}).get("use_dora", False) is has_rank


@pytest.mark.slow
def test_a_long_job_is_thinned_where_it_is_stored(floor, organization, client_for, alice, claim):
    job = floor.job()
    claim().start()
    JobEvent.objects.bulk_create(
        JobEvent(
            id=f"ftevent-long-{step}", organization=organization, job=job, sequence=1_000 + step, type="metrics",
            message=f"Step {step}", data={"step": step, "train_loss": 9 - step / 2_000} | (
                {"train_loss": None, "valid_loss": abs(step - 9_000) / 1_000 + 0.125} if step % 10 == 0 else {}
            ),
        )
        for step in range(5, 12_001, 5)
    )  # fmt: skip

    assert 400 < len(thinned(job)) <= 1_002
    curves = client_for(alice).get(f"/jobs/{job.pk}/chart").json()
    context = client_for(alice).get(f"/jobs/{job.pk}").context

    assert (curves["x"][0], curves["x"][-1]) == (5, 12_000)
    assert len([loss for loss in curves["series"]["valid_loss"] if loss is not None]) >= 300
    assert (context["first_loss"], context["loss"]) == (9 - 5 / 2_000, 9 - 11_995 / 2_000)
    assert (context["best"]["step"], context["best"]["valid_loss"]) == (9_000, 0.125)
    assert [data["step"] for data in context["evaluations"]] == list(range(11_010, 12_001, 10))


def test_htmx_gets_only_the_part_that_changes(floor, client_for, alice):
    job = floor.job()

    part = client_for(alice).get(f"/jobs/{job.pk}", headers={"HX-Request": "true"}).content.decode()

    assert "<html" not in part
    assert 'id="job-state"' in part


@pytest.mark.slow
@pytest.mark.usefixtures("metered")
def test_stopping_a_job_says_what_that_does_in_its_present_state(floor, client_for, bob, vera, claim, reload):
    job, client, news = floor.job(), client_for(bob), {"HX-Request": "true", "HX-Target": "div#job-state"}
    queued = text(client.get(f"/jobs/{job.pk}"))
    attempt = claim().start(total_steps=10)
    attempt.report(wire.StepCompleted, **step(3, 1.5))
    attempt.checkpoint(step=3, seconds=9.0)
    running, part = text(client.get(f"/jobs/{job.pk}")), text(client.get(f"/jobs/{job.pk}", headers=news))
    client.post(f"/jobs/{job.pk}/pause")
    attempt.finish(wire.Stopped(reason="paused", step=3, training_seconds=9.0))
    paused = text(client.get(f"/jobs/{job.pk}"))

    assert "It leaves the queue. You pay nothing" in queued and "last checkpoint" not in queued
    for page in (running, part):
        assert "It saves a checkpoint at its current step, 3 of 10, and stops. You pay about" in page
        assert "The rest of the amount held returns" in page
    assert 'hx-target="#stop-effect"' in part
    assert reload(job).status == "paused" and "keeps its last checkpoint. You paid" in paused
    assert "stop-effect" not in text(client_for(vera).get(f"/jobs/{job.pk}", headers=news))


def test_an_evaluation_is_kept_with_the_checkpoint_of_its_step(floor, claim):
    job = floor.job()
    attempt = claim().start()
    attempt.report(wire.StepCompleted, **step(4, 1.5), train_mean_token_accuracy=0.75)
    attempt.report(wire.EvaluationCompleted, step=4, valid_loss=1.25, valid_mean_token_accuracy=0.5)
    attempt.checkpoint(step=4, seconds=4.0)

    assert job.checkpoints.get().metrics == {
        "step": 4,
        "train_loss": None,
        "train_mean_token_accuracy": 0.75,
        "valid_loss": 1.25,
        "valid_mean_token_accuracy": 0.5,
    }


@pytest.mark.parametrize(("share", "has_rows"), [(0.2, True), (0.0, False)])
def test_a_job_that_ended_before_its_first_evaluation_has_validation_rows(
    share, has_rows, floor, client_for, alice, claim
):
    job = floor.job(hyperparameters={"validation_share": share})
    claim().start().finish(wire.Failed(code=FailureCode.OUT_OF_MEMORY, message="CUDA out of memory at step 1."))

    page = text(client_for(alice).get(f"/jobs/{job.pk}"))

    assert page.count("ended before") == (2 if has_rows else 0)
    assert ("no validation rows" in page) is not has_rows


def test_a_phase_that_is_told_twice_is_one_event(floor, claim):
    job = floor.job()
    attempt = claim()

    for phase in (wire.Phase.DOWNLOADING, wire.Phase.DOWNLOADING, wire.Phase.LOADING):
        attempt.report(wire.PhaseChanged, phase=phase)

    told = JobEvent.objects.filter(job=job, type="state", data__has_key="phase").values_list("message", flat=True)
    assert sorted(told) == ["Downloading", "Loading"]


def test_a_failed_job_says_why_and_what_was_paid(floor, client_for, alice, claim):
    job = floor.job()
    claim().start().finish(
        wire.Failed(
            code=FailureCode.OUT_OF_MEMORY, message="CUDA out of memory at step 3.", log_tail="Traceback: no room"
        )
    )

    page = client_for(alice).get(f"/jobs/{job.pk}").content.decode()

    assert "CUDA out of memory at step 3." in page
    assert "You paid nothing." in page
    assert "Traceback: no room" in page
    assert "Our problem" in page and "Train with QLoRA" in page and re.search(r"about (\$[\d.]+|[\d.]+¢)", page)
    assert "method=qlora" in page


@pytest.mark.slow
def test_the_button_of_a_failed_job_starts_the_change_at_the_price_it_shows(floor, client_for, bob, vera, claim):
    job = floor.job()
    claim().finish(wire.Failed(code=FailureCode.LOSS_IS_ZERO, message="The loss is exactly zero at step 3."))
    browser, address = client_for(bob), f"/jobs/{job.pk}/retry"
    page = browser.get(f"/jobs/{job.pk}").content.decode()
    [cap] = re.findall(r'name="cap" value="([0-9.]+)"', page)

    assert address not in client_for(vera).get(f"/jobs/{job.pk}").content.decode()
    refused = browser.post(address, {"cap": "a lot"})
    risen = browser.post(address, {"cap": f"{Decimal(cap) - Decimal('0.001')}"}, follow=True).content.decode()
    answer = browser.post(address, {"cap": cap})

    again = FineTuningJob.objects.get(idempotency_key=f"retry:{job.pk}")
    assert "The maximum is now " in risen and f"holds {usd(again.spend_cap_nano)}" in risen
    assert (refused.headers["location"], answer.headers["location"]) == (f"/jobs/{job.pk}", f"/jobs/{again.pk}")
    assert (again.status, again.hyperparameters["train_on"]) == ("queued", "all")
    assert (f"{nano_to_usd(again.spend_cap_nano):f}", f"holds {usd(again.spend_cap_nano)}" in page) == (cap, True)


def test_a_failure_that_only_another_file_mends_has_no_button_and_says_so(floor, client_for, bob, claim):
    job = floor.job(hyperparameters={"train_on": "all", "epochs": 1})
    claim().finish(wire.Failed(code=FailureCode.LOSS_IS_ZERO, message="The loss is exactly zero at step 3."))

    page = client_for(bob).get(f"/jobs/{job.pk}").content.decode()

    assert f"/jobs/{job.pk}/retry" not in page
    assert "Train on other rows" in page and "after you upload it" in page


@pytest.mark.slow
@pytest.mark.usefixtures("metered")
def test_pause_and_resume_show_their_price(floor, client_for, bob, vera, claim, reload):
    job = floor.job(spend_cap_nano=90_000_000)
    attempt = claim().start()
    attempt.checkpoint(step=3, seconds=9.0)
    browser = client_for(bob)
    assert '<span data-live="spent">0.9¢</span>' in browser.get(f"/jobs/{job.pk}").content.decode()
    assert client_for(vera).post(f"/jobs/{job.pk}/pause").status_code == 403
    browser.post(f"/jobs/{job.pk}/pause")
    attempt.finish(wire.Stopped(reason="paused", step=3, training_seconds=9.0))

    page = browser.get(f"/jobs/{job.pk}").content.decode()
    browser.post(f"/jobs/{job.pk}/resume")

    assert "holds $0.08<" in page
    assert reload(job).status == "queued"


@pytest.mark.slow
@pytest.mark.usefixtures("metered")
def test_a_job_at_its_cap_asks_for_a_higher_one(floor, client_for, bob, claim, reload):
    job = floor.job(spend_cap_nano=60_000_000)
    attempt = claim().start()
    attempt.beat(training_seconds=46.0)
    attempt.pause(step=5, seconds=47.0)
    browser = client_for(bob)

    assert "New spend cap" in browser.get(f"/jobs/{job.pk}").content.decode()
    browser.post(f"/jobs/{job.pk}/resume", {"cap": ""})
    assert reload(job).status == "paused"
    browser.post(f"/jobs/{job.pk}/resume", {"cap": "0.12"})

    assert reload(job).status == "queued"


def test_the_list_is_searched_sorted_and_exported_with_what_the_address_asks(floor, vera, client_for):
    first, second = floor.job(suffix="triage"), floor.job(suffix="refunds")
    FineTuningJob.objects.filter(pk=first.pk).update(cost_nano=5)
    client = client_for(vera)

    def page(url: str) -> str:
        return text(client.get(url))

    found = page("/jobs?q=tri")
    dearest = page("/jobs?sort=cost")
    exported = b"".join(client.get("/jobs/export?q=refunds").streaming_content).decode()

    assert "triage" in found and "refunds" not in found
    assert dearest.index("triage") < dearest.index("refunds")
    assert "Nothing matches" in page("/jobs?q=nothing")
    lines = exported.splitlines()
    assert lines[0].startswith("id,name,status") and len(lines) == 2 and second.pk in lines[1]
    assert 'href="/jobs?q=tri&status=failed"' in found


@pytest.mark.slow
def test_a_job_shows_who_created_it_when_it_started_and_when_it_ended(floor, claim, alice, vera, client_for):
    job = floor.job(suffix="triage")
    FineTuningJob.objects.filter(pk=job.pk).update(created_by=alice.pk)
    claim().succeed(floor.base_model)

    page = text(client_for(vera).get(f"/jobs/{job.pk}"))

    assert f"by {alice.name or alice.email}" in page
    head = page.partition("page-head")[2][:3000]
    assert "started" in head and "ended" in head


def test_a_job_of_a_key_names_the_key(floor, alice, client_for):
    key = make_key(floor.organization, alice).key
    job = floor.job()
    FineTuningJob.objects.filter(pk=job.pk).update(created_by=key.pk)

    assert f"by key {key.name}" in text(client_for(alice).get(f"/jobs/{job.pk}"))
