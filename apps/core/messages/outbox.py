"""Effects that must follow a commit. Each is a row written with the change and delivered afterwards at least once.

settings.OUTBOX_TOPICS names the task of each topic. A task is a function that takes the payload as keyword arguments.
It must be idempotent.

Each message is in a lane with its own worker (apps/config/celery.py), so slow effects do not delay urgent ones. Within
a lane, urgent messages go first; then organizations take turns. A thousand messages of one organization delay each
message of another by one. settings.OUTBOX_SHARES defines which organizations share one turn. Work on files of a
suspended organization waits until it is reinstated.

When the Celery task reaches its soft time limit, the current message is postponed and the delivery ends.

Tasks of the lane `control` take milliseconds and run in the transaction that marks them as sent. Tasks of other lanes
may take an hour, and may call other services. They run under a claim that is renewed while they run. An organization
has one claim in a lane at a time, so a lane with two workers always has one for the others. A lane in
settings.OUTBOX_MOST_AT_ONCE has a limited number of claims, so that it leaves workers for the lane beside it.
"""

import datetime
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from celery.exceptions import SoftTimeLimitExceeded
from django.conf import settings
from django.db import Error, connection, transaction
from django.db.models import Count, F, Max, Min, QuerySet, Window
from django.db.models.functions import Greatest, RowNumber
from django.utils.module_loading import import_string

from apps.core.audit import require_transaction
from apps.core.database.clock import db_now
from apps.core.database.locks import lock
from apps.core.database.tenancy import Keyed, id_of
from apps.core.messages import tracing
from apps.core.messages.topics import CONTROL
from apps.core.models import OutboxMessage

logger = logging.getLogger(__name__)

# After this many attempts, operators see the effect. It is retried every hour until an operator fixes the cause.
FAILING_ATTEMPTS = 8
KEPT = datetime.timedelta(days=7)  # for a sent message
CLAIM = datetime.timedelta(seconds=60)  # a worker that has not renewed its claim for this long has died
_RENEW_SECONDS = 15.0
_TURNS_KEPT = datetime.timedelta(minutes=10)  # an organization without a turn for longer is next
_PRUNED_AT_ONCE = 10_000
_BACKOFF_SECONDS = 2
_BACKOFF_LIMIT_SECONDS = 3600
_BACKOFF_DOUBLINGS = 12  # after these doublings the limit is reached
_MAX_COUNTED = 30_000  # the maximum of its column


def publish(
    *,
    topic: str,
    key: str,
    payload: Mapping[str, object],
    organization: Keyed | str | None = None,
    lane: str = "",
    not_before: datetime.datetime | None = None,
    traceparent: str | None = None,
) -> None:
    """Queue one effect with the current change. A repeated key is the same effect.

    The message waits for the turn of `organization`, in the topic's lane or in `lane`. The default organization is the
    one that the transaction acts for. The message continues the trace of `traceparent`, by default that of the present
    work.
    """
    require_transaction()
    if topic not in settings.OUTBOX_TOPICS:
        raise ValueError(f"no task for outbox topic {topic!r}")
    entry = settings.OUTBOX_TOPICS[topic]
    lane = lane or entry.lane
    message = OutboxMessage(topic=topic, key=key, payload=dict(payload), lane=lane, is_urgent=entry.is_urgent)
    message.traceparent = tracing.current() if traceparent is None else traceparent
    if organization is not None:
        message.share = id_of(organization)
    if not_before is not None:
        message.next_attempt_at = not_before
    OutboxMessage.objects.bulk_create([message], ignore_conflicts=True)
    transaction.on_commit(partial(wake, lane))


def wake(lane: str) -> None:
    """Have a worker deliver the lane now. If the broker is down, the periodic wake delivers instead."""
    import_string(settings.OUTBOX_WAKE)(lane)


def deliver_due(*, lane: str | None = None, limit: int = 100) -> int:
    """Deliver up to `limit` due messages of a lane, or of each lane; return how many were sent."""
    if lane is None:
        return sum(deliver_due(lane=each, limit=limit) for each in (CONTROL, *sorted(lanes())))
    deliver = _deliver if lane == CONTROL else _carry_out
    sent, tried = 0, set[int]()
    while sent < limit and (wanted := [pk for pk in _in_turn(lane, limit - sent) if pk not in tried]):
        for pk in wanted:
            tried.add(pk)
            sent += deliver(pk)
    return sent


def lanes() -> frozenset[str]:
    """Return the lanes other than `control`."""
    return frozenset(topic.lane for topic in settings.OUTBOX_TOPICS.values()) - {CONTROL}


