"""Daily comparison of each engine's token counts with what the gateways metered, to 0.1 percent.

An engine counts its base model and all adapters together, so the metered side is the sum over these. A request that
runs during a reading is partly before and partly after it. So the metered amount is a range: tokens certainly between
two readings, and tokens possibly between them. A difference beyond the range and the tolerance alerts an operator.

Both sides come from the replica, which may count too much in both. So its output tokens are also compared with the
bytes of its answers that the gateways saw: a token is at least one byte, except for the few that no customer sees.
"""

import datetime
import logging
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from django.db import connection, transaction
from django.db.models import F
from django.db.models.functions import Greatest

from apps.contracts.serving import EngineCount
from apps.serving.models import EngineTokens, MeteringCheck, Replica

logger = logging.getLogger(__name__)

TOLERANCE = 0.001
MAX_STARTS_A_DAY = 100  # of a replica's engine: each keeps a row
_MARGIN = datetime.timedelta(seconds=2)  # between the clocks of readings and of requests
_ARRIVED = datetime.timedelta(hours=1)  # by then a day's usage is in the database, or its gateway is in trouble
_CHECKED_FOR = datetime.timedelta(days=3)  # late usage may settle a difference
# An engine continues for a step or two after its customer left; no gateway sees these tokens.
_UNSEEN_TOKENS = 8
# Special tokens and the marks around a call, which no customer sees.
_HIDDEN_TOKENS = 64

_METERED = """
    WITH answered AS (
        SELECT engine_input_tokens AS read, engine_output_tokens AS written, finish, output_bytes AS shown,
               occurred_at - latency_ms * interval '1 millisecond' >= %(first)s + %(margin)s::interval
                 AND occurred_at <= %(last)s - %(margin)s::interval AS is_inside
          FROM billing_usageevent
         WHERE replica_id = %(replica)s
           AND occurred_at BETWEEN %(first)s - %(margin)s::interval AND %(last)s + interval '1 day'
           AND occurred_at - latency_ms * interval '1 millisecond' <= %(last)s + %(margin)s::interval)
    SELECT coalesce(sum(read) FILTER (WHERE is_inside), 0), coalesce(sum(read), 0),
           coalesce(sum(written) FILTER (WHERE is_inside), 0),
           coalesce(sum(written + CASE finish WHEN 'aborted' THEN %(unseen)s ELSE 0 END), 0), count(*),
           coalesce(sum(greatest(0, written - shown - %(hidden)s)) FILTER (WHERE is_inside), 0)
      FROM answered
"""


# --- Readings ---------------------------------------------------------------------------------------------------------


def record_count(*, replica: Replica, engine_generation: str, counted: EngineCount, now: datetime.datetime) -> None:
    """Store the reading as the newest of its day; the first of a day also ends the day before.

    Further readings of a replica that reports more than MAX_STARTS_A_DAY starts are ignored on that day.
    """
    at = now - min(datetime.timedelta(seconds=max(0.0, counted.age_seconds)), _ARRIVED)
    newest = {
        "last_at": Greatest(F("last_at"), at),
        "last_input_tokens": Greatest(F("last_input_tokens"), counted.input_tokens),
        "last_output_tokens": Greatest(F("last_output_tokens"), counted.output_tokens),
    }
    days = EngineTokens.objects.filter(replica=replica, engine_generation=engine_generation)
    day = at.astimezone(datetime.UTC).date()
    if days.filter(day=day).update(**newest):
        return
    if EngineTokens.objects.filter(replica=replica, day=day).count() >= MAX_STARTS_A_DAY:
        logger.error("%s claims that its engine started more than %d times today", replica.pk, MAX_STARTS_A_DAY)
        return
    before = days.order_by("-day").first()
    if before is not None and before.day < day:
        days.filter(pk=before.pk).update(**newest)
    EngineTokens.objects.create(
        replica=replica,
        engine_generation=engine_generation,
        day=day,
        first_at=at,
        first_input_tokens=counted.input_tokens,
        first_output_tokens=counted.output_tokens,
        last_at=at,
        last_input_tokens=counted.input_tokens,
        last_output_tokens=counted.output_tokens,
    )


# --- Checks -----------------------------------------------------------------------------------------------------------


