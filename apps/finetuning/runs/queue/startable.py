"""The queued runs that a claim could take now: the others are overtaken."""

import datetime
from collections.abc import Collection, Sequence

from apps.finetuning.models import Run
from apps.finetuning.usage.quotas import reasons_to_wait


def startable(runs: Sequence[Run], *, now: datetime.datetime, known: Collection[str] = ()) -> list[Run]:
    """Return those of the runs of `queue_order` that may start now, and the `known` ones, which the caller checked."""
    asked = [run for run in runs if run.pk not in known and not held_back(run, now=now)]
    reasons = reasons_to_wait(jobs=[run.job for run in asked], now=now)
    able = {*known, *(run.pk for run in asked if not reasons[run.job_id])}
    return [run for run in runs if run.pk in able]


def held_back(run: Run, *, now: datetime.datetime) -> float:
    """Return for how many seconds no claim takes the run, 0 if one may."""
    return max((run.retry_at - now).total_seconds(), 0.0) if run.retry_at else 0.0
