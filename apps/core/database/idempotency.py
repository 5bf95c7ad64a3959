"""One effect for each `Idempotency-Key`. The first request's answer is stored, and each repeat gets it.

The answer is saved in the transaction of its effects. An error rolls both back, so its key can be sent again.
"""

import datetime
import hashlib
from collections.abc import Callable

from django.db.models import Count, Sum
from django.db.models.functions import Length

from apps.core.audit import require_transaction
from apps.core.database.locks import try_lock
from apps.core.database.tenancy import Keyed, id_of
from apps.core.errors import DomainError, InvalidValue, QuotaExceeded, Status
from apps.core.models import IdempotentAnswer
from apps.core.secrets.sealing import place_of, seal, unseal

HEADER = "Idempotency-Key"
KEPT = datetime.timedelta(hours=24)
MAX_ANSWERS = 10_000  # of one organization
MAX_ANSWER_BYTES = 64 * 1024
MAX_KEPT_BYTES = 64 * 1024 * 1024  # of one organization's answers: no storage limit counts them
_PRUNED_AT_ONCE = 10_000


class IdempotencyKeyReused(DomainError):
    """The key was used before for another request."""

    code = "idempotency_key_reused"
    status = Status.UNPROCESSABLE


class IdempotencyInProgress(DomainError):
    """The first request with the key has not been answered yet."""

    code = "idempotency_in_progress"
    status = Status.CONFLICT
    is_retryable = True


def answer_once(
    *, organization: Keyed | str, key_id: str, key: str, request_sha256: str, answer: Callable[[], str]
) -> tuple[str, bool]:
    """Return the answer to the first request with this key of the API key `key_id`, and whether this is a repeat.

    `answer` answers a first request. Its writes are committed with the answer. The answer is stored encrypted, because
    it may hold a secret. Raises IdempotencyInProgress, IdempotencyKeyReused, QuotaExceeded, and InvalidValue if the
    answer is too long.
    """
    require_transaction()
    row_id = hashlib.sha256(f"{id_of(organization)} {key_id} {key}".encode()).hexdigest()
    place = place_of(table=IdempotentAnswer._meta.db_table, column="answer_sealed", row_id=row_id)
    if not try_lock(f"idempotency:{row_id}"):
        text = f"A request with this {HEADER} is in progress. Send it again in a second to get its answer."
        raise IdempotencyInProgress(text, param=HEADER)
    rows = IdempotentAnswer.objects.for_organization(organization)
    if found := rows.filter(pk=row_id).first():
        if found.request_sha256 != request_sha256:
            text = f"This {HEADER} was sent with another request. Use a new value for a new request."
            raise IdempotencyKeyReused(text, param=HEADER)
        return unseal(bytes(found.answer_sealed), place=place), True
    kept = rows.aggregate(count=Count("pk"), bytes=Sum(Length("answer_sealed"), default=0))
    if kept["count"] >= MAX_ANSWERS or kept["bytes"] >= MAX_KEPT_BYTES:
        text = (
            f"Your organization used {MAX_ANSWERS:,} values of {HEADER} in 24 hours, or their answers take "
            f"{MAX_KEPT_BYTES // 1024**2} MiB. Send the request without the header, or wait until older values expire."
        )
        raise QuotaExceeded(text, param=HEADER)
    given = answer()
    if len(given.encode()) > MAX_ANSWER_BYTES:
        text = f"The answer is longer than {MAX_ANSWER_BYTES // 1024} KiB. Send the request without {HEADER}."
        raise InvalidValue(text, param=HEADER)
    rows.create(
        pk=row_id,
        organization_id=id_of(organization),
        request_sha256=request_sha256,
        answer_sealed=seal(given, place=place),
    )
    return given, False


def prune_answers(*, now: datetime.datetime) -> int:
    """Delete answers that are older than KEPT; return how many.

    A key that is used again afterwards makes a new request.
    """
    old = IdempotentAnswer.objects.filter(created_at__lt=now - KEPT).order_by("created_at").values("pk")
    return IdempotentAnswer.objects.filter(pk__in=old[:_PRUNED_AT_ONCE]).delete()[0]