@dataclass
class _Sums:
    """Tokens of one replica's day; `least` and `most` bound the metered amount."""

    counted_input: int = 0
    counted_output: int = 0
    least_input: int = 0
    most_input: int = 0
    least_output: int = 0
    most_output: int = 0
    requests: int = 0
    unshown_output: int = 0

    def add(self, tokens: EngineTokens) -> None:
        """Add one start of the engine."""
        self.counted_input += tokens.last_input_tokens - tokens.first_input_tokens
        self.counted_output += tokens.last_output_tokens - tokens.first_output_tokens
        least_input, most_input, least_output, most_output, requests, unshown = _metered(tokens)
        self.least_input += least_input
        self.most_input += most_input
        self.least_output += least_output
        self.most_output += most_output
        self.requests += requests
        self.unshown_output += unshown

    @property
    def difference_share(self) -> float:
        """The distance of the count from the metered range, or its excess over the bytes seen, as a share of it."""
        return max(
            _outside(self.counted_input, self.least_input, self.most_input),
            _outside(self.counted_output, self.least_output, self.most_output),
            self.unshown_output / max(self.counted_output, self.least_output, 1),
        )


def reconcile(*, now: datetime.datetime) -> list[MeteringCheck]:
    """Check every finished day that has no passed check. Log each difference as critical every time."""
    today = now.astimezone(datetime.UTC).date()
    last = (now - _ARRIVED).astimezone(datetime.UTC).date() - datetime.timedelta(days=1)
    settled = set(MeteringCheck.objects.filter(is_within=True).values_list("replica_id", "day"))
    by_day: dict[tuple[str, datetime.date], list[EngineTokens]] = defaultdict(list)
    for tokens in EngineTokens.objects.filter(day__range=(today - _CHECKED_FOR, last)).order_by("day", "pk"):
        if (tokens.replica_id, tokens.day) not in settled:
            by_day[tokens.replica_id, tokens.day].append(tokens)
    return [_check(replica_id, day, starts, now) for (replica_id, day), starts in by_day.items()]


def list_checks(*, replica: Replica | None = None) -> list[MeteringCheck]:
    """Return the newest 14 checks of one replica or of all, those with a difference first."""
    found = MeteringCheck.objects.select_related("replica__base_model").order_by("is_within", "-day", "replica_id")
    return list((found.filter(replica=replica) if replica else found)[:14])


@transaction.atomic
def _check(
    replica_id: str, day: datetime.date, starts: Iterable[EngineTokens], now: datetime.datetime
) -> MeteringCheck:
    sums = _Sums()
    for tokens in starts:
        sums.add(tokens)
    check, _ = MeteringCheck.objects.update_or_create(
        replica_id=replica_id,
        day=day,
        defaults={
            "counted_input_tokens": sums.counted_input,
            "counted_output_tokens": sums.counted_output,
            "least_input_tokens": sums.least_input,
            "most_input_tokens": sums.most_input,
            "least_output_tokens": sums.least_output,
            "most_output_tokens": sums.most_output,
            "request_count": sums.requests,
            "difference_share": sums.difference_share,
            "is_within": sums.difference_share <= TOLERANCE,
            "checked_at": now,
        },
    )
    if not check.is_within:
        logger.critical(
            "metering of %s on %s differs by %.2f %%: %s", replica_id, day, 100 * sums.difference_share, sums
        )
    return check


def _metered(tokens: EngineTokens) -> tuple[int, int, int, int, int, int]:
    with connection.cursor() as cursor:
        cursor.execute(
            _METERED,
            {
                "replica": tokens.replica_id,
                "first": tokens.first_at,
                "last": tokens.last_at,
                "margin": f"{_MARGIN.total_seconds()} seconds",
                "unseen": _UNSEEN_TOKENS,
                "hidden": _HIDDEN_TOKENS,
            },
        )
        least_input, most_input, least_output, most_output, requests, unshown = cursor.fetchone()
    return int(least_input), int(most_input), int(least_output), int(most_output), requests, int(unshown)


def _outside(counted: int, least: int, most: int) -> float:
    gap = max(least - counted, counted - most, 0)
    return gap / max(counted, least, 1)
