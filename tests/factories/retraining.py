"""A model in production with what its retraining needs, and the answers of both models."""

from typing import Any

from apps.accounts.login.key_operations import IssuedKey
from apps.core.database.clock import db_now
from apps.finetuning.jobs.creation import create_job
from apps.finetuning.jobs.requests import JobRequest
from apps.finetuning.jobs.retraining.plans import PlanRequest, create_plan
from apps.finetuning.jobs.retraining.progress import advance_open
from apps.finetuning.models import FineTuningJob, Retraining, RetrainingPlan
from apps.serving.aliases import point_alias
from apps.serving.evals.lifecycle import EvalRunStatus
from apps.serving.evals.models import EvalItem, EvalRun
from apps.serving.models import Replica
from tests.factories.datasets import chat_row, jsonl, jsonl_of, make_ready_version
from tests.factories.finetuning import TrainingSetup
from tests.factories.money import USD
from tests.factories.serving import load, make_replica, price_inference

DATASET, HELD_OUT, REGRESSION = "support", "support-held-out", "support-regression"


def make_production(floor: TrainingSetup, key: IssuedKey, claim: Any) -> FineTuningJob:
    """A job of 12 rows whose model stands behind the alias `production`, and datasets to compare on."""
    organization, base_model = floor.organization, floor.base_model
    rows = make_ready_version(organization, jsonl(12), dataset_name=DATASET)
    for name, subject in ((HELD_OUT, "bread"), (REGRESSION, "soup")):
        content = jsonl_of(*(chat_row(f"Which {subject} has recipe {number}?", str(number)) for number in range(12)))
        make_ready_version(organization, content, dataset_name=name)
    request = JobRequest(
        base_model=base_model.name, training_file=rows.pk, suffix="support", hyperparameters={"epochs": 2}
    )
    job = create_job(organization=organization, request=request, by=key.key.pk, now=db_now())
    price_inference(base_model.name)
    make_replica(base_model, "unix:///nowhere")
    train(floor, claim)
    job.refresh_from_db()
    assert job.adapter_version is not None
    point_alias(version=job.adapter_version, name="production", by=key.key.pk, now=db_now())
    return job


def train(floor: TrainingSetup, claim: Any) -> None:
    """End the waiting job, and have a replica load its model."""
    claim().start().succeed(floor.base_model)
    newest = FineTuningJob.objects.filter(status="succeeded").latest("finished_at")
    assert newest.adapter_version is not None
    load(newest.adapter_version, Replica.objects.get())


def make_plan(job: FineTuningJob, key: IssuedKey, **changes: Any) -> RetrainingPlan:
    """A plan that begins when four rows are new."""
    asked: dict[str, Any] = {
        "name": "support, weekly", "source_job": job.pk, "dataset": DATASET, "held_out": HELD_OUT,
        "alias": "production", "max_nano": 20 * USD, "min_new_rows": 4,
    }  # fmt: skip
    request = PlanRequest(**(asked | changes))
    return create_plan(organization=job.organization_id, request=request, by=key.key.pk, now=db_now())


def grow(job: FineTuningJob, rows: int) -> None:
    """Upload a version of so many rows."""
    make_ready_version(job.organization, jsonl(rows), dataset_name=DATASET)


def tick() -> Retraining:
    """Let a minute pass, and return the newest retraining."""
    Retraining.objects.filter(finished_at=None).update(next_at=db_now())
    advance_open()
    return Retraining.objects.latest("created_at")


def answer(run: EvalRun | None, *, passed: int, rows: int = 40, errors: int = 0) -> None:
    """End a run of an eval: the first rows pass, and the last ones have no answer."""
    assert run is not None
    statuses = ["pass"] * passed + ["fail"] * (rows - passed - errors) + ["error"] * errors
    EvalItem.objects.bulk_create(
        EvalItem(
            organization_id=run.organization_id, run=run, number=number, source="{}", bytes=2, status=status
        )
        for number, status in enumerate(statuses)
    )  # fmt: skip
    for status in (EvalRunStatus.IN_PROGRESS, EvalRunStatus.COMPLETED):
        EvalRun.objects.filter(pk=run.pk).update(status=status)
