"""The worker of batches. It sends requests to the gateway and records each answer once.

One worker runs at a time. Its threads only send; only the main thread reads and writes rows. A request whose answer was
not recorded stays pending. It is sent again under the same id, which is charged once.
"""

import datetime
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager

import msgspec
from celery.exceptions import SoftTimeLimitExceeded
from django.db import connection, transaction
from django.db.models import F, Q

from apps.accounts.login.key_operations import issue_member_token
from apps.accounts.models import Organization
from apps.accounts.queries import RegionRefused, find_actor
from apps.batches.endings import announce_end, finish
from apps.batches.gateway import TOO_SLOW_CODE, GatewayReply, ask
from apps.batches.lifecycle import ACTIVE, BATCH_TRANSITIONS, BatchStatus, RequestStatus
from apps.batches.models import Batch, BatchRequest
from apps.batches.queries import WORK_LOCK
from apps.batches.signatures import BUSY_CODE
from apps.batches.validation import BadLine, validate
from apps.contracts.struct import prepare_types
from apps.core.database.clock import db_now
from apps.core.database.transitions import try_advance
from apps.core.errors import DomainError
from apps.core.objects.store import ObjectMissing
from apps.datasets.intake.versions import storage_left

MAX_IN_FLIGHT = 16
MAX_IN_FLIGHT_OF_ORGANIZATION = 4  # and of those that share with it
KEPT_FOR_NEWCOMERS = 4  # places for share holders with no request in progress, one for each
MAX_RESULT_BYTES = 1024**3  # of a batch's answers
WORK_SECONDS = 1200.0  # then the requests in progress end, and the next task goes on
MAX_FAILURES = 5
_FINAL = ("price_not_set", TOO_SLOW_CODE)  # another attempt would end alike
MAX_FAULTS = 10  # of a batch that makes no progress, over nine hours
_POLL_SECONDS = 1.0
_EARLY_SECONDS = 20.0  # between two validations that only tell customers earlier what is wrong
_PAUSE_SECONDS = 2.0  # of a batch whose request the gateway could not take now
_KEY_LIFETIME = datetime.timedelta(minutes=30)  # longer than a task sends
_SUSPENDED = {"code": "insufficient_permissions", "message": "The organization is suspended."}
_TOO_LARGE = {"code": "output_too_large", "message": "The answers of the batch exceed 1 GiB or the storage left."}
_FAULTY = {"code": "internal_error", "message": "The batch failed because of an error of ours."}
_GONE = {"code": "invalid_api_key", "message": "The key or member that created the batch may no longer send requests."}
_secrets: dict[str, tuple[str, datetime.datetime]] = {}  # of the keys by batch, and how long each is used


logger = logging.getLogger(__name__)


class _ReplyUsageDetails(msgspec.Struct):
    cached_tokens: int | None = 0


class _ReplyUsage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _ReplyUsageDetails | None = None


class _ReplyWithUsage(msgspec.Struct):
    usage: _ReplyUsage | None = None


def work(*, seconds: float = WORK_SECONDS) -> int:
    """Work on batches until none is left or the time is up; return how many requests got an answer.

    Does nothing while another worker is at work.
    """
    with _alone() as is_alone:
        return _Worker(time.monotonic() + seconds).run() if is_alone else 0


