"""The specification that a worker gets of an attempt: frozen, with URLs that expire."""

import datetime

from apps.catalog.references import base_model_ref
from apps.contracts.runs import CheckpointRef, DatasetRef, RunSpec
from apps.core.database.prepared import fetch_prepared
from apps.core.objects.store import store
from apps.datasets.models import DatasetVersion
from apps.finetuning.lifecycle import MAX_CHECKPOINT_SECONDS, RunStatus
from apps.finetuning.models import Checkpoint, FineTuningJob, GpuPool, Run, RunMember
from apps.finetuning.quotes.rehearsals import stored_rehearsal
from apps.finetuning.recipes.start_points import READ_SECONDS, signed_ref, start_ref
from apps.finetuning.recipes.stored_requests import recipe_of, stored_request
from apps.finetuning.runs.groups import place_of
from apps.finetuning.runs.trackers import open_trackers

_MIN_CHECKPOINT_SECONDS = 15.0
_FAILURE_WINDOW = datetime.timedelta(days=30)
_MIN_FAILURES = 3  # fewer are no evidence; until then the interval is the cautious one
_ENDED = f"""
    SELECT count(*) FILTER (WHERE status = '{RunStatus.LOST}'),
        sum(extract(epoch FROM finished_at - training_started_at)::float8)
    FROM finetuning_run WHERE pool_id = %(pool)s AND training_started_at IS NOT NULL AND finished_at >= %(since)s
"""  # noqa: S608 - constants
# Parallelism that keeps the whole model on every GPU; any other is sharded.
_WHOLE_ON_EACH = {"single": "single", "ddp": "ddp"}


def build_spec(
    *,
    run: Run,
    job: FineTuningJob,
    checkpoint: Checkpoint | None,
    now: datetime.datetime,
    member: RunMember | None = None,
) -> RunSpec:
    """Return the immutable specification of the attempt, with URLs that expire, for its worker or another machine."""
    base, requested = job.base_model, stored_request(job)
    recipe = recipe_of(job)
    is_on_cpu = run.pool.gpu_type_id == "cpu"
    # A checkpoint's plan may be smaller than the job's.
    rehearsal = (
        None
        if checkpoint
        else stored_rehearsal(base_model=base, recipe=recipe, estimate=job.estimate, is_on_cpu=is_on_cpu)
    )
    return RunSpec(
        run_id=run.pk,
        job_id=job.pk,
        organization_id=job.organization_id,
        attempt=run.attempt,
        base_model=base_model_ref(base, has_token=True),
        training=_dataset_ref(job.training_file),
        validation=_dataset_ref(job.validation_file) if job.validation_file else None,
        hyperparameters=recipe,
        resume_from=_checkpoint_ref(checkpoint) if checkpoint else None,
        gpu_count=job.gpu_count,
        parallelism=parallelism_of(job.estimate.get("parallelism")),
        model_copies=job.estimate.get("plan", {}).get("copies", 1),
        group=place_of(run=run, job=job, member=member),
        start_from=start_ref(job=job),
        seconds_between_failures=_seconds_between_failures(pool=run.pool, now=now),
        expected_training_seconds=job.estimate.get("train_seconds_p50"),
        checkpoint_interval_seconds=checkpoint_interval(job.estimate.get("train_seconds_p50")),
        estimated_peak_bytes=job.estimate.get("peak_bytes"),
        rehearsed_bytes=rehearsal.peak_bytes if rehearsal else None,
        rehearsal=rehearsal.request if rehearsal and rehearsal.peak_bytes is None else None,
        evaluation=requested.evaluation,
        exports=requested.exports,
        trackers=open_trackers(job=job),
    )


def parallelism_of(estimated: str | None) -> str:
    """Return how the trainer shares a model between GPUs: a checkpoint is read by runs that share it alike."""
    return _WHOLE_ON_EACH.get(estimated or "single", "fsdp")


def checkpoint_interval(estimated_seconds: float | None) -> int:
    """Return the seconds between checkpoints: five per job, so that losing a worker costs at most a fifth of the job.

    The lower limit keeps saving worthwhile (Young 1974: sqrt(2 x save x time between failures) for a save of one second
    and a failure every two minutes). The upper limit bounds a customer's loss.
    """
    return int(min(max((estimated_seconds or 0.0) / 5, _MIN_CHECKPOINT_SECONDS), MAX_CHECKPOINT_SECONDS))


def _dataset_ref(version: DatasetVersion) -> DatasetRef:
    url = store().signed_url(version.data_key, "GET", expires_seconds=READ_SECONDS, base="internal")
    return DatasetRef(
        id=version.pk,
        sha256=version.data_sha256,
        bytes=version.data_bytes,
        rows=version.rows or 0,
        url=url,
        kind=version.kind or "chat",
    )


def _seconds_between_failures(*, pool: GpuPool, now: datetime.datetime) -> float | None:
    """Return the mean training time between two lost attempts of the pool.

    If too few were lost, return the operator's expectation for a spot pool, and None for others. The login for claims
    sees every tenant: the machines are shared, and only the mean is returned.
    """
    ((lost, trained),) = fetch_prepared(_ENDED, {"pool": pool.pk, "since": now - _FAILURE_WINDOW})
    if lost < _MIN_FAILURES:
        return 3600 / pool.interruptions_per_hour if pool.is_spot else None
    return float(trained / lost)


def _checkpoint_ref(checkpoint: Checkpoint) -> CheckpointRef:
    upload = checkpoint.upload
    return signed_ref(checkpoint.pk, checkpoint.step, upload.manifest, upload.manifest_sha256, upload.object_prefix)
