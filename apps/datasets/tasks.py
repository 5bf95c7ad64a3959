"""Outbox and Celery tasks on files. Those of the outbox may take long."""

import math
import time

from celery import shared_task

from apps.catalog.models import BaseModel
from apps.catalog.queries import list_base_models
from apps.core.database.clock import db_now
from apps.core.errors import DomainError
from apps.datasets import operations
from apps.datasets.inspection import changes, comparisons, inspections
from apps.datasets.intake import orphans, uploads
from apps.datasets.intake.lanes import SMALL_SECONDS, TakesLong
from apps.datasets.lifecycle import UNVALIDATED, DatasetVersionStatus
from apps.datasets.models import DatasetVersion
from apps.datasets.validation import leases


def inspect(version_id: str) -> None:
    """Inspect a file's rows for copies and personal data, unless that is done or the file is gone."""
    version = DatasetVersion.objects.filter(pk=version_id, status=DatasetVersionStatus.READY).first()
    if version:
        inspections.inspect_version(version=version)


def compare(version_id: str, other_id: str) -> None:
    """Find the rows of a file that repeat its validation file, unless that is done or a file is gone."""
    found = DatasetVersion.objects.in_bulk([version_id, other_id])
    if len(found) == 2:
        comparisons.compare_versions(version=found[version_id], other=found[other_id])


def compare_rows(version_id: str, since_id: str) -> None:
    """Find the rows that differ between two versions of a dataset, unless one is gone or is being validated."""
    found = DatasetVersion.objects.exclude(status__in=(*UNVALIDATED, DatasetVersionStatus.DELETED))
    pair = found.in_bulk([version_id, since_id])
    if len(pair) == 2:
        changes.store_changes(version=pair[version_id], since=pair[since_id])


def count(version_id: str, base_model_id: str) -> None:
    """Count a file's tokens under one model, unless they are counted or the file is gone."""
    version = DatasetVersion.objects.filter(pk=version_id, status=DatasetVersionStatus.READY).first()
    if version:
        _count_if_possible(version, BaseModel.objects.get(pk=base_model_id))


def validate(version_id: str, *, is_long: bool = False) -> None:
    """Validate a file and count its tokens for each installed model, so that pages and quotes need not wait.

    Counts that take longer than a second together, and those of a large file, are separate messages, which wait for
    other turns. So is the validation of a small file that takes long. Raises HeldByAnother.
    """
    try:
        version = leases.validate_version(version_id=version_id, now=db_now(), is_long=is_long)
    except TakesLong:
        return
    if version is None:
        leases.require_done(version_id=version_id)
        return
    if version.status == DatasetVersionStatus.READY:
        until = time.process_time() + SMALL_SECONDS
        for base_model in list_base_models(only_installed=True):
            try:
                if not operations.is_counted_at_once(version):
                    raise TakesLong
                _count_if_possible(version, base_model, until=until)
            except TakesLong:
                operations.request_count(version=version, base_model=base_model)
        inspections.request_inspection(version=version)
    leases.announce(version=version)


def _count_if_possible(version: DatasetVersion, base_model: BaseModel, *, until: float = math.inf) -> None:
    try:
        operations.count_tokens(version=version, base_model=base_model, until=until)
    except DomainError:
        return  # this model cannot render the file; a customer who chooses it sees the reason


@shared_task(name="datasets.expire_uploads", ignore_result=True)
def expire_uploads() -> None:
    uploads.expire_uploads(now=db_now())


# Acknowledged at once: the sweep of the next day deletes what is left.
@shared_task(
    name="datasets.sweep_orphans", acks_late=False, ignore_result=True, soft_time_limit=3_540, time_limit=3_600
)
def sweep_orphans() -> None:
    orphans.sweep_orphans(now=db_now())


@shared_task(name="datasets.delete_expired", ignore_result=True)
def delete_expired() -> None:
    operations.delete_expired(now=db_now())
