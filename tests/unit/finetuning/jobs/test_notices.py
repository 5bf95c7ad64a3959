"""The person who created a job gets one mail when it ends or is paused, unless they did it or want none."""

import pytest
from django.core import mail

from apps.contracts import runs as wire
from apps.contracts.failures import FailureCode
from apps.core.database.clock import db_now
from apps.core.messages import outbox
from apps.finetuning.jobs.control import request_pause
from apps.finetuning.models import FineTuningJob
from tests.factories.accounts import make_key


@pytest.fixture
def job(floor, alice) -> FineTuningJob:
    job = floor.job(suffix="triage")
    FineTuningJob.objects.filter(pk=job.pk).update(created_by=alice.pk)
    return job


def sent() -> list[str]:
    mail.outbox.clear()
    outbox.deliver_due(lane="mail")
    return [f"{message.to} {message.subject} {message.body}" for message in mail.outbox]


def test_a_model_that_is_ready_is_named_with_its_cost_and_a_link(job, floor, claim, alice):
    claim().succeed(floor.base_model)
    job.refresh_from_db()

    [text] = sent()

    assert f"['{alice.email}'] Your fine-tune is ready: triage" in text
    assert job.adapter_version.model_name in text and f"/jobs/{job.pk}" in text and "It cost $" in text
    assert sent() == []


def test_a_failure_names_its_cause(job, claim):
    claim().start().finish(wire.Failed(code=FailureCode.OUT_OF_MEMORY, message="CUDA out of memory at step 3."))

    [text] = sent()

    assert "Your fine-tune failed: triage" in text and "CUDA out of memory at step 3." in text


def test_a_pause_is_mailed_to_whoever_did_not_ask_for_it(job, claim, alice):
    attempt = claim()
    attempt.beat(training_seconds=5.0)
    request_pause(job=FineTuningJob.objects.get(pk=job.pk), by="user_bob", now=db_now())
    attempt.pause(step=5, seconds=6.0)

    [text] = sent()

    assert "Your fine-tune is paused: triage" in text


def test_what_its_creator_did_is_not_mailed(job, claim, alice):
    attempt = claim()
    attempt.beat(training_seconds=5.0)
    request_pause(job=FineTuningJob.objects.get(pk=job.pk), by=alice.pk, now=db_now())
    attempt.pause(step=5, seconds=6.0)

    assert sent() == []


def test_a_key_stands_for_the_person_who_made_it(job, floor, claim, bob):
    FineTuningJob.objects.filter(pk=job.pk).update(
        created_by=make_key(floor.organization, bob, scopes=frozenset({"view"})).key.pk
    )
    claim().succeed(floor.base_model)

    [text] = sent()

    assert bob.email in text


def test_a_person_who_wants_none_gets_none(job, floor, claim, alice):
    alice.wants_job_mail = False
    alice.save()
    claim().succeed(floor.base_model)

    assert sent() == []


def test_a_job_that_went_on_meanwhile_is_not_reported_as_paused(job, claim, floor):
    attempt = claim()
    attempt.beat(training_seconds=5.0)
    request_pause(job=FineTuningJob.objects.get(pk=job.pk), by="user_bob", now=db_now())
    attempt.pause(step=5, seconds=6.0)
    FineTuningJob.objects.filter(pk=job.pk).update(status="queued")

    assert sent() == []
