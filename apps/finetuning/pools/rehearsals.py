"""Requests for rehearsed memory: asked by the wizard and at admission, handed to idle workers, and answered by them.

The figures are shared by all organizations and hold no customer's data. A worker is not trusted: it can only answer
the request that it took, once, with a figure near the formula's.
"""

import datetime
import hashlib
import logging

import msgspec
from django.db import transaction
from django.db.models import F, Q

from apps.accounts.models import Organization, key_of
from apps.contracts.runs import MemoryReport, MemoryRequest
from apps.contracts.worker_api import RehearsalReport, RehearsalRequest
from apps.core.database import locks
from apps.core.database.clock import db_now
from apps.core.errors import InvalidValue, NotFound, PermissionDenied
from apps.core.messages import outbox
from apps.finetuning.models import GpuPool, MemoryRehearsal, Worker, WorkerKind
from apps.finetuning.quotes.pool_facts import LIVE_SECONDS
from apps.finetuning.quotes.rehearsals import KEPT, QuotedRehearsal

logger = logging.getLogger(__name__)

_MAX_OPEN_OF_ONE, _MAX_OPEN = 3, 100
_OPEN = datetime.timedelta(hours=1)
_PATIENCE = datetime.timedelta(minutes=2)  # a request that no worker took by then is not waited for
_TAKEN = datetime.timedelta(minutes=6)  # a worker ends a rehearsal after five
_MAX_TRIES = 3
_MAX_RATIO = 3.0  # between a report and the formula


@transaction.atomic
def ask(*, organization: Organization | str, rehearsal: QuotedRehearsal, pool: GpuPool, now: datetime.datetime) -> bool:
    """Ask the workers for the figure, if it is neither known nor asked for; return whether one will come.

    None will come while no trainer is free for it, or if it could not be traced. An organization has at most three open
    requests.
    """
    seen = now - datetime.timedelta(seconds=LIVE_SECONDS)
    trainers = Worker.objects.filter(kind=WorkerKind.TRAINER, revoked_at=None, last_seen_at__gte=seen)
    if not trainers.filter(cordoned_at=None, drain_requested_at=None).exists():
        return False
    locks.lock("memory-rehearsals")
    own = MemoryRehearsal.objects.filter(pk=rehearsal.digest)
    is_soon = _is_open(now) & (Q(asked_at__gte=now - _PATIENCE) | Q(taken_at__gte=now - _TAKEN))
    if own.filter(is_soon | Q(reported_at__gte=now - KEPT)).exists():
        return True
    if own.filter(reported_at=None, asked_at__gte=now - _OPEN).exists():  # every try failed, or all trainers are busy
        return False
    asker = hashlib.sha256(key_of(organization).encode()).hexdigest()
    waiting = MemoryRehearsal.objects.filter(_is_open(now))
    if waiting.filter(asker_sha256=asker).count() >= _MAX_OPEN_OF_ONE or waiting.count() >= _MAX_OPEN:
        return False
    values = {"request": msgspec.to_builtins(rehearsal.request), "computed_bytes": rehearsal.computed_bytes}
    fresh = {"worker": None, "taken_at": None, "tries": 0, "report": None, "reported_at": None, "asked_at": now}
    MemoryRehearsal.objects.update_or_create(pk=rehearsal.digest, defaults=values | fresh | {"asker_sha256": asker})
    key = f"rehearse:{rehearsal.digest}:{now.timestamp():.0f}"
    outbox.publish(topic="train.wake", key=key, payload={"pool": pool.name}, organization=key_of(organization))
    return True


@transaction.atomic
def take(*, worker: Worker) -> RehearsalRequest | None:
    """Give the worker the oldest open request that no other one has; return None if there is none."""
    now = db_now()
    if worker.kind != WorkerKind.TRAINER or worker.cordoned_at or worker.drain_requested_at:
        return None
    is_free = Q(taken_at=None) | Q(taken_at__lt=now - _TAKEN)
    waiting = MemoryRehearsal.objects.filter(_is_open(now), is_free).order_by("asked_at")
    row = waiting.select_for_update(skip_locked=True).first()
    if row is None:
        return None
    MemoryRehearsal.objects.filter(pk=row.pk).update(worker=worker, taken_at=now, tries=F("tries") + 1)
    return RehearsalRequest(digest=row.pk, memory=msgspec.convert(row.request, MemoryRequest))


@transaction.atomic
def record(*, worker: Worker, report: RehearsalReport) -> None:
    """Store the report of the request that the worker took; without a figure, give the request back.

    Raises PermissionDenied for another kind of worker, NotFound for a digest that it did not take or has reported, and
    InvalidValue for a figure that cannot be true.
    """
    if worker.kind != WorkerKind.TRAINER:
        raise PermissionDenied("A trainer rehearses; a replica does not.")
    taken = MemoryRehearsal.objects.filter(pk=report.digest, worker=worker, reported_at=None, taken_at__isnull=False)
    row = taken.select_for_update().first()
    if row is None:
        raise NotFound("This worker has no open rehearsal of this digest.", param="digest")
    if report.memory is None:
        logger.info("%s could not rehearse %s: %s", worker.pk, row.pk[:12], report.error)
        taken.update(worker=None, taken_at=None)
        return
    _check(report.memory, computed_bytes=row.computed_bytes)
    taken.update(report=msgspec.to_builtins(report.memory), reported_at=db_now())


def sweep_rehearsals(*, now: datetime.datetime) -> None:
    """Delete requests and figures that are too old to be used."""
    MemoryRehearsal.objects.filter(asked_at__lt=now - KEPT - _OPEN).delete()


def _is_open(now: datetime.datetime) -> Q:
    return Q(reported_at=None, asked_at__gte=now - _OPEN, tries__lt=_MAX_TRIES) | Q(
        reported_at=None, tries=_MAX_TRIES, taken_at__gte=now - _TAKEN
    )


def _check(memory: MemoryReport, *, computed_bytes: int) -> None:
    ratio = memory.allocated_bytes / max(1, computed_bytes)
    if not 1 / _MAX_RATIO <= ratio <= _MAX_RATIO:
        message = f"allocated_bytes is {ratio:.2f} times the formula's figure, which is not believed."
        raise InvalidValue(message, param="memory.allocated_bytes")
    if memory.resting_bytes > memory.allocated_bytes:
        raise InvalidValue("resting_bytes is part of allocated_bytes.", param="memory.resting_bytes")