def list_due_lanes() -> list[str]:
    """Return the lanes other than `control` that have due messages."""
    due = OutboxMessage.objects.filter(lane__in=lanes(), sent_at=None, next_attempt_at__lte=db_now())
    return list(due.order_by("lane").values_list("lane", flat=True).distinct())


def count_due(*, now: datetime.datetime) -> dict[str, tuple[int, datetime.datetime]]:
    """Return, for each lane with due messages, their number and since when the oldest is due.

    Messages that wait for a suspended organization do not count.
    """
    due = _without_suspended(OutboxMessage.objects.filter(sent_at=None, next_attempt_at__lte=now)).order_by()
    rows = due.values_list("lane").annotate(Count("pk"), Min("next_attempt_at"))
    return {lane: (count, oldest) for lane, count, oldest in rows}


def _without_suspended(due: QuerySet[OutboxMessage]) -> QuerySet[OutboxMessage]:
    waiting = [name for name, topic in settings.OUTBOX_TOPICS.items() if topic.waits_while_suspended]
    asked = due.filter(topic__in=waiting)
    suspended = import_string(settings.OUTBOX_SUSPENDED)(organizations=asked.values("share"))
    return due.exclude(topic__in=waiting, share__in=suspended)


def _in_turn(lane: str, limit: int) -> list[int]:
    """Return the next messages of share holders without a claim; none while all claims of the lane are in use.

    Urgent ones come first, then one of each share holder, starting with the one served longest ago.
    """
    due = OutboxMessage.objects.filter(lane=lane, sent_at=None, next_attempt_at__lte=db_now())
    if lane != CONTROL:
        if _is_full(lane):
            return []
        due = _without_suspended(due)
    turn = Window(RowNumber(), partition_by=[F("share"), F("is_urgent")], order_by="id")
    candidates = due.annotate(turn=turn).filter(turn__lte=limit)
    found = list(candidates.order_by("id").values_list("pk", "share", "is_urgent"))
    # Each organization's share holder, with other organizations that share a turn with one of them.
    shares = {share for _, share, _ in found}
    holders = {share: share for share in shares} | import_string(settings.OUTBOX_SHARES)(organizations=shares)
    served = OutboxMessage.objects.filter(lane=lane, share__in=holders, taken_at__gte=db_now() - _TURNS_KEPT)
    last: dict[str, datetime.datetime] = {}
    for share, taken_at in served.values_list("share").annotate(Max("taken_at")).order_by():
        last[holders[share]] = max(last.get(holders[share], taken_at), taken_at)
    claiming = {holders[share] for share in _claimed(lane).filter(share__in=holders).values_list("share", flat=True)}
    never = datetime.datetime.min.replace(tzinfo=datetime.UTC)
    turns = Counter[tuple[str, bool]]()
    ranks = []
    for pk, share, is_urgent in found:
        holder = holders[share]
        if holder in claiming:
            continue
        turns[holder, is_urgent] += 1
        ranks.append((not is_urgent, turns[holder, is_urgent], last.get(holder, never), pk))
    return [pk for *_, pk in sorted(ranks)[:limit]]


# --- short effects ----------------------------------------------------------------------------------------------------


def _deliver(pk: int) -> bool:
    """Deliver a message in the transaction that marks it; return whether it was sent."""
    with transaction.atomic():
        now = db_now()
        due = OutboxMessage.objects.filter(pk=pk, sent_at=None, next_attempt_at__lte=now)
        message = due.select_for_update(skip_locked=True).first()
        if message is None:
            return False
        message.attempts, message.taken_at = min(message.attempts + 1, _MAX_COUNTED), now
        overtime: SoftTimeLimitExceeded | None = None
        try:
            with transaction.atomic():
                _handle(message)
            message.sent_at = now
        except Exception as error:  # noqa: BLE001 - a process edge: the message stays and is retried later
            _put_off(message, error, now)
            overtime = error if isinstance(error, SoftTimeLimitExceeded) else None
        message.save(update_fields=["attempts", "taken_at", "sent_at", "next_attempt_at", "last_error"])
    if overtime:
        raise overtime
    return message.sent_at is not None


# --- long effects -----------------------------------------------------------------------------------------------------


def _carry_out(pk: int) -> bool:
    """Carry out a message under a claim; return whether it succeeded. If the worker dies, the message is due again."""
    message = _claim(pk)
    if message is None:
        return False
    mine = OutboxMessage.objects.filter(pk=pk, sent_at=None, attempts=message.attempts)
    try:
        with _beating(partial(_renew, mine), every_seconds=_RENEW_SECONDS):
            _handle(message)
    except Exception as error:  # a process edge: the message stays and is retried later
        _put_off(message, error, db_now())
        mine.update(next_attempt_at=message.next_attempt_at, last_error=message.last_error)
        if isinstance(error, SoftTimeLimitExceeded):
            raise
        return False
    return bool(mine.update(sent_at=db_now()))


