"""A job whose file is not validated yet: it is admitted, refused or cancelled, and until then holds no money."""

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.models import Q

from apps.billing.queries import get_balance
from apps.core.database.clock import db_now
from apps.core.errors import InvalidState, InvalidValue, QuotaExceeded
from apps.core.messages import outbox
from apps.core.models import OutboxMessage
from apps.core.money import dollars
from apps.datasets import operations as datasets
from apps.datasets.inspection import comparisons
from apps.datasets.models import DatasetVersion
from apps.datasets.operations import count_tokens, delete_version
from apps.datasets.tasks import compare, count
from apps.datasets.tasks import validate as validate_task
from apps.datasets.validation.leases import validate_version
from apps.finetuning.jobs import admission, control
from apps.finetuning.jobs.creation import create_job
from apps.finetuning.jobs.explanations import explain
from apps.finetuning.jobs.requests import JobRequest
from apps.finetuning.jobs.retries import retry_job
from apps.finetuning.models import FineTuningJob
from apps.finetuning.tasks import admit_jobs_of_file, admit_waiting
from apps.finetuning.usage.quotas import set_quota
from tests.factories.chat import PAIR, TOOL_ROW
from tests.factories.datasets import jsonl, jsonl_of, make_ready_version, make_version
from tests.factories.many_rows import copy_rows, numbered

ROW = {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]}
GOOD = (json.dumps(ROW).encode() + b"\n") * 100
BAD = GOOD + b'{"messages": "none"}\n'


@pytest.fixture
def create(floor, organization):
    """Return a maker of jobs whose file has this content and was only uploaded."""

    def make(content: bytes, **request: Any) -> FineTuningJob:
        version = make_version(organization, content=content)
        asked = JobRequest(base_model=floor.base_model.name, training_file=version.pk, **request)
        return create_job(organization=organization, request=asked, by="key_test", now=db_now())

    return make


def validate(job: FineTuningJob) -> DatasetVersion | None:
    """Validate the job's file and count it, as the task does."""
    version = validate_version(version_id=job.training_file_id, now=db_now())
    if version.status == "ready" and datasets.is_counted_at_once(version):
        count_tokens(version=version, base_model=job.base_model)
    return version


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


@pytest.mark.parametrize("pool", ["x:" + "9" * 5000, "x:²", "x:0", "x:1000"])
def test_a_malformed_pool_is_refused_before_the_file_is_validated(create, pool):
    with pytest.raises(InvalidValue, match="Use the id of an estimate's option"):
        create(GOOD, pool=pool)
    assert not FineTuningJob.objects.exists()


def test_a_job_that_cannot_be_admitted_by_a_fault_of_ours_fails_after_minutes(create, reload, monkeypatch):
    def break_down(*_: object) -> None:
        raise ZeroDivisionError

    job, began = create(GOOD), db_now()
    validate(job)
    monkeypatch.setattr(admission, "_admit_if_validated", break_down)
    minutes = [0, 1, 3, 6, 9]
    for minute in minutes:
        monkeypatch.setattr(admission, "db_now", lambda now=began + timedelta(minutes=minute): now)
        admit_waiting()
        assert reload(job).status == "validating_files"
    monkeypatch.setattr(admission, "db_now", lambda: began + timedelta(minutes=12))
    admit_waiting()

    failed = reload(job)
    assert (failed.status, failed.error_code, failed.hold_id) == ("failed", "internal_error", "")
    assert "Try again" in failed.error_message


def test_a_job_waits_until_it_is_known_what_repeats_its_validation_file(floor, organization, reload, monkeypatch):
    monkeypatch.setattr(comparisons, "COMPARE_NOW_ROWS", 10)
    training, held_out = (make_ready_version(organization, jsonl(rows), filename=f"{rows}") for rows in (40, 12))
    count_tokens(version=training, base_model=floor.base_model)
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
    name = f"train.jsonl ({job.training_file_id}), line 101: "
    assert job.error_message.startswith(name) and job.error_message.endswith(".")
    assert job.training_file.errors[0]["fix"] in job.error_message
    assert job.events.order_by("-sequence").first().message == f"Failed: {job.error_message}"
    assert (held(organization), claim()) == (0, None)


