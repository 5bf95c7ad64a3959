"""A job whose file is not validated yet: it is admitted, refused or cancelled, and until then holds no money."""

import json

import pytest

from apps.billing.queries import get_balance
from apps.core.clock import db_now
from apps.core.models import OutboxMessage
from apps.datasets import comparing
from apps.datasets.models import DatasetVersion
from apps.datasets.tasks import compare
from apps.datasets.validating import validate_version
from apps.finetuning import stopping
from apps.finetuning.models import FineTuningJob
from apps.finetuning.operations import JobRequest, create_job
from apps.finetuning.tasks import admit_waiting
from tests.factories.datasets import jsonl, make_ready_version, make_version

ROW = {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]}
GOOD = (json.dumps(ROW).encode() + b"\n") * 100
BAD = GOOD + b'{"messages": "none"}\n'


@pytest.fixture
def create(floor, organization):
    """Return a maker of jobs whose file has this content and was only uploaded."""

    def make(content: bytes) -> FineTuningJob:
        asked = JobRequest(
            base_model=floor.base_model.name, training_file=make_version(organization, content=content).pk
        )
        return create_job(organization=organization, request=asked, by="key_test", now=db_now())

    return make


def validate(job: FineTuningJob) -> DatasetVersion | None:
    return validate_version(version_id=job.training_file_id, now=db_now())


def held(organization) -> int:
    return get_balance(organization=organization).held_nano


def test_a_job_waits_for_its_file_and_is_then_queued_with_its_hold(create, organization, claim, reload):
    job = create(GOOD)
    admit_waiting()
    waiting = reload(job)

    validate(job)
    admit_waiting()

    assert (waiting.status, waiting.hold_id) == ("validating_files", "")
    job = reload(job)
    assert (job.status, held(organization)) == ("queued", job.spend_cap_nano)
    assert claim().claimed.spec.job_id == job.pk


def test_a_job_waits_until_it_is_known_what_repeats_its_validation_file(floor, organization, reload, monkeypatch):
    monkeypatch.setattr(comparing, "COMPARE_NOW_ROWS", 10)
    training, held_out = (make_ready_version(organization, jsonl(rows), filename=f"{rows}") for rows in (40, 12))
    asked = JobRequest(
        base_model=floor.base_model.name, training_file=training.pk, validation_file=held_out.pk,
        hyperparameters={"epochs": 4, "batch_size": 4},
    )  # fmt: skip

    job = create_job(organization=organization, request=asked, by="key_test", now=db_now())
    admit_waiting()
    waiting = reload(job)
    [message] = OutboxMessage.objects.filter(topic="dataset.compare")
    compare(**message.payload)
    admit_waiting()

    assert (waiting.status, waiting.hold_id) == ("validating_files", "")
    job = reload(job)
    assert (job.status, job.total_steps) == ("queued", 4 * 28 // 4)


def test_a_bad_file_fails_the_job_by_its_field_for_nothing(create, organization, claim, reload):
    job = create(BAD)

    validate(job)
    admit_waiting()

    job = reload(job)
    assert (job.status, job.error_code, job.error_param) == ("failed", "invalid_training_file", "training_file")
    assert "1 invalid line. First: line 101:" in job.error_message
    assert job.events.order_by("-sequence").first().message == f"Failed: {job.error_message}"
    assert (held(organization), claim()) == (0, None)


def test_a_job_cancelled_meanwhile_stays_cancelled(create, organization, claim, reload):
    job = create(GOOD)

    stopping.request_cancellation(job=job, by="key_test", now=db_now())
    validate(job)
    admit_waiting()

    assert reload(job).status == "cancelled"
    assert (held(organization), claim()) == (0, None)
