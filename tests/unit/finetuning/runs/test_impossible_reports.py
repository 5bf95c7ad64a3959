"""No trainer is believed what no machine does: time, numbers, floods of events and of measurements."""

import datetime
import json

import msgspec
import pytest
from django.db.models import F

from apps.contracts import runs as wire
from apps.core.database.clock import db_now
from apps.core.errors import DomainError, RateLimited
from apps.finetuning.models import FineTuningJob, JobEvent, Run, ThroughputProbe, Worker
from apps.finetuning.quotes.pool_facts import seconds_ahead
from apps.finetuning.runs import reports
from apps.finetuning.usage.storage import stored_bytes
from tests.factories.finetuning import CREDENTIAL, probe_report
from tests.support.attempts import post, step

pytestmark = pytest.mark.urls("apps.config.urls_internal")


def test_no_more_time_is_billed_than_passed(attempt, floor, reload):
    Run.objects.update(training_started_at=db_now() - datetime.timedelta(seconds=20))

    attempt.succeed(floor.base_model, seconds=1e8)

    assert 20_000 <= FineTuningJob.objects.get().billed_gpu_ms < 60_000


def test_a_checkpoint_takes_the_storage_that_its_files_take(attempt, organization):
    """Storage is billed by the hour, and limits what the organization may upload."""
    before = stored_bytes(organizations=[organization.pk])[organization.pk]
    upload = attempt.upload("checkpoint", 5, {"optimizer.pt": b"x" * 40})
    attempt.report(
        wire.CheckpointSaved, step=5, upload_id=upload.pk, manifest_sha256=upload.manifest_sha256, bytes=2**53,
        trained_tokens=100, training_seconds=1.0,
    )  # fmt: skip

    assert stored_bytes(organizations=[organization.pk])[organization.pk] - before == 40


def test_steps_beyond_the_last_one_leave_no_work_less_than_none_for_the_pools_quotes(attempt, floor):
    attempt.report(wire.StepCompleted, **step(2**31 - 1, 2.0) | {"total_steps": 1})

    assert FineTuningJob.objects.get().step == 1
    assert seconds_ahead(pool=floor.pool) >= 0


def test_a_heartbeat_that_claims_years_pauses_nothing(attempt):
    Run.objects.update(training_started_at=db_now())

    assert not attempt.beat(training_seconds=9e8).is_pause_requested


def test_events_beyond_any_pace_are_refused_and_not_kept(attempt):
    before = JobEvent.objects.count()

    for sequence in (10**6, 2**53):
        with pytest.raises(RateLimited):
            line = wire.LogLine(sequence=sequence, level="info", message="x")
            reports.record_events(lease=attempt.lease, reported=(line,))
    assert JobEvent.objects.count() == before

    Run.objects.update(leased_at=F("leased_at") - datetime.timedelta(days=1))
    reports.record_events(lease=attempt.lease, reported=(wire.LogLine(sequence=10**6, level="info", message="x"),))
    assert JobEvent.objects.count() == before + 1


def test_a_line_of_any_length_is_cut(attempt):
    attempt.report(wire.LogLine, level="shout", message="x" * 10**6)

    event = JobEvent.objects.order_by("-sequence").first()
    assert (len(event.message), event.level) == (1000, "info")


NO_NUMBERS = (
    ("step", -1), ("step", 2**40), ("trained_tokens", 2**70), ("trained_tokens", -5), ("training_seconds", -1),
    ("training_seconds", 1e30), ("tokens_per_second", -3), ("memory_bytes", -1), ("total_steps", 2**31),
    ("train_loss", "NaN"), ("sequence", -1),
)  # fmt: skip


def test_numbers_that_no_machine_has_are_refused(attempt):
    for field, value in NO_NUMBERS:
        event = {"type": "step_completed", "sequence": attempt.sequence + 1} | step(1, 2.0) | {field: value}
        status, answer = post(
            f"leases/{attempt.lease.id}/events", json.dumps({"events": [event]}).encode(), attempt.lease.token
        )
        assert (status, field in answer["error"]["message"]) == (400, True), (field, value)


def test_an_event_of_no_known_type_is_refused_with_the_types(attempt):
    for sent, code in (({"type": "step"}, "invalid_value"), ({}, "missing_required_parameter")):
        body = json.dumps({"events": [sent | {"sequence": 1}]}).encode()
        status, answer = post(f"leases/{attempt.lease.id}/events", body, attempt.lease.token)
        error = answer["error"]
        assert (status, error["code"], error["param"]) == (400, code, "events[0].type")
        assert "'step_completed'" in error["message"]


