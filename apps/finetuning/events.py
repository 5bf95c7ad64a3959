"""Job events, in order. A sequence is taken under the job's row lock, so readers never miss one.

Watchers get a Redis message after each commit. Losing one is harmless: the row is the truth, and they also read it
periodically.
"""

import logging
from functools import cache, partial

import redis
from django.conf import settings
from django.db import transaction
from psycopg.types.json import Jsonb

from apps.core.audit import require_transaction
from apps.core.database.prepared import fetch_prepared
from apps.core.ids import ulid_of
from apps.finetuning.models import FineTuningJob

_APPEND = """
    WITH numbered AS (
        UPDATE finetuning_finetuningjob SET last_event_sequence = last_event_sequence + 1
        WHERE id = %(job)s RETURNING last_event_sequence AS sequence
    )
    INSERT INTO finetuning_jobevent (organization_id, id, job_id, sequence, type, level, message, data)
    SELECT %(organization)s,
        concat(%(name)s::text, lpad(sequence::text, greatest(8, length(sequence::text)), '0')),
        %(job)s, sequence, %(type)s, %(level)s, %(message)s, %(data)s
    FROM numbered
    RETURNING sequence
"""
logger = logging.getLogger(__name__)


def append(job: FineTuningJob, *, message: str, type: str = "message", level: str = "info", **data: object) -> None:
    """Add one event to the job and notify its watchers after commit."""
    require_transaction()
    known = {
        "job": job.pk, "organization": job.organization_id, "name": f"ftevent-{ulid_of(job.pk)}-", "type": type,
        "level": level, "message": message[:1000], "data": Jsonb(data),
    }  # fmt: skip
    ((job.last_event_sequence,),) = fetch_prepared(_APPEND, known)
    transaction.on_commit(partial(_notify, job.pk, job.last_event_sequence))


def _notify(job_id: str, sequence: int) -> None:
    try:
        _client().publish(f"anneal:live:job:{job_id}", str(sequence))
    except redis.RedisError as error:
        logger.warning("live update of job %s not sent: %s", job_id, error)


@cache
def _client() -> redis.Redis:
    return redis.Redis.from_url(settings.REDIS_URL, socket_timeout=1, socket_connect_timeout=1)
