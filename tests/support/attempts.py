"""A worker that speaks the domain's language, one call at a time."""

import datetime
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
from django.db import connection
from django.http import HttpResponse
from django.test import Client

from apps.accounts.models import Organization
from apps.adapters.models import AdapterVersion
from apps.billing.queries import get_balance, get_ledger_sum_nano
from apps.contracts import runs as wire
from apps.contracts.evaluation import Comparison, ConfidenceInterval, EvaluationReport, WorseRow
from apps.contracts.worker_api import ClaimResponse, HeartbeatRequest, HeartbeatResponse
from apps.core.database.clock import db_now
from apps.core.objects.store import store
from apps.finetuning.jobs import control
from apps.finetuning.models import FineTuningJob, GpuPool, PricePolicy, Run, RunUpload, Worker
from apps.finetuning.runs import claims, endings, leases, reports, uploads
from apps.finetuning.runs.leases import Lease
from tests.factories.finetuning import CREDENTIAL, TrainingSetup, adapter_files, checkpoint_files, manifest_of

CREDIT_NANO = 100_000_000_000  # of `give_credit`


@dataclass
class Attempt:
    """One attempt as its worker drives it."""

    claimed: ClaimResponse
    sequence: int = field(default=0)

    @property
    def lease(self) -> Lease:
        return Lease(id=self.claimed.lease_id, token=self.claimed.lease_token)

    @property
    def run(self) -> Run:
        return Run.objects.get(pk=self.claimed.spec.run_id)

    def report(self, kind: type, **fields: Any) -> None:
        self.sequence += 1
        reports.record_events(lease=self.lease, reported=(kind(sequence=self.sequence, **fields),))

    def start(self, total_steps: int = 10, start_step: int = 0) -> "Attempt":
        self.report(
            wire.TrainingStarted, total_steps=total_steps, start_step=start_step, rows=100, trained_tokens_per_epoch=500
        )
        # Half an hour ago, so that the time a worker counts is never more than the time that passed.
        Run.objects.filter(pk=self.claimed.spec.run_id).update(training_started_at=_long_ago())
        return self

    def upload(self, kind: str, step: int, files: dict[str, bytes]) -> RunUpload:
        spec = self.claimed.spec
        manifest = manifest_of(kind, spec.run_id, spec.attempt, step, files)
        body = msgspec.json.encode(manifest)
        answer = uploads.create_upload(
            lease=self.lease, manifest=manifest, manifest_sha256=hashlib.sha256(body).hexdigest()
        )
        upload = RunUpload.objects.get(pk=answer.upload_id)
        for name, content in [*files.items(), ("manifest.json", body)]:
            urls = answer.parts.get(name) or (answer.files[name],)
            size = answer.part_bytes if name in answer.parts else len(content)
            for number, url in enumerate(urls):
                store().put_stream(key_of(url), [content[number * size : (number + 1) * size]])
        return upload

    def checkpoint(self, step: int, seconds: float, *, files: dict[str, bytes] | None = None) -> None:
        upload = self.upload("checkpoint", step, files or checkpoint_files())
        self.report(
            wire.CheckpointSaved,
            step=step,
            upload_id=upload.pk,
            manifest_sha256=upload.manifest_sha256,
            bytes=12,
            trained_tokens=100,
            training_seconds=seconds,
        )

    def pause(self, *, step: int, seconds: float) -> None:
        """Store a checkpoint and stop there, as a pause asks."""
        self.checkpoint(step=step, seconds=seconds)
        self.finish(wire.Stopped(reason="paused", step=step, training_seconds=seconds))

    def succeed(
        self, base_model: Any, *, seconds: float = 20.0, files: dict[str, bytes] | None = None, **fields: Any
    ) -> None:
        files = files or adapter_files(base_model, rank=self.claimed.spec.hyperparameters.lora_rank)
        upload = self.upload("adapter", 10, files)
        self.finish(
            wire.Succeeded(
                upload_id=upload.pk,
                manifest_sha256=upload.manifest_sha256,
                step=10,
                training_seconds=seconds,
                trained_tokens=500,
                **fields,
            )
        )

    def finish(self, outcome: wire.RunOutcome) -> None:
        endings.finish_run(lease=self.lease, outcome=outcome)

    def beat(self, **fields: Any) -> HeartbeatResponse:
        return leases.heartbeat(lease=self.lease, beat=HeartbeatRequest(**fields))

    def fall_silent(self) -> None:
        Run.objects.filter(pk=self.claimed.spec.run_id).update(lease_expires_at=_long_ago())


def key_of(url: str) -> str:
    """Return the key of the object that a directory store has signed."""
    return urlsplit(url).path.removeprefix("/objects/")


def _long_ago() -> datetime.datetime:
    return db_now() - datetime.timedelta(minutes=30)


