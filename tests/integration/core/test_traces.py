"""Traces of pages, calls of the API and jobs, as a collector gets them."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise

import httpx
import pytest
from opentelemetry.sdk.trace import sampling

from apps.accounts.login.key_operations import IssuedKey
from apps.config.env import SAMPLERS, MalformedVariable, _traces_endpoint
from apps.contracts import runs as wire
from apps.contracts.failures import FailureCode
from apps.core.messages import outbox, tracing
from apps.core.models import OutboxMessage
from apps.finetuning.models import FineTuningJob, Run
from apps.finetuning.results import attempt_traces
from apps.finetuning.runs.leases import reclaim_expired_leases
from tests.factories.finetuning import TrainingSetup, make_training_file
from tests.services.collector import Collector, ReceivedSpan, running_collector
from tests.support.attempts import Attempt, step
from tests.support.database import database_url

SENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
StartTracing = Callable[..., None]


@pytest.fixture
def start_tracing(monkeypatch: pytest.MonkeyPatch, settings) -> Iterator[StartTracing]:
    """Return a function that has this process send its traces to an address."""

    def start(url: str, **variables: str) -> None:
        for name, value in ({"OTEL_EXPORTER_OTLP_ENDPOINT": url} | variables).items():
            monkeypatch.setenv(name, value)
        settings.TRACES_ENDPOINT = url
        tracing.start("test")

    yield start
    tracing.stop()


@pytest.fixture
def collector(start_tracing: StartTracing) -> Iterator[Collector]:
    with running_collector() as collector:
        start_tracing(collector.url)
        yield collector
        tracing.stop()


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def create_job(origin: str, key: IssuedKey, floor: TrainingSetup) -> FineTuningJob:
    file_id = make_training_file(floor.organization, floor.base_model).pk
    headers = {"Authorization": f"Bearer {key.secret}", "traceparent": SENT}
    body = {"model": floor.base_model.name, "training_file": file_id}
    answer = httpx.post(f"{origin}/v1/fine_tuning/jobs", json=body, headers=headers, timeout=30)
    assert answer.status_code == 200, answer.text
    return FineTuningJob.objects.get(pk=answer.json()["id"])


def train(attempt: Attempt, floor: TrainingSetup) -> None:
    attempt.report(wire.PhaseChanged, phase=wire.Phase.DOWNLOADING)
    attempt.report(wire.PhaseChanged, phase=wire.Phase.LOADING)
    attempt.start()
    attempt.report(wire.PhaseChanged, phase=wire.Phase.TRAINING)
    attempt.report(wire.StepCompleted, **step(4, 2.5))
    attempt.report(wire.PhaseChanged, phase=wire.Phase.EVALUATING)
    attempt.report(wire.EvaluationCompleted, step=4, valid_loss=2.25)
    attempt.report(wire.PhaseChanged, phase=wire.Phase.TRAINING)
    attempt.checkpoint(step=4, seconds=4.0)
    attempt.report(wire.LogLine, level="info", message="what a worker writes")
    attempt.report(wire.StepCompleted, **step(10, 1.5))
    attempt.report(wire.PhaseChanged, phase=wire.Phase.EVALUATING)
    attempt.report(wire.PhaseChanged, phase=wire.Phase.UPLOADING)
    attempt.succeed(floor.base_model)


def nanoseconds(at) -> int:
    return round(at.timestamp() * 1_000_000) * 1_000


@pytest.mark.slow
def test_a_job_has_one_trace_from_its_request_to_its_publishing(
    origin: str, key: IssuedKey, floor: TrainingSetup, claim, collector: Collector
) -> None:
    job = create_job(origin, key, floor)
    outbox.deliver_due()
    train(claim(), floor)
    outbox.deliver_due()
    tracing.stop()

    request = collector.wait_for(lambda span: span.name == "POST /v1/fine_tuning/jobs")
    trace = {span.name: span for span in collector.of_trace(request.trace_id)}
    run = Run.objects.get(job=job)
    below_request = {name for name, span in trace.items() if span.parent_id == request.id}
    attempt = trace["attempt"]
    below_attempt = {
        name: (span.started_ns, span.ended_ns) for name, span in trace.items() if span.parent_id == attempt.id
    }
    assert (request.kind, request.parent_id, request.links) == ("SERVER", "", [tuple(SENT.split("-")[1:3])])
    assert request.attributes["anneal.job.id"] == job.pk and job.traceparent == request.traceparent
    assert below_request >= {"process train.wake", "attempt", "publish"}
    assert trace["process train.wake"].kind == "CONSUMER"
    assert trace["process deployment.created"].parent_id == trace["publish"].id
    assert (attempt.started_ns, attempt.ended_ns) == (nanoseconds(run.created_at), nanoseconds(run.finished_at))
    assert list(below_attempt) == ["queued", "downloading", "loading", "training", "evaluating", "uploading"]
    times = list(below_attempt.values())
    assert times[0] == (nanoseconds(run.created_at), nanoseconds(run.leased_at))
    assert all(earlier[1] <= later[0] for earlier, later in pairwise(times))
    assert times[-1][1] == nanoseconds(run.finished_at)
    entered = job.events.filter(data__phase="downloading").get().created_at
    assert times[1][0] == nanoseconds(entered)


@pytest.mark.slow
def test_a_trace_with_very_many_phases_keeps_the_first_and_the_last(
    origin: str, key: IssuedKey, floor: TrainingSetup, claim, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt_traces, "_MOST_CHANGES", 6)
    job = create_job(origin, key, floor)
    attempt = claim()
    attempt.report(wire.PhaseChanged, phase=wire.Phase.DOWNLOADING)
    attempt.start()
    for _ in range(4):
        attempt.report(wire.PhaseChanged, phase=wire.Phase.TRAINING)
        attempt.report(wire.StepCompleted, **step(4, 2.5))
        attempt.report(wire.PhaseChanged, phase=wire.Phase.EVALUATING)
    attempt.report(wire.PhaseChanged, phase=wire.Phase.UPLOADING)
    attempt.succeed(floor.base_model)
    outbox.deliver_due()
    tracing.stop()

    sent = only(collector, "attempt")
    trace = {span.name: span for span in collector.of_trace(sent.trace_id)}
    uploading = job.events.filter(data__phase="uploading").get().created_at
    assert trace["uploading"].started_ns == nanoseconds(uploading) == trace["evaluating"].ended_ns
    assert {"downloading", "training"} <= set(trace)
    assert sent.attributes["anneal.run.phase_changes_left_out"] == job.events.filter(data__has_key="phase").count() - 6


@pytest.mark.slow
def test_the_training_of_an_attempt_has_its_last_step_and_its_events(
    origin: str, key: IssuedKey, floor: TrainingSetup, claim, collector: Collector
) -> None:
    job = create_job(origin, key, floor)
    train(claim(), floor)
    outbox.deliver_due()
    tracing.stop()

    training = only(collector, "training")
    assert (
        training.attributes.items()
        >= {
            "anneal.training.step": 10,
            "anneal.training.total_steps": 10,
            "anneal.training.loss": 1.5,
            "anneal.training.tokens": 500,
        }.items()
    )
    assert [(name, fields["anneal.training.step"]) for name, _, fields in training.events] == [
        ("checkpoint", 4), ("evaluation", 4),
    ]  # fmt: skip
    assert (
        only(collector, "attempt").attributes.items()
        >= {
            "anneal.job.id": job.pk,
            "anneal.organization.id": job.organization_id,
            "anneal.run.attempt": 1,
            "anneal.run.status": "succeeded",
            "anneal.pool": floor.pool.name,
        }.items()
    )
    sent = b"".join(collector.bodies)
    for secret in (key.secret, key.secret[-12:], "what a worker writes", os.environ["ANNEAL_SIGNING_KEY"]):
        assert secret.encode() not in sent


@pytest.mark.slow
def test_each_attempt_of_a_job_is_in_its_trace_with_its_failure(
    origin: str, key: IssuedKey, floor: TrainingSetup, claim, collector: Collector
) -> None:
    job = create_job(origin, key, floor)
    claim().fall_silent()
    reclaim_expired_leases()
    claim().start().finish(wire.Failed(code=FailureCode.OUT_OF_MEMORY, message="/home/x: out of memory"))
    outbox.deliver_due()
    tracing.stop()

    attempts = sorted((s for s in collector.spans if s.name == "attempt"), key=lambda span: span.started_ns)
    assert [span.attributes["anneal.run.attempt"] for span in attempts] == [1, 2]
    assert [span.attributes["anneal.run.status"] for span in attempts] == ["lost", "failed"]
    assert attempts[1].attributes["error.type"] == FailureCode.OUT_OF_MEMORY
    assert {span.is_failed for span in attempts} == {True}
    assert {span.traceparent[:35] for span in attempts} == {job.traceparent[:35]}
    assert b"/home/x" not in b"".join(collector.bodies)


@pytest.mark.slow
def test_the_number_of_spans_and_events_of_an_attempt_is_bounded(
    origin: str, key: IssuedKey, floor: TrainingSetup, claim, collector: Collector, monkeypatch
) -> None:
    monkeypatch.setattr(attempt_traces, "_MOST_EVENTS", 3)
    create_job(origin, key, floor)
    attempt = claim().start()
    for number in range(1, 9):
        attempt.report(wire.PhaseChanged, phase=wire.Phase.TRAINING)
        attempt.report(wire.PhaseChanged, phase=wire.Phase.LOADING)
        attempt.report(wire.EvaluationCompleted, step=number, valid_loss=1.0)
    attempt.finish(wire.Failed(code=FailureCode.OUT_OF_MEMORY, message=""))
    outbox.deliver_due()
    tracing.stop()

    parent = only(collector, "attempt")
    assert sorted(span.name for span in collector.spans if span.parent_id == parent.id) == [
        "loading", "queued", "training",
    ]  # fmt: skip
    assert [fields["anneal.training.step"] for *_, fields in only(collector, "training").events] == [6, 7, 8]


@pytest.mark.slow
def test_a_page_is_named_by_its_route_and_not_by_the_secrets_in_its_path(
    origin: str, collector: Collector, alice: object
) -> None:
    for path in (
        "/accounts/password/reset/key/MQ-s3cr3t-t0k3n/",
        "/v1/fine_tuning/jobs/ftjob-s3cr3t",
        "/nowhere/s3cr3t",
    ):
        httpx.get(f"{origin}{path}?q=s3cr3t", timeout=30)
    httpx.get(f"{origin}/static/s3cr3t.css", timeout=30)
    httpx.get(f"{origin}/internal/v1/s3cr3t", timeout=30)
    tracing.stop()

    names = [span.name for span in collector.spans]
    assert len(names) == 3 and "GET /v1/fine_tuning/jobs/<str:job_id>" in names and "GET" in names
    assert b"s3cr3t" not in b"".join(collector.bodies)


@pytest.mark.slow
def test_no_client_can_have_itself_sampled(
    origin: str, key: IssuedKey, floor: TrainingSetup, start_tracing: StartTracing
) -> None:
    with running_collector() as collector:
        start_tracing(collector.url, OTEL_TRACES_SAMPLER="parentbased_traceidratio", OTEL_TRACES_SAMPLER_ARG="0")

        job = create_job(origin, key, floor)
        outbox.deliver_due()
        tracing.stop()

        assert job.traceparent == "" and collector.bodies == []
    assert set(OutboxMessage.objects.values_list("traceparent", flat=True)) == {""}
    assert not OutboxMessage.objects.filter(topic="run.ended").exists()


@pytest.mark.slow
def test_a_collector_that_never_answers_delays_nothing(
    origin: str, start_tracing: StartTracing, silent_port: int
) -> None:
    start_tracing(f"http://127.0.0.1:{silent_port}", OTEL_EXPORTER_OTLP_TIMEOUT="3")
    began_at = time.monotonic()
    for _ in range(10_000):  # five times as many as the queue holds
        with tracing.working(tracing.begin_request("GET", sent="", attributes={})):
            pass
    many_seconds, began_at = time.monotonic() - began_at, time.monotonic()
    for _ in range(5):
        assert httpx.get(f"{origin}/login/", timeout=30).status_code < 500
    page_seconds, began_at = time.monotonic() - began_at, time.monotonic()
    tracing.stop()

    assert many_seconds < 10 and page_seconds < 10
    assert time.monotonic() - began_at < 5


def test_an_address_that_is_no_url_is_refused_by_name() -> None:
    with pytest.raises(MalformedVariable, match="OTEL_EXPORTER_OTLP_ENDPOINT is a URL such as http://collector:4318"):
        _traces_endpoint({"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4318"})


@pytest.mark.parametrize(
    ("sampler", "share", "named"),
    [
        ("parentbased_traceidratoi", "0.05", "OTEL_TRACES_SAMPLER is one of"),
        ("traceidratio", "", "OTEL_TRACES_SAMPLER_ARG"),
        ("parentbased_traceidratio", "5%", "OTEL_TRACES_SAMPLER_ARG"),
        ("parentbased_traceidratio", "5", "OTEL_TRACES_SAMPLER_ARG"),
        ("parentbased_traceidratio", "nan", "OTEL_TRACES_SAMPLER_ARG"),
    ],
)
def test_a_sampler_in_place_of_which_all_would_be_sampled_is_refused(sampler: str, share: str, named: str) -> None:
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318", "OTEL_TRACES_SAMPLER": sampler}

    with pytest.raises(MalformedVariable, match=named):
        _traces_endpoint(variables | {"OTEL_TRACES_SAMPLER_ARG": share})
    assert _traces_endpoint(variables | {"OTEL_TRACES_SAMPLER": "Parentbased_Always_Off"})
    assert set(SAMPLERS) == set(sampling._KNOWN_SAMPLERS)


@pytest.mark.slow
def test_a_process_without_a_collector_imports_nothing_of_opentelemetry() -> None:
    code = (
        "import sys, threading, apps.config.asgi, apps.config.asgi_internal, apps.config.celery\n"
        "from apps.interfaces.gateway.app import create_app\n"
        "create_app()\n"
        "threads = [thread.name for thread in threading.enumerate()]\n"
        "loaded = [*(name for name, module in sys.modules.items() if module), *threads]\n"
        "print([name for name in loaded if name.lower().startswith(('opentelemetry', 'otel'))])"
    )
    variables = {"DATABASE_URL": database_url("app"), "DJANGO_SETTINGS_MODULE": "apps.config.settings.test"}
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | variables, capture_output=True, text=True)

    assert done.stdout.splitlines()[-1:] == ["[]"], done.stderr


def only(collector: Collector, name: str) -> ReceivedSpan:
    [found] = [span for span in collector.spans if span.name == name]
    return found


def test_a_broken_context_in_a_row_starts_no_span_and_fails_nothing(collector: Collector) -> None:
    for broken in ("00-1-2-01", "of another program", "00-" + "0" * 32 + "-b7ad6b7169203331-01"):
        assert tracing.begin_child("publish", parent=broken, attributes={}) is None