def test_a_file_with_too_few_rows_fails_the_job_for_nothing(create, organization, reload):
    job = create(GOOD[: GOOD.index(b"\n") + 1] * 4)

    validate(job)
    admit_waiting()

    job = reload(job)
    assert (job.status, job.error_code) == ("failed", "invalid_training_file")
    assert "The file has 4 rows; fine-tuning needs at least 10. Add more examples." in job.error_message
    assert (held(organization), job.cost_nano) == (0, 0)


def test_a_bad_validation_file_fails_the_job_by_its_own_field(floor, organization, reload):
    training, held_out = make_ready_version(organization), make_version(organization, BAD, filename="held.jsonl")
    asked = JobRequest(base_model=floor.base_model.name, training_file=training.pk, validation_file=held_out.pk)
    job = create_job(organization=organization, request=asked, by="key_test", now=db_now())

    validate_version(version_id=held_out.pk, now=db_now())
    admit_waiting()

    job = reload(job)
    assert (job.status, job.error_param) == ("failed", "validation_file")
    assert job.error_message.startswith(f"held.jsonl ({held_out.pk}), line 101: ")


def test_a_file_waited_for_cannot_be_deleted(create):
    job = create(GOOD)

    with pytest.raises(InvalidState, match=job.pk):
        delete_version(version=job.training_file, by="key_test", now=db_now())


def test_a_validation_that_ends_admits_its_jobs_at_once(create, reload):
    job = create(GOOD)
    outbox.deliver_due(lane=outbox.CONTROL)  # looks at the job, which still waits

    validate_task(job.training_file_id)
    outbox.deliver_due()

    assert reload(job).status == "queued"


@pytest.mark.usefixtures("metered")
def test_credit_that_does_not_suffice_when_the_file_is_ready_fails_the_job(create, organization, reload):
    job = create(GOOD, spend_cap_nano=10**15)

    validate(job)
    admit_waiting()

    job = reload(job)
    assert (job.status, job.error_code) == ("failed", "insufficient_quota")
    assert "$" in job.error_message and (held(organization), job.cost_nano) == (0, 0)


def test_waiting_jobs_count_as_unfinished(create, organization, olga):
    set_quota(organization=organization, by=olga.pk, now=db_now(), queued_jobs=2)
    create(GOOD)
    create(GOOD)

    with pytest.raises(QuotaExceeded, match="2 unfinished jobs"):
        create(GOOD)

    assert FineTuningJob.objects.count() == 2


def test_a_job_that_waited_gets_the_recipe_of_one_that_did_not(floor, organization, reload):
    for row in (ROW, PAIR):
        content = jsonl_of(row) * 40
        fields = {"base_model": floor.base_model.name, "hyperparameters": {"lora_rank": 8, "epochs": "auto"}}
        early = make_version(organization, content)
        waiting = create_job(
            organization=organization, request=JobRequest(training_file=early.pk, **fields), by="key_test", now=db_now()
        )
        validate_version(version_id=early.pk, now=db_now())
        count_tokens(version=DatasetVersion.objects.get(pk=early.pk), base_model=floor.base_model)

        admit_waiting()
        later = create_job(
            organization=organization, request=JobRequest(training_file=early.pk, **fields), by="key_test", now=db_now()
        )

        waiting = reload(waiting)
        assert (waiting.status, waiting.hyperparameters) == ("queued", later.hyperparameters)
        assert waiting.requested["choices"] == later.requested["choices"]


def test_a_job_that_cannot_be_judged_keeps_no_other_waiting(create, reload, monkeypatch):
    first, second = create(GOOD), create(GOOD)
    for job in (first, second):
        validate_task(job.training_file_id)
    judge = admission.require_rows_to_train

    def fail_for_first(training_file, validation_file):
        if training_file.pk == first.training_file_id:
            raise RuntimeError("a bug")
        judge(training_file, validation_file)

    monkeypatch.setattr(admission, "require_rows_to_train", fail_for_first)
    admit_waiting()

    assert [reload(job).status for job in (first, second)] == ["validating_files", "queued"]


def test_a_row_the_model_cannot_read_fails_the_job_that_waits_for_a_large_file(create, reload, monkeypatch):
    monkeypatch.setattr(datasets, "COUNT_NOW_BYTES", 10)
    job = create(GOOD + jsonl_of(TOOL_ROW))  # the demo's template knows no tools

    validate(job)
    admit_waiting()
    [message] = OutboxMessage.objects.filter(topic="dataset.count")
    count(**message.payload)
    admit_waiting()

    job = reload(job)
    assert (job.status, job.error_code) == ("failed", "invalid_training_file")
    assert "Line 101: " in job.error_message