@contextmanager
def _alone() -> Iterator[bool]:
    """Hold a lock of the database session, which ends with the process."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_lock(hashtextextended(%s, 0))", [WORK_LOCK])
        is_alone = bool(cursor.fetchone()[0])
        try:
            yield is_alone
        finally:
            if is_alone:
                cursor.execute("SELECT pg_advisory_unlock(hashtextextended(%s, 0))", [WORK_LOCK])


class _Worker:
    def __init__(self, ends_at: float) -> None:
        self._ends_at = ends_at
        self._open: dict[Future[GatewayReply], BatchRequest] = {}
        self._holders: dict[str, str] = {}  # organization -> its share holder
        self._paused: dict[str, float] = {}  # batch -> when it may go on
        self._most_bytes: dict[str, int] = {}  # of answers, by batch
        self._recorded = 0
        self._early: set[str] = set()  # files to validate of those who have a batch at work
        self._early_at = 0.0  # when the next of them may be validated

    def run(self) -> int:
        prepare_types()
        with ThreadPoolExecutor(MAX_IN_FLIGHT) as pool:
            while True:
                batches = self._current_batches() if time.monotonic() < self._ends_at else []
                has_validated = False
                for batch in batches:
                    if batch.status == BatchStatus.VALIDATING:
                        if has_validated:
                            continue  # others' answers are recorded first
                        has_validated = True
                        if batch.pk in self._early:
                            self._early_at = time.monotonic() + _EARLY_SECONDS
                    _guarded(batch.pk, self._advance, batch, pool)
                if not self._open:
                    if not batches:
                        return self._recorded
                    if all(batch.pk in self._paused for batch in batches):
                        time.sleep(_POLL_SECONDS)
                    continue
                done, _ = wait(self._open, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED)
                for future in done:
                    request = self._open.pop(future)
                    _guarded(request.batch_id, self._record, request, future)

    def _current_batches(self) -> list[Batch]:
        """Return the next active batch of each share holder in each status; a cancelled one waits for its requests.

        Those with the fewest requests in progress come first. Last, and only now and then, come files to validate of
        those who have a batch at work: they only learn earlier what is wrong.
        """
        is_due = Q(retry_at=None) | Q(retry_at__lte=db_now())
        active = Batch.objects.filter(is_due, status__in=ACTIVE).select_related("input_file", "organization")
        asked = {request.batch_id for request in self._open.values()}
        free = active.exclude(status=BatchStatus.CANCELLING, pk__in=asked)
        # A run of an eval takes minutes and its owner waits; a file of requests may take a day.
        in_turn = free.annotate(is_own=Q(eval_run=""), holder=Organization.share_holder_by("organization__"))
        next_ones = list(
            in_turn.order_by("holder", "status", "is_own", "created_at", "pk").distinct("holder", "status")
        )
        self._holders |= {batch.organization_id: batch.holder for batch in next_ones}
        in_flight = Counter(self._holder_of(request.organization_id) for request in self._open.values())
        at_work = {batch.holder for batch in next_ones if batch.status == BatchStatus.IN_PROGRESS}

        def is_early(batch: Batch) -> bool:
            is_file = batch.status == BatchStatus.VALIDATING and not batch.eval_run
            return is_file and self._holder_of(batch.organization_id) in at_work

        def place(batch: Batch) -> tuple[bool, int, datetime.datetime]:
            return batch.pk in self._early, in_flight[self._holder_of(batch.organization_id)], batch.created_at

        self._early = {batch.pk for batch in next_ones if is_early(batch)}
        has_time = time.monotonic() >= self._early_at
        return sorted((batch for batch in next_ones if has_time or batch.pk not in self._early), key=place)

    def _holder_of(self, organization_id: str) -> str:
        return self._holders.get(organization_id, organization_id)

    def _advance(self, batch: Batch, pool: ThreadPoolExecutor) -> None:
        now = db_now()
        mine = [request.pk for request in self._open.values() if request.batch_id == batch.pk]
        is_late = now >= batch.expires_at and not batch.stop  # a stopped batch ends by the last branches
        if batch.status in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS) and is_late:
            if not mine:
                finish(batch=batch, to=BatchStatus.EXPIRED, now=now)
        elif batch.status == BatchStatus.VALIDATING:
            validate(batch=batch, now=now)
        elif batch.status == BatchStatus.CANCELLING:
            if not mine:
                finish(batch=batch, to=BatchStatus.CANCELLED, now=now)
        elif batch.status == BatchStatus.FINALIZING:
            finish(batch=batch, to=BatchStatus.COMPLETED, now=now)
        elif not mine and (batch.stop or not self._begin_requests(batch, pool, mine)):
            try_advance(batch, to=BatchStatus.FINALIZING, transitions=BATCH_TRANSITIONS, finalizing_at=now, faults=0)
        elif mine and not batch.stop:
            self._begin_requests(batch, pool, mine)

    def _begin_requests(self, batch: Batch, pool: ThreadPoolExecutor, mine: list[str]) -> bool:
        """Send further requests of the batch; return whether some are pending."""
        if self._paused.get(batch.pk, 0) > time.monotonic():
            return True
        self._paused.pop(batch.pk, None)
        room = self._room_of(batch.organization_id)
        if room <= 0:
            return True
        pending = BatchRequest.objects.filter(batch=batch, status=RequestStatus.PENDING).exclude(pk__in=mine)
        requests = list(pending.order_by("line")[:room])
        if not requests:
            return False
        if batch.result_bytes >= self._most_bytes_of(batch):
            _stop(batch.pk, _TOO_LARGE)
            return True
        is_suspended = batch.organization.suspended_at is not None
        secret = None if is_suspended else self._secret_of(batch)
        if secret is None:
            _stop(batch.pk, _SUSPENDED if is_suspended else _GONE)
            return True
        key_id = batch.created_by if batch.created_by.startswith("key_") else ""
        for request in requests:
            sent = pool.submit(
                ask,
                request=request,
                endpoint=batch.endpoint,
                input_key=batch.input_file.object_key,
                secret=secret,
                key_id=key_id,
            )
            self._open[sent] = request
        return True

    def _room_of(self, organization_id: str) -> int:
        """Return how many requests the share holder may begin now.

        Even if others have slow requests, it may begin at least one.
        """
        holder = self._holder_of(organization_id)
        mine = sum(self._holder_of(request.organization_id) == holder for request in self._open.values())
        free = MAX_IN_FLIGHT - len(self._open)
        room = min(MAX_IN_FLIGHT_OF_ORGANIZATION - mine, free - KEPT_FOR_NEWCOMERS)
        return room if mine else max(room, min(free, 1))

    def _most_bytes_of(self, batch: Batch) -> int:
        if batch.pk not in self._most_bytes:
            try:
                left = storage_left(organization=batch.organization_id)
            except RegionRefused:  # the answers may not be stored any more: that stops the batch
                left = 0
            self._most_bytes[batch.pk] = MAX_RESULT_BYTES if left is None else min(left, MAX_RESULT_BYTES)
        return self._most_bytes[batch.pk]

    def _secret_of(self, batch: Batch) -> str | None:
        """Return a short-lived key in the name of the batch's creator; None if the creator may send no requests now."""
        now = db_now()
        creator = find_actor(organization=batch.organization_id, actor=batch.created_by, now=now)
        if creator is None:
            return None
        secret, used_until = _secrets.get(batch.pk, ("", now))
        if used_until <= now:
            try:
                issued = issue_member_token(
                    membership=creator, now=now, name=f"Requests of {batch.pk}", lifetime=_KEY_LIFETIME,
                    project_id=batch.project_id,
                )  # fmt: skip
            except DomainError:
                return None
            secret = issued.secret
            for old in [known for known, (_, until) in _secrets.items() if until <= now]:
                del _secrets[old]
            _secrets[batch.pk] = secret, now + _KEY_LIFETIME / 2
        return secret

    def _record(self, request: BatchRequest, sent: "Future[GatewayReply]") -> None:
        try:
            reply = sent.result()
        except (ObjectMissing, BadLine):
            reply = GatewayReply(
                status=400, body=b'{"error":{"code":"file_not_found","message":"The input file is gone."}}'
            )
        if reply.status == 200:
            self._save(request, reply, RequestStatus.COMPLETED)
        elif reply.status in (401, 403) or (reply.status == 429 and reply.error_code != "rate_limit_exceeded"):
            error = msgspec.json.decode(reply.body).get("error") or {}
            _stop(request.batch_id, {"code": str(error.get("code")), "message": str(error.get("message"))[:500]})
        elif reply.status in (0, 429) or reply.error_code == BUSY_CODE:
            self._paused[request.batch_id] = time.monotonic() + _PAUSE_SECONDS
        elif reply.status >= 500 and reply.error_code not in _FINAL and request.failures + 1 < MAX_FAILURES:
            BatchRequest.objects.filter(pk=request.pk).update(failures=F("failures") + 1)
            self._paused[request.batch_id] = time.monotonic() + _PAUSE_SECONDS
        else:
            self._save(request, reply, RequestStatus.FAILED)

    @transaction.atomic
    def _save(self, request: BatchRequest, reply: GatewayReply, status: RequestStatus) -> None:
        """Record the reply and count it, unless the request has one."""
        response = {"status_code": reply.status, "request_id": reply.request_id, "body": msgspec.Raw(reply.body)}
        result = {"id": request.pk, "custom_id": request.custom_id, "response": response, "error": None}
        line = msgspec.json.encode(result)
        open_request = BatchRequest.objects.filter(pk=request.pk, status=RequestStatus.PENDING)
        if not open_request.update(status=status, result=line.decode()):
            return
        counted = {status.value: F(status.value) + 1, "result_bytes": F("result_bytes") + len(line), "faults": 0}
        if status is RequestStatus.COMPLETED:
            usage = msgspec.json.decode(reply.body, type=_ReplyWithUsage).usage or _ReplyUsage()
            details = usage.prompt_tokens_details or _ReplyUsageDetails()
            counted |= {
                "input_tokens": F("input_tokens") + usage.prompt_tokens,
                "cached_tokens": F("cached_tokens") + (details.cached_tokens or 0),
                "output_tokens": F("output_tokens") + usage.completion_tokens,
            }
        Batch.objects.filter(pk=request.batch_id).update(**counted)
        self._recorded += 1


