"""Celery and outbox tasks; each makes one or two calls into the domain."""

import logging

from celery import current_app, shared_task
from celery.exceptions import SoftTimeLimitExceeded
from django.db.models import Q

from apps.core.database.clock import db_now
from apps.core.errors import DomainError
from apps.datasets.lifecycle import DatasetVersionStatus
from apps.finetuning.conversions import leases as conversion_leases
from apps.finetuning.jobs.admission import admit_in_turn
from apps.finetuning.jobs.control import pause_jobs_of, pause_jobs_of_budget
from apps.finetuning.jobs.retraining.progress import advance_open
from apps.finetuning.jobs.retraining.triggers import begin_due
from apps.finetuning.models import GpuPool
from apps.finetuning.pools.accuracy import refresh_public_reports
from apps.finetuning.pools.calibrations import refit_pools
from apps.finetuning.pools.capacity.reconciliation import list_elastic_pools, reconcile_pool
from apps.finetuning.pools.rehearsals import sweep_rehearsals
from apps.finetuning.results import examinations, hub_pushes, uploaded_adapters
from apps.finetuning.results.checkpoint_models import serve_checkpoint
from apps.finetuning.results.retention import sweep_checkpoints, sweep_uploads
from apps.finetuning.runs.leases import reclaim_expired_leases
from apps.finetuning.runs.lending import ask_machines_back
from apps.finetuning.runs.queue.shares import repair_shares
from apps.finetuning.runs.stalls import end_stalled_runs
from apps.finetuning.usage import storage

logger = logging.getLogger(__name__)
# Of a file whose validation is over.
_ENDED = (DatasetVersionStatus.READY, DatasetVersionStatus.INVALID, DatasetVersionStatus.DELETED)
_ADMITTED_AT_ONCE = 3  # by one message of the control lane


@shared_task(name="finetuning.reclaim_expired_leases")
def reclaim(**_: object) -> None:
    reclaim_expired_leases()
    end_stalled_runs()
    ask_machines_back(now=db_now())
    examinations.release_overdue(now=db_now())
    conversion_leases.release_overdue(now=db_now())
    hub_pushes.end_overdue(now=db_now())
    repair_shares()


@shared_task(name="finetuning.ring_doorbells")
def ring_doorbells(**_: object) -> None:
    """Wake every pool, so that a lost message costs only one period and idle workers show that they are alive."""
    for name in GpuPool.objects.filter(borrows_from=None).values_list("name", flat=True):
        ring_doorbell(pool=name)


@shared_task(name="finetuning.adjust_capacity")
def adjust_capacity(**_: object) -> None:
    """Have each elastic pool start or release nodes. A silent engine delays the others twice a minute."""
    for pool_id in list_elastic_pools():
        try:
            reconcile_pool(pool_id=pool_id)
        except SoftTimeLimitExceeded:
            raise
        except Exception:  # a process edge: one pool must not stop the others
            logger.exception("the capacity of %s was not adjusted", pool_id)


@shared_task(name="finetuning.admit_waiting")
def admit_waiting(**_: object) -> None:
    """Check waiting jobs whose files are validated by now: a message may be lost, and a large file is counted later."""
    admit_in_turn(waiting=Q(training_file__status__in=_ENDED) | Q(validation_file__status=DatasetVersionStatus.INVALID))


@shared_task(name="finetuning.retrain")
def retrain(**_: object) -> None:
    """Begin what plans of retraining have due, and take the next step of what has begun."""
    begin_due()
    advance_open()


def admit_jobs_of_file(*, version_id: str) -> None:
    """Admit the first jobs that waited for this file, or fail them; `admit_waiting` looks at the others."""
    admit_in_turn(waiting=Q(training_file=version_id) | Q(validation_file=version_id), most=_ADMITTED_AT_ONCE)


def pause_over_budget(*, budget_id: str) -> None:
    """Pause the running jobs of an exhausted budget. Safe to repeat."""
    pause_jobs_of_budget(budget_id=budget_id, now=db_now())


def pause_suspended(*, organization_id: str) -> None:
    """Pause the running jobs of a suspended organization. Safe to repeat."""
    pause_jobs_of(organization_id=organization_id, now=db_now())


@shared_task(name="finetuning.sample_storage")
def sample_storage(**_: object) -> None:
    storage.sample_storage(now=db_now())


@shared_task(name="finetuning.learn_from_runs")
def learn_from_runs(**_: object) -> None:
    """Refit the pools' calibrations to finished runs, and refresh the public accuracy reports."""
    now = db_now()
    refit_pools(now=now)
    refresh_public_reports(now=now)


@shared_task(name="finetuning.sweep_checkpoints")
def sweep(**_: object) -> None:
    """Delete old checkpoints of ended jobs, unused uploads of ended runs, and old rehearsals."""
    sweep_rehearsals(now=db_now())
    sweep_checkpoints(now=db_now())
    sweep_uploads(now=db_now())


@shared_task(
    name="finetuning.sweep_orphans", acks_late=False, ignore_result=True, soft_time_limit=3_540, time_limit=3_600
)
def sweep_orphans() -> None:
    uploaded_adapters.sweep_orphans(now=db_now())
    conversion_leases.sweep_orphans(now=db_now())


def serve_named_checkpoint(*, organization_id: str, checkpoint_id: str) -> None:
    """Serve the checkpoint that a request named."""
    try:
        serve_checkpoint(organization=organization_id, checkpoint_id=checkpoint_id)
    except DomainError as refused:  # deleted in the meantime, or without an adapter: a retry changes nothing
        logger.info("%s is not served: %s", checkpoint_id, refused.message)


def ring_doorbell(*, pool: str) -> None:
    """Put one doorbell into the pool's queue unless it holds one; in a pool without a worker they would pile up.

    The message does not expire: only a consumer would notice the expiry, and it must wake the next consumer anyway.
    """
    queue = f"train.{pool}"
    with current_app.producer_or_acquire() as producer:
        if not producer.channel.queue_declare(queue).message_count:
            current_app.send_task(
                "train.wake", kwargs={"pool": pool}, queue=queue, ignore_result=True, producer=producer
            )