def _claim(pk: int) -> OutboxMessage | None:
    """Return the message if it could be claimed; None otherwise.

    The claim gets longer with each attempt, so a message that kills its worker costs less over time.
    """
    with transaction.atomic():
        now = db_now()
        due = OutboxMessage.objects.filter(pk=pk, sent_at=None, next_attempt_at__lte=now)
        message = due.select_for_update(skip_locked=True).first()
        if message is None:
            return None
        lock(f"outbox:{message.lane}")  # two workers may have chosen messages of one organization
        sharing = import_string(settings.OUTBOX_SHARES)(organizations=[message.share])
        if _is_full(message.lane) or _claimed(message.lane).filter(share__in={message.share, *sharing}).exists():
            return None
        message.attempts, message.taken_at = min(message.attempts + 1, _MAX_COUNTED), now
        message.next_attempt_at = now + max(CLAIM, _backoff(message.attempts))
        message.last_error = ""
        message.save(update_fields=["attempts", "taken_at", "next_attempt_at", "last_error"])
        return message


def _is_full(lane: str) -> bool:
    most = settings.OUTBOX_MOST_AT_ONCE.get(lane)
    return most is not None and _claimed(lane).count() >= most


def _claimed(lane: str) -> QuerySet[OutboxMessage]:
    """Return the messages that a worker carries out now. A failed message waits and has its error."""
    unsent = OutboxMessage.objects.filter(lane=lane, sent_at=None)
    return unsent.filter(attempts__gt=0, last_error="", next_attempt_at__gt=db_now())


@contextmanager
def _beating(beat: Callable[[], object], *, every_seconds: float) -> Iterator[None]:
    """Call `beat` in a thread with its own database connection until the block ends.

    A beat that fails with a database error is repeated at the next interval.
    """
    is_done = threading.Event()

    def run() -> None:
        while not is_done.wait(every_seconds):
            try:
                beat()
            except Error as error:
                logger.warning("a heartbeat failed: %s", type(error).__name__)
            finally:
                connection.close()

    thread = threading.Thread(target=run, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()


def _renew(mine: QuerySet[OutboxMessage]) -> None:
    mine.update(next_attempt_at=Greatest(F("next_attempt_at"), db_now() + CLAIM))


# --- both -------------------------------------------------------------------------------------------------------------


def _handle(message: OutboxMessage) -> None:
    task = import_string(settings.OUTBOX_TOPICS[message.topic].task)
    attributes: tracing.Attributes = {
        "messaging.destination.name": message.topic,
        "messaging.message.id": str(message.pk),
        "anneal.outbox.lane": message.lane,
        "anneal.outbox.attempt": message.attempts,
        "anneal.organization.id": message.share if message.share.startswith("org_") else "",
    }
    parent = message.traceparent
    span = tracing.begin_child(f"process {message.topic}", parent=parent, attributes=attributes, takes_message=True)
    with tracing.working(span):
        task(**message.payload)


def _put_off(message: OutboxMessage, error: Exception, now: datetime.datetime) -> None:
    message.next_attempt_at = now + _backoff(message.attempts)
    message.last_error = f"{type(error).__name__}: {error}"[:500]
    # The error's text may quote an address or a link, so it stays in the table, for operators only.
    name = type(error).__name__
    logger.warning("outbox message %d (%s) failed %d times: %s", message.pk, message.topic, message.attempts, name)


def _backoff(attempts: int) -> datetime.timedelta:
    seconds = min(_BACKOFF_SECONDS ** min(attempts, _BACKOFF_DOUBLINGS), _BACKOFF_LIMIT_SECONDS)
    return datetime.timedelta(seconds=seconds)


def list_failing() -> list[OutboxMessage]:
    """Return the messages that failed at least FAILING_ATTEMPTS times, the oldest 50, oldest first."""
    stuck = OutboxMessage.objects.filter(sent_at=None, attempts__gte=FAILING_ATTEMPTS).order_by("id")
    return list(stuck[:50])


def prune(*, now: datetime.datetime) -> int:
    """Delete messages sent more than KEPT ago; return how many. A key used again after that is a new effect."""
    old = OutboxMessage.objects.filter(sent_at__lt=now - KEPT).order_by("id").values("pk")[:_PRUNED_AT_ONCE]
    return OutboxMessage.objects.filter(pk__in=old).delete()[0]