@pytest.fixture
def metered(floor: TrainingSetup) -> None:
    """Have runs pause at their spend cap."""
    GpuPool.objects.filter(pk=floor.pool.pk).update(price_policy=PricePolicy.METERED)


@pytest.fixture
def claim(floor):
    """Return a function that claims the next run, or None."""

    def take(worker: Worker | None = None) -> Attempt | None:
        claimed = claims.claim(worker=worker or floor.worker, base_models=None)
        return Attempt(claimed) if claimed else None

    return take


@pytest.fixture
def version(floor: TrainingSetup, claim) -> AdapterVersion:
    """An adapter that a job named triage left."""
    job = floor.job(suffix="triage")
    claim().start().succeed(floor.base_model)
    job.refresh_from_db()
    return job.adapter_version


@pytest.fixture
def call(settings) -> Callable[..., HttpResponse]:
    """Return a function that calls /internal/v1 as a worker; other calls meet the addresses of the web."""

    def make(path: str, body: object = None, credential: str = CREDENTIAL) -> HttpResponse:
        web, settings.ROOT_URLCONF = settings.ROOT_URLCONF, "apps.config.urls_internal"
        headers, sent = {"Authorization": f"Bearer {credential}"}, msgspec.json.encode(body)
        try:
            return Client().post(f"/internal/v1{path}", sent, content_type="application/json", headers=headers)
        finally:
            settings.ROOT_URLCONF = web

    return make


@pytest.fixture
def reload():
    def again(job: FineTuningJob) -> FineTuningJob:
        return FineTuningJob.objects.get(pk=job.pk)

    return again


REPORT = EvaluationReport(
    rows=40,
    answers=40,
    grader="exact_match",
    comparisons=(
        Comparison(
            name="exact_match",
            base=ConfidenceInterval(value=0.1, low=0.04, high=0.23),
            tuned=ConfidenceInterval(value=0.8, low=0.65, high=0.9),
            difference=ConfidenceInterval(value=0.7, low=0.5, high=0.85),
            method="Wilson 95 %",
            rows=40,
        ),
    ),
    worse_rows=1,
    worse=(WorseRow(row=7, prompt="Where is <b>it</b>?", reference="here", base_loss=1.0, tuned_loss=2.0),),
)


def step(number: int, loss: float) -> dict:
    return {
        "step": number,
        "total_steps": 10,
        "epoch": number / 10,
        "train_loss": loss,
        "learning_rate": 1e-3,
        "grad_norm": 1.0,
        "trained_tokens": 50 * number,
        "tokens_per_second": 900.0,
        "training_seconds": float(number),
    }


def charged(organization: Organization) -> int:
    """Return the amount that a job has taken from the credit of `give_credit`."""
    balance = get_balance(organization=organization)
    assert get_ledger_sum_nano() == 0
    return CREDIT_NANO - balance.available_nano - balance.held_nano


def held_since(attempt: Attempt, seconds: float) -> None:
    """Have the worker's claim lie so many seconds back."""
    attempt_of = Run.objects.filter(pk=attempt.claimed.spec.run_id)
    attempt_of.update(leased_at=db_now() - datetime.timedelta(seconds=seconds))


def paused_at(attempt: Attempt, job: FineTuningJob, *, step: int, seconds: float) -> None:
    """Have the worker checkpoint and pause the job at this step."""
    control.request_pause(job=job, by="key_test", now=db_now())
    assert attempt.beat().is_pause_requested
    attempt.pause(step=step, seconds=seconds)


@pytest.fixture
def attempt(floor: TrainingSetup, claim) -> Attempt:
    """One that has begun."""
    floor.job()
    return claim().start()


def post(path: str, body: bytes, secret: str) -> tuple[int, dict[str, Any]]:
    """Call /internal/v1 as a worker, without a server; return status and answer."""
    answer = Client().post(
        f"/internal/v1/{path}", body, content_type="application/json", headers={"Authorization": f"Bearer {secret}"}
    )
    return answer.status_code, json.loads(answer.content or b"{}")


def age_nodes(seconds: float) -> None:
    """Move what the reconciliation of a pool measures by so many seconds into the past."""
    with connection.cursor() as cursor:
        for table, column in (
            ("finetuning_capacitynode", "requested_at"), ("finetuning_worker", "created_at"),
            ("finetuning_run", "finished_at"), ("finetuning_poolcapacity", "retry_at"),
            ("finetuning_workertoken", "expires_at"), ("finetuning_poolcapacity", "spot_retry_at"),
            ("serving_replicafleet", "last_requested_at"), ("serving_replicafleet", "wanted_at"),
            ("serving_replica", "draining_at"), ("serving_replica", "created_at"),
            ("serving_replica", "readiness_changed_at"),
        ):  # fmt: skip
            cursor.execute(f"UPDATE {table} SET {column} = {column} - make_interval(secs => %s)", [seconds])
