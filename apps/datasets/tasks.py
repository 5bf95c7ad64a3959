"""Celery tasks of datasets: the row says what is to be done, a message only when."""

from typing import Any

from celery import shared_task

from apps.catalog.models import BaseModel
from apps.catalog.queries import list_base_models
from apps.core.clock import db_now
from apps.core.errors import DomainError
from apps.datasets import comparing, inspecting, operations, queries, sweeping, uploads, validating
from apps.datasets.models import DatasetVersion

# Long work has a queue and a worker of its own (apps/config/celery.py). Its message is acknowledged at once: a lost
# validation is found by its lease, a lost count is asked for again by whoever needs it.
_LONG = {"acks_late": False, "ignore_result": True, "soft_time_limit": 3_540, "time_limit": 3_600}


def request_validation(*, key: str, payload: dict[str, Any]) -> None:
    """Outbox handler of `dataset.validate`."""
    validate.delay(payload["version_id"])


def request_count(*, key: str, payload: dict[str, Any]) -> None:
    """Outbox handler of `dataset.count`."""
    count.delay(payload["version_id"], payload["base_model_id"])


def request_inspection(*, key: str, payload: dict[str, Any]) -> None:
    """Outbox handler of `dataset.inspect`."""
    inspect.delay(payload["version_id"])


@shared_task(name="datasets.inspect", **_LONG)
def inspect(version_id: str) -> None:
    """Look through a file's rows for copies and personal data, unless that is done or the file is gone."""
    version = DatasetVersion.objects.filter(pk=version_id, status="ready").first()
    if version:
        inspecting.inspect_version(version=version)


def request_comparison(*, key: str, payload: dict[str, Any]) -> None:
    """Outbox handler of `dataset.compare`."""
    compare.delay(payload["version_id"], payload["other_id"])


@shared_task(name="datasets.compare", **_LONG)
def compare(version_id: str, other_id: str) -> None:
    """Find the rows of a file that repeat its validation file, unless that is done or one of them is gone."""
    found = DatasetVersion.objects.in_bulk([version_id, other_id])
    if len(found) == 2:
        comparing.compare_versions(version=found[version_id], other=found[other_id])


@shared_task(name="datasets.count", **_LONG)
def count(version_id: str, base_model_id: str) -> None:
    """Count a file's tokens under one model, unless they are counted or the file is gone."""
    version = DatasetVersion.objects.filter(pk=version_id, status="ready").first()
    if version:
        _count_if_possible(version, BaseModel.objects.get(pk=base_model_id))


@shared_task(name="datasets.validate", **_LONG)
def validate(version_id: str) -> None:
    """Validate a file and count its tokens for each installed model, so that pages and quotes need not wait.

    The count of a large file is a task of its own, behind the validations that wait already.
    """
    version = validating.validate_version(version_id=version_id, now=db_now())
    if version is None or version.status != "ready":
        return
    for base_model in list_base_models(only_installed=True):
        if version.bytes > operations.COUNT_NOW_BYTES:
            operations.request_count(version=version, base_model=base_model)
        else:
            _count_if_possible(version, base_model)
    inspecting.request_inspection(version=version)


def _count_if_possible(version: DatasetVersion, base_model: BaseModel) -> None:
    try:
        operations.count_tokens(version=version, base_model=base_model)
    except DomainError:
        return  # this model cannot render the file; whoever chooses it is told why


@shared_task(name="datasets.validate_waiting", ignore_result=True)
def validate_waiting() -> None:
    """Ask again for validations whose message or worker was lost."""
    for version_id in queries.list_waiting(now=db_now()):
        validate.delay(version_id)


@shared_task(name="datasets.expire_uploads", ignore_result=True)
def expire_uploads() -> None:
    uploads.expire_uploads(now=db_now())


@shared_task(name="datasets.sweep_orphans", **_LONG)
def sweep_orphans() -> None:
    sweeping.sweep_orphans(now=db_now())


@shared_task(name="datasets.delete_expired", ignore_result=True)
def delete_expired() -> None:
    operations.delete_expired(now=db_now())