def test_a_small_file_too_is_counted_by_a_task_and_not_by_the_admission(create, reload, monkeypatch):
    """The admission is in the lane of leases, mail and money."""
    monkeypatch.setattr("apps.datasets.tasks.SMALL_SECONDS", -1.0)
    job = create(GOOD)
    validate_task(job.training_file_id)

    admit_waiting()
    waiting = reload(job).status
    [message] = OutboxMessage.objects.filter(topic="dataset.count")
    count(**message.payload)
    admit_waiting()

    assert (waiting, reload(job).status) == ("validating_files", "queued")


def test_a_job_cancelled_meanwhile_stays_cancelled(create, organization, claim, reload):
    job = create(GOOD)

    control.request_cancellation(job=job, by="key_test", now=db_now())
    validate(job)
    admit_waiting()

    assert reload(job).status == "cancelled"
    assert (held(organization), claim()) == (0, None)


def test_a_job_whose_maximum_rose_while_it_waited_starts_again_at_the_new_one(create, organization, reload):
    job = create(GOOD, shown_max_nano=1)
    validate(job)
    admit_waiting()
    failed = reload(job)
    advice = explain(job=failed, now=db_now()).suggestion

    assert (failed.status, failed.error_code, held(organization)) == ("failed", "maximum_raised", 0)
    assert f"now {dollars(advice.hold_nano)} instead of" in failed.error_message
    again = retry_job(job=failed, by="user_1", now=db_now(), shown_max_nano=advice.hold_nano)
    assert (reload(again).status, held(organization)) == ("queued", advice.hold_nano)


def test_organizations_take_turns_with_waiting_jobs_and_a_tick_looks_at_a_few(
    create, floor, organization, rival, reload, monkeypatch
):
    def wait_for(owner) -> FineTuningJob:
        version = make_version(owner, content=GOOD)
        asked = JobRequest(base_model=floor.base_model.name, training_file=version.pk)
        return create_job(organization=owner, request=asked, by="key_test", now=db_now())

    flood, theirs = [create(GOOD) for _ in range(4)], wait_for(rival)
    looked_at: list[str] = []
    monkeypatch.setattr(admission, "admit_when_ready", lambda *, job_id: looked_at.append(job_id))
    ids = [job.pk for job in flood]

    admission.admit_in_turn(waiting=Q(), most=2)
    assert looked_at == [ids[0], theirs.pk], "a job that came after four of another organization is in the first tick"
    for _ in range(3):
        admission.admit_in_turn(waiting=Q(), most=2)
    assert sorted(looked_at) == sorted([*ids, *[theirs.pk] * 4]), "each tick has one of each"

    monkeypatch.setattr(admission, "CHECK_SECONDS", -1.0)
    admission.admit_in_turn(waiting=Q())
    assert len(looked_at) == 8, "a tick ends after its time"


@pytest.mark.django_db(transaction=True)
def test_a_job_that_is_locked_keeps_no_other_waiting(create, reload):
    locked, other = create(GOOD), create(GOOD)
    for job in (locked, other):
        validate_task(job.training_file_id)
    FineTuningJob.objects.update(status="validating_files", checked_at=None)

    def tick() -> None:
        try:
            with connection.cursor() as cursor:
                cursor.execute("SET lock_timeout = '200ms'")
            admit_waiting()
        finally:
            connection.close()

    with ThreadPoolExecutor(1) as threads, transaction.atomic():
        FineTuningJob.objects.select_for_update().get(pk=locked.pk)
        threads.submit(tick).result()
        assert [reload(job).status for job in (locked, other)] == ["validating_files", "queued"]

    admit_waiting()
    assert (reload(locked).status, locked.events.filter(data__is_fault=True).count()) == ("queued", 0)


def test_a_file_for_which_many_jobs_wait_admits_a_few_at_once(create, reload, monkeypatch):
    job = create(GOOD)
    looked_at: list[str] = []
    monkeypatch.setattr(admission, "admit_when_ready", lambda *, job_id: looked_at.append(job_id))
    copy_rows(job, count=10, id=numbered("ftjob-"))

    admit_jobs_of_file(version_id=job.training_file_id)

    assert len(looked_at) == 3, "it runs in the lane of leases and money"
