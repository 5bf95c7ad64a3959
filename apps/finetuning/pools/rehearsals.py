"""Requests for rehearsed memory: asked by the wizard and at admission, handed to idle workers, and answered by them.

The figures are shared by all organizations and hold no customer's data. A worker is not trusted: it can only answer
the request that it took, once. Its figure counts if it agrees with the formula or with another worker's.
"""

import datetime
import hashlib
import logging

import msgspec
from django.db import transaction
from django.db.models import F, Func, IntegerField, OuterRef, Q, Subquery, Sum
from django.db.models.lookups import LessThan

from apps.accounts.models import Organization, key_of
from apps.accounts.shares import get_share_holder
from apps.contracts.runs import MemoryReport, MemoryRequest
from apps.contracts.worker_api import RehearsalReport, RehearsalRequest
from apps.core.database import locks
from apps.core.database.clock import db_now
from apps.core.errors import InvalidValue, NotFound, PermissionDenied
from apps.core.messages import outbox
from apps.finetuning.models import GpuPool, MemoryRehearsal, Worker, WorkerKind
from apps.finetuning.quotes.pool_facts import live_worker_filter
from apps.finetuning.quotes.rehearsals import KEPT, QuotedRehearsal, reported_peak

logger = logging.getLogger(__name__)

_MAX_OPEN_OF_ONE, _MAX_OPEN = 3, 100
_OPEN = datetime.timedelta(hours=1)
_PATIENCE = datetime.timedelta(minutes=2)  # a request that no worker took by then is not waited for
_TAKEN = datetime.timedelta(minutes=6)  # a worker ends a rehearsal after five
_MAX_ANSWERS, _MAX_TAKES = 3, 10
_MAX_RATIO = 3.0  # between a report and the formula
_FORMULA_TOLERANCE = 0.08  # how far the formula may be from a rehearsal: make bench-rehearsal, formula_worst_ape
_WORKERS_TOLERANCE = 0.01  # between two workers, whose versions of torch may differ


@transaction.atomic
def ask(*, organization: Organization | str, rehearsal: QuotedRehearsal, pool: GpuPool, now: datetime.datetime) -> bool:
    """Ask the workers for the figure, if it is neither known nor asked for; return whether one will come.

    None will come while no trainer is free for it, or after three answers that were all rejected. Organizations
    that share have at most three open requests together.
    """
    own = MemoryRehearsal.objects.filter(pk=rehearsal.digest)
    open_answers = own.filter(asked_at__gte=now - _OPEN).values_list("answers", flat=True)
    answered = [answer["worker"] for answers in open_answers for answer in answers]
    if not Worker.objects.filter(live_worker_filter(now)).exclude(pk__in=answered).exists():
        return False
    locks.lock("memory-rehearsals")
    is_soon = _is_open(now) & (Q(asked_at__gte=now - _PATIENCE) | Q(taken_at__gte=now - _TAKEN))
    if own.filter(is_soon | Q(reported_at__gte=now - KEPT)).exists():
        return True
    if own.filter(reported_at=None, asked_at__gte=now - _OPEN).exists():  # every try failed, or all trainers are busy
        return False
    asker = hashlib.sha256(get_share_holder(organization=organization).encode()).hexdigest()
    waiting = MemoryRehearsal.objects.filter(_is_open(now))
    if waiting.filter(asker_sha256=asker).count() >= _MAX_OPEN_OF_ONE or waiting.count() >= _MAX_OPEN:
        return False
    values = {"request": msgspec.to_builtins(rehearsal.request), "computed_bytes": rehearsal.computed_bytes}
    fresh: dict[str, object] = {
        "worker": None,
        "taken_at": None,
        "takes": 0,
        "answers": [],
        "report": None,
        "reported_at": None,
    }
    defaults = values | fresh | {"asked_at": now, "asker_sha256": asker}
    MemoryRehearsal.objects.update_or_create(pk=rehearsal.digest, defaults=defaults)
    key = f"rehearse:{rehearsal.digest}:{now.timestamp():.0f}"
    outbox.publish(topic="train.wake", key=key, payload={"pool": pool.machines.name}, organization=key_of(organization))
    return True