def _stop(batch_id: str, reason: dict[str, str]) -> None:
    """Send no more requests of the batch. The first reason counts."""
    Batch.objects.filter(pk=batch_id, stop__isnull=True).update(stop=reason)


def _guarded(batch_id: str, step: Callable[..., None], *args: object) -> None:
    """Do a step for one batch. An error sets that batch aside; the others continue."""
    try:
        step(*args)
    except SoftTimeLimitExceeded:
        raise
    except Exception:
        logger.exception("%s is set aside", batch_id)
        _set_aside(batch_id)


@transaction.atomic
def _set_aside(batch_id: str) -> None:
    """Leave the batch out for a while, longer each time. After MAX_FAULTS it ends; recorded answers are kept first."""
    batch, now = Batch.objects.select_for_update().get(pk=batch_id), db_now()
    if batch.retry_at is not None and batch.retry_at > now:
        return  # requests that were in progress together count once
    if batch.faults + 1 < MAX_FAULTS:
        batch.retry_at, batch.faults = now + datetime.timedelta(minutes=2**batch.faults), batch.faults + 1
        batch.save(update_fields=["retry_at", "faults"])
    elif batch.status == BatchStatus.IN_PROGRESS:
        _stop(batch_id, _FAULTY)
    else:
        errors = [_FAULTY | {"line": None, "param": None}]
        to = BatchStatus.FAILED
        if try_advance(batch, to=to, transitions=BATCH_TRANSITIONS, errors=errors, failed_at=now):
            BatchRequest.objects.filter(batch=batch).delete()
            announce_end(batch=batch, status=to)
