"""The GPU time of months, read from totals of days, is that of the runs."""

import datetime
import random
from collections import Counter
from collections.abc import Iterator

import pytest
from django.db import connection

from apps.accounts.models import Organization
from apps.accounts.shares import get_share_holder
from apps.finetuning.models import FineTuningJob, GpuDay, Run
from apps.finetuning.pools.margins import list_margins
from apps.finetuning.usage import quotas
from apps.finetuning.usage.job_use import read_use
from apps.finetuning.usage.occupancy import held_gpu_seconds
from tests.factories.accounts import make_organization, make_user
from tests.factories.finetuning import make_job, make_pool
from tests.factories.money import give_credit
from tests.support.attempts import TrainingSetup

_DAY, _US = datetime.timedelta(days=1), datetime.timedelta(microseconds=1)
MONTH = datetime.datetime(2026, 3, 1, tzinfo=datetime.UTC)
SUMMER_TIME = MONTH + 7 * _DAY  # the day that has 23 hours in New York
ENDS = (MONTH + _US, MONTH + _DAY, SUMMER_TIME + 0.7 * _DAY, MONTH + 31 * _DAY)


@pytest.fixture
def runs(floor: TrainingSetup, claim) -> list[Run]:
    """Make ended attempts of two organizations on two pools, written by a session in New York, and one that goes on."""
    chance = random.Random(15)
    other = make_organization("Other", owner=make_user("other"))
    give_credit(other)
    jobs = [floor.job(), make_job(floor.organization, floor.base_model), make_job(other, floor.base_model)]
    FineTuningJob.objects.filter(pk=jobs[1].pk).update(gpu_count=4)
    pools = [floor.pool, make_pool("second")]
    claim()
    Run.objects.exclude(leased_at=None).update(leased_at=MONTH - 2 * _DAY - _US)
    begins = [SUMMER_TIME, MONTH, MONTH - _US, *(MONTH + chance.uniform(-3, 12) * _DAY for _ in range(40))]
    ended = [
        Run(
            organization_id=job.organization_id, job=job, attempt=number, pool=chance.choice(pools), status="failed",
            leased_at=chance.choice([begin, begin, begin, None]),
            finished_at=begin + chance.choice([0.3 * _DAY, _DAY, 3.4 * _DAY, _US]),
            billed_gpu_ms=chance.randrange(10**7),
        )
        for number, begin in enumerate(begins, 10) for job in [chance.choice(jobs)]
    ]  # fmt: skip
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL TIME ZONE 'America/New_York'")
        Run.objects.bulk_create(ended)
        cursor.execute("SET LOCAL TIME ZONE 'UTC'")
    return ended


def spans(until: datetime.datetime) -> Iterator[tuple[Run, datetime.datetime, datetime.datetime, int]]:
    """Yield each attempt that had a worker, with the begin and the end of what it held, and its GPUs."""
    for run in Run.objects.exclude(leased_at=None).select_related("job"):
        assert run.leased_at is not None
        yield run, run.leased_at, run.finished_at or until, run.job.gpu_count


def held_of_runs(by: str, begin: datetime.datetime, end: datetime.datetime) -> dict[str, float]:
    sums: Counter[str] = Counter()
    for run, since, until, gpus in spans(end):
        sums[getattr(run, by)] += gpus * max(min(until, end) - max(since, begin), 0 * _DAY) // _US
    return {key: us / 1_000_000 for key, us in sums.items() if us}


def days_of_runs() -> dict[tuple[str, str, datetime.date], tuple[int, int]]:
    held: Counter[tuple[str, str, datetime.date]] = Counter()
    billed: Counter[tuple[str, str, datetime.date]] = Counter()
    for run in Run.objects.exclude(finished_at=None).select_related("job"):
        assert run.finished_at is not None
        since, place = run.leased_at or run.finished_at, (run.organization_id, run.pool_id)
        billed[*place, run.finished_at.date()] += run.billed_gpu_ms
        while since < run.finished_at:
            midnight = since.replace(hour=0, minute=0, second=0, microsecond=0) + _DAY
            held[*place, since.date()] += run.job.gpu_count * (min(midnight, run.finished_at) - since) // _US
            since = midnight
    return {key: (held[key], billed[key]) for key in {*held, *billed} if held[key] or billed[key]}


def stored_days() -> dict[tuple[str, str, datetime.date], tuple[int, int]]:
    rows = GpuDay.objects.values_list("organization_id", "pool_id", "day", "held_gpu_us", "billed_gpu_ms")
    return {(*place, day): (held, billed) for *place, day, held, billed in rows if held or billed}


def test_the_totals_of_days_are_those_of_the_runs_whatever_changes_them_later(runs: list[Run]) -> None:
    assert stored_days() == days_of_runs()

    Run.objects.filter(pk__in=[run.pk for run in runs[:9]]).update(billed_gpu_ms=5)
    Run.objects.filter(pk=runs[9].pk).update(finished_at=runs[9].finished_at + 2 * _DAY)
    Run.objects.filter(pk__in=[run.pk for run in runs[12:15]]).delete()

    assert stored_days() == days_of_runs()
    assert len(stored_days()) > 20


def test_what_was_held_between_two_moments_is_that_of_the_runs(runs: list[Run], organization: Organization) -> None:
    for begin in (MONTH, MONTH - 28 * _DAY):
        for end in ENDS:
            for by in ("organization_id", "pool_id"):
                found = held_gpu_seconds(by=by, begin=begin, end=end)
                expected = held_of_runs(by, begin, end)
                assert {key: seconds for key, seconds in found.items() if seconds} == pytest.approx(expected), (by, end)
    for now in ENDS[:-1]:
        own = held_of_runs("organization_id", MONTH, now).get(organization.pk, 0.0)
        assert quotas.used_gpu_seconds(organizations=[organization.pk], now=now)[organization.pk] == pytest.approx(own)
        holder = get_share_holder(organization=organization)
        assert read_use(holder=holder, jobs=[], now=now).seconds == pytest.approx(own)


def test_the_margins_of_a_month_have_the_time_of_its_runs(runs: list[Run]) -> None:
    for now in ENDS:
        end = min(now, MONTH + 31 * _DAY)
        billed: Counter[str] = Counter()
        for run in runs:
            if MONTH <= run.finished_at < end:
                billed[run.pool_id] += run.billed_gpu_ms
        held = held_of_runs("pool_id", MONTH, end)

        for margin in list_margins(month=MONTH.date(), now=now):
            assert margin.billed_gpu_seconds == pytest.approx(billed[margin.pool.pk] / 1000)
            assert margin.busy_gpu_seconds == pytest.approx(held.get(margin.pool.pk, 0.0))