@transaction.atomic
def take(*, worker: Worker) -> RehearsalRequest | None:
    """Give the worker an open request that no other one has and that it has not answered; None without one.

    Requests of those who had the fewest lately come first. A worker rehearses one job at a time. If it asks while it
    has one, it was restarted, and may take that one again.
    """
    now = db_now()
    if not worker.takes_work:
        return None
    is_free = Q(taken_at=None) | Q(taken_at__lt=now - _TAKEN) | Q(worker=worker)
    waiting = MemoryRehearsal.objects.filter(_is_open(now), is_free).exclude(answers__contains=[{"worker": worker.pk}])
    lately = MemoryRehearsal.objects.filter(asker_sha256=OuterRef("asker_sha256"), asked_at__gte=now - _OPEN)
    taken = lately.order_by().values("asker_sha256").annotate(total=Sum("takes")).values("total")
    in_turn = waiting.order_by(Subquery(taken), "asked_at")
    row = in_turn.select_for_update(skip_locked=True, of=("self",)).first()
    if row is None:
        return None
    MemoryRehearsal.objects.filter(pk=row.pk).update(worker=worker, taken_at=now, takes=F("takes") + 1)
    return RehearsalRequest(digest=row.pk, memory=msgspec.convert(row.request, MemoryRequest))


@transaction.atomic
def record(*, worker: Worker, report: RehearsalReport) -> None:
    """Store the answer to the request that the worker took. Its figure counts once it is believed.

    Without a figure and an error, the worker was interrupted, and the request is as it was. Until a figure is believed,
    up to three workers answer. Raises PermissionDenied for another kind of worker, NotFound for a digest that it did
    not take or has answered, and InvalidValue for a figure that cannot be true.
    """
    if worker.kind != WorkerKind.TRAINER:
        raise PermissionDenied("A trainer rehearses; a replica does not.")
    taken = MemoryRehearsal.objects.filter(pk=report.digest, worker=worker, reported_at=None, taken_at__isnull=False)
    row = taken.select_for_update().first()
    if row is None:
        raise NotFound("This worker has no open rehearsal of this digest.", param="digest")
    if report.memory is None and not report.error:
        taken.update(worker=None, taken_at=None)
        return
    if report.memory is not None:
        _check(report.memory, row)
        if _is_believed(report.memory, row):
            taken.update(report=msgspec.to_builtins(report.memory), reported_at=db_now())
            return
    logger.info("%s did not settle %s: %s", worker.pk, row.pk[:12], report.error or "another worker has to agree")
    answer = {"worker": worker.pk, "memory": msgspec.to_builtins(report.memory)}
    taken.update(worker=None, taken_at=None, answers=[*row.answers, answer])


def sweep_rehearsals(*, now: datetime.datetime) -> None:
    """Delete requests and figures that are too old to be used."""
    MemoryRehearsal.objects.filter(asked_at__lt=now - KEPT - _OPEN).delete()


def _is_open(now: datetime.datetime) -> Q:
    """Return the condition of a request that waits for an answer, or for one that is on its way."""
    may_be_taken = Q(LessThan(_ANSWERS, _MAX_ANSWERS), takes__lt=_MAX_TAKES)
    return Q(reported_at=None, asked_at__gte=now - _OPEN) & (may_be_taken | Q(taken_at__gte=now - _TAKEN))


_ANSWERS = Func("answers", function="jsonb_array_length", output_field=IntegerField())


def _check(report: MemoryReport, row: MemoryRehearsal) -> None:
    ratio = _peak(report, row) / max(1, row.computed_bytes)
    if not 1 / _MAX_RATIO <= ratio <= _MAX_RATIO:
        message = f"allocated_bytes makes {ratio:.2f} times the formula's peak, which is not believed."
        raise InvalidValue(message, param="memory.allocated_bytes")
    if report.resting_bytes > report.allocated_bytes:
        raise InvalidValue("resting_bytes is part of allocated_bytes.", param="memory.resting_bytes")


def _is_believed(report: MemoryReport, row: MemoryRehearsal) -> bool:
    """Return whether the figure agrees with the formula or with an earlier answer, which is another worker's."""
    peak = _peak(report, row)
    earlier = [msgspec.convert(answer["memory"], MemoryReport) for answer in row.answers if answer["memory"]]
    return _agree(peak, row.computed_bytes, _FORMULA_TOLERANCE) or any(
        _agree(peak, _peak(each, row), _WORKERS_TOLERANCE) for each in earlier
    )


def _peak(report: MemoryReport, row: MemoryRehearsal) -> int:
    return reported_peak(msgspec.convert(row.request, MemoryRequest), report)


def _agree(one: int, other: int, tolerance: float) -> bool:
    return abs(one - other) <= tolerance * other
