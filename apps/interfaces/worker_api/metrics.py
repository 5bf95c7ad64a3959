"""The installation in Prometheus' text format: jobs, workers, messages, the books, and the inference of this hour.

Each figure comes from an index or from rows of one hour, because a monitor asks twice a minute.
"""

import datetime
from collections.abc import Iterable, Iterator
from itertools import accumulate

from django.db.models import Case, CharField, Count, F, Q, Value, When

from apps.batches.queries import oldest_pending
from apps.billing.books.reconciliation import LAST_CHECK, list_newest_checks
from apps.billing.models import UsageSeries
from apps.billing.usage.traffic import BOUNDS_MS, TrafficSum, sum_traffic
from apps.core.database.clock import db_now
from apps.core.messages.outbox import count_due, lanes, list_failing
from apps.core.messages.topics import CONTROL
from apps.finetuning.lifecycle import JOB_OPEN, RUN_TERMINAL
from apps.finetuning.models import FineTuningJob, Run, Worker, WorkerKind
from apps.finetuning.quotes.pool_facts import live_worker_filter
from apps.serving.metrics import Sample, format_series

_HOUR = datetime.timedelta(hours=1)
_WORKER_STATES = ("live", "cordoned", "silent")
_ENDS = ("answered", "aborted", "rate_limited", "over_quota", "not_found", "invalid", "failed")


def render_installation_metrics() -> str:
    """Return the series of the control plane."""
    now = db_now()
    return "".join((*_work(now), *_messages(now), *_batches(now), *_books(now), *_inference(now)))


def _work(now: datetime.datetime) -> Iterator[str]:
    jobs = FineTuningJob.objects.filter(status__in=JOB_OPEN).order_by().values_list("status")
    yield _by_status("anneal_jobs", "Jobs that have not ended.", JOB_OPEN, jobs.annotate(Count("pk")))
    ended = Run.objects.filter(finished_at__gte=now - _HOUR).order_by().values_list("status")
    words = "Attempts that ended within the last hour."
    yield _by_status("anneal_runs_ended_last_hour", words, sorted(RUN_TERMINAL), ended.annotate(Count("pk")))
    is_held = Q(cordoned_at__isnull=False) | Q(drain_requested_at__isnull=False)
    state = Case(
        When(live_worker_filter(now), then=Value("live")), When(is_held, then=Value("cordoned")),
        default=Value("silent"), output_field=CharField(),
    )  # fmt: skip
    trainers = Worker.objects.filter(kind=WorkerKind.TRAINER, revoked_at=None).order_by()
    rows = trainers.values_list("pool__name", state).annotate(Count("pk"))
    counts = {(pool, found): count for pool, found, count in rows}
    yield format_series("anneal_workers", "gauge", "Admitted trainers: live ones may take a run now.", [
        ({"pool": pool, "state": each}, float(counts.get((pool, each), 0)))
        for pool in sorted({pool for pool, _ in counts}) for each in _WORKER_STATES
    ])  # fmt: skip


def _messages(now: datetime.datetime) -> Iterator[str]:
    found = count_due(now=now)
    known = sorted(lanes() | {CONTROL} | found.keys())
    yield format_series("anneal_outbox_due", "gauge", "Effects to carry out now.", [
        ({"lane": lane}, float(found.get(lane, (0, now))[0])) for lane in known
    ])  # fmt: skip
    yield format_series("anneal_outbox_oldest_due_seconds", "gauge", "How long the oldest of them has been due.", [
        ({"lane": lane}, (now - found.get(lane, (0, now))[1]).total_seconds()) for lane in known
    ])  # fmt: skip
    words = "Effects that keep failing, at most 50."
    yield format_series("anneal_outbox_failing", "gauge", words, [({}, float(len(list_failing())))])


def _batches(now: datetime.datetime) -> Iterator[str]:
    since = oldest_pending(now=now)
    words = "How long ago the oldest batch was created that no worker works on; 0 if there is none."
    seconds = (now - since).total_seconds() if since else 0.0
    yield format_series("anneal_batches_oldest_pending_seconds", "gauge", words, [({}, seconds)])


def _books(now: datetime.datetime) -> Iterator[str]:
    checks = list_newest_checks()
    yield format_series("anneal_ledger_differences", "gauge", "Rows that differ, by each check's newest outcome.", [
        ({"check": check.name}, float(check.difference_count)) for check in checks
    ])  # fmt: skip
    yield format_series("anneal_ledger_checked_seconds", "gauge", "How long ago the ledger was last checked.", [
        ({}, (now - check.checked_at).total_seconds()) for check in checks if check.name == LAST_CHECK
    ])  # fmt: skip
    unrated = UsageSeries.objects.filter(request_count__gt=F("rated_request_count")).count()
    yield format_series(
        "anneal_usage_unrated", "gauge", "Usage series that are not charged yet.", [({}, float(unrated))]
    )


def _inference(now: datetime.datetime) -> Iterator[str]:
    """Yield the traffic since the hour began. To Prometheus, the new hour is a counter that starts again."""
    hour = now.replace(minute=0, second=0, microsecond=0)
    found = sum_traffic(since=hour, until=hour + _HOUR)
    words = "Inference requests of this hour, by how they ended."
    yield format_series("anneal_inference_requests_total", "counter", words, [
        ({"end": end}, float(getattr(found, end))) for end in _ENDS
    ])  # fmt: skip
    yield format_series("anneal_inference_tokens_total", "counter", "Tokens of this hour.", [
        ({"direction": "input"}, float(found.input_tokens)), ({"direction": "output"}, float(found.output_tokens)),
    ])  # fmt: skip
    yield _first_tokens(found)


def _first_tokens(found: TrafficSum) -> str:
    counts = list(accumulate(found.first_token_counts or [0] * (len(BOUNDS_MS) + 1)))
    bounds = [f"{bound / 1000:g}" for bound in BOUNDS_MS] + ["+Inf"]
    lines = [
        "# HELP anneal_inference_first_token_seconds Time to the first token of this hour's requests.",
        "# TYPE anneal_inference_first_token_seconds histogram",
        *(
            f'anneal_inference_first_token_seconds_bucket{{le="{bound}"}} {count}'
            for bound, count in zip(bounds, counts, strict=True)
        ),
        f"anneal_inference_first_token_seconds_count {counts[-1]}",
    ]
    return "\n".join(lines) + "\n"


def _by_status(name: str, words: str, values: Iterable[str], rows: Iterable[tuple[str, int]]) -> str:
    """Return a gauge with a sample of each status, those without rows included."""
    counts = dict(rows)
    samples: list[Sample] = [({"status": str(value)}, float(counts.get(value, 0))) for value in values]
    return format_series(name, "gauge", words, samples)