def test_bodies_that_are_too_deep_or_too_large_are_refused(attempt):
    for body, status in (
        (b"[" * 200_000, 400), (b'{"events": []}' + b" " * 3 * 2**20, 413), (b"\xff", 400), (b"", 400),
    ):  # fmt: skip
        answered, _ = post(f"leases/{attempt.lease.id}/events", body, attempt.lease.token)
        assert answered == status, body[:20]


def test_samples_beyond_their_bounds_are_refused_and_those_of_too_many_steps_ignored(attempt, monkeypatch):
    sample = {"prompt": "p", "reference": "r", "answer": "a"}
    for samples in ([sample | {"answer": "x" * 1001}], [sample] * 4):
        event = {"type": "samples_generated", "sequence": attempt.sequence + 1, "step": 1, "samples": samples}
        body = json.dumps({"events": [event]}).encode()
        assert post(f"leases/{attempt.lease.id}/events", body, attempt.lease.token)[0] == 400

    monkeypatch.setattr(reports, "_MAX_SAMPLED_STEPS", 2)
    for number in range(4):
        attempt.report(wire.SamplesGenerated, step=number, samples=(wire.Sample(**sample),))
    assert JobEvent.objects.filter(type="samples").count() == 2


def test_a_line_with_nul_is_kept_without_it(attempt):
    line = r'{"type":"log_line","sequence":%d,"level":"info","message":"a\u0000\u0000 b \\u0000 \\\u0000"}'
    body = b'{"events": [%b]}' % (line % (attempt.sequence + 1)).encode()

    assert post(f"leases/{attempt.lease.id}/events", body, attempt.lease.token)[0] == 200
    assert JobEvent.objects.order_by("-sequence").first().message == "a\ufffd\ufffd b \\u0000 \\\ufffd"


def test_more_events_at_once_than_a_worker_sends_are_refused(attempt):
    kept, first = JobEvent.objects.count(), attempt.sequence + 1
    lines = [wire.LogLine(sequence=first + number, level="info", message="x") for number in range(501)]

    status, _ = post(f"leases/{attempt.lease.id}/events", msgspec.json.encode({"events": lines}), attempt.lease.token)

    assert (status, JobEvent.objects.count()) == (400, kept)


def test_a_claim_that_names_more_models_than_a_machine_has_is_refused(floor):
    for named in (["m"] * 1_001, ["m" * 1_000_000]):  # an offer is read with each claim of the pool
        claim = {"address": "10.0.0.1", "port": 29_500, "base_models": named}
        assert post("claim", json.dumps(claim).encode(), CREDENTIAL)[0] == 400
    assert Worker.objects.get().offer is None


def test_measurements_that_no_machine_makes_are_refused(floor):
    report = msgspec.to_builtins(probe_report(floor.base_model))

    for changes in (
        {"tokens_per_second": 1e30}, {"tokens_per_second": 0}, {"tokens_per_second": -1}, {"peak_memory_bytes": 2**60},
        {"seconds_per_micro_step": -1}, {"startup_seconds": 1e12}, {"software": {"torch": "x" * 1000}},
        {"method": "x" * 100}, {"config": {"x": "y" * 70_000}},
    ):  # fmt: skip
        assert post("probes", json.dumps(report | changes).encode(), CREDENTIAL)[0] == 400, changes


def test_a_worker_that_measures_without_end_is_stopped_and_a_replica_measures_nothing(floor, monkeypatch):
    monkeypatch.setattr("apps.interfaces.worker_api.probes._MAX_A_DAY", ThroughputProbe.objects.count() + 1)
    body = msgspec.json.encode(probe_report(floor.base_model))

    answers = [post("probes", body, CREDENTIAL)[0] for _ in range(2)]
    Worker.objects.update(kind="replica")

    assert (answers, post("probes", body, CREDENTIAL)[0]) == ([204, 429], 403)


def test_nothing_refused_leaves_the_run_unable_to_go_on(attempt, floor):
    with pytest.raises(DomainError):
        reports.record_events(lease=attempt.lease, reported=(wire.LogLine(sequence=10**9, level="info", message="x"),))

    attempt.succeed(floor.base_model)

    assert FineTuningJob.objects.get().status == "succeeded"
