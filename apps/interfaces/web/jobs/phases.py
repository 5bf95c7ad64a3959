"""The phases of a job on its page, to scale: from the times that passed, and from the estimate while it is live."""

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, replace

from django.utils.translation import gettext, gettext_noop

from apps.core.templatetags.ui import duration
from apps.finetuning.jobs.progress import JobProgress, expected_seconds
from apps.finetuning.lifecycle import JobStatus
from apps.finetuning.models import FineTuningJob, Run
from apps.interfaces.web.jobs.curves import with_number

_VALIDATE, _QUEUE, _START = gettext_noop("Validate"), gettext_noop("Queue"), gettext_noop("Starting")
_TRAIN, _FINISH = gettext_noop("Train"), gettext_noop("Finishing")
_PARTS = 12
_STOPS = {JobStatus.FAILED: "failed", JobStatus.CANCELLED: "stopped", JobStatus.PAUSED: "stopped"}

Times = Mapping[str, tuple[datetime.datetime | None, datetime.datetime | None]]


@dataclass(frozen=True)
class ShownPhase:
    """One phase of a job as people see it: Validate, Queue, Starting, Train, Finishing, Ready."""

    name: str
    state: str = ""  # "done", "now", "failed", "stopped"
    note: str = ""
    percent: float | None = None
    long: bool = False
    share: int | None = None  # twelfths of the whole time; None if that is unknown


def phases_of(*, job: FineTuningJob, progress: JobProgress, now: datetime.datetime) -> list[ShownPhase]:
    """Return the phases of a job; after a requeue they describe the latest attempt."""
    run = job.runs.order_by("-attempt").first()
    now = run.finished_at or now if run else now
    times = _times(job, run)
    lengths = _lengths(job, times, progress, now)
    whole = sum(lengths.values())
    phases = []
    for name, (begun, ended) in times.items():
        share = round(_PARTS * lengths[name] / whole) if whole else None
        phase = ShownPhase(gettext(name), long=name == _TRAIN, share=share)
        if begun and ended:
            phase = replace(phase, state="done", note=_note(begun, ended, run if name == _TRAIN else None))
        elif begun and name == _TRAIN:
            phase = replace(phase, state="now", note=f"{progress.percent}%", percent=progress.percent)
        elif begun:
            phase = replace(phase, state="now", note=_note(begun, now))
        phases.append(phase)
    if mark := _STOPS.get(JobStatus(job.status)):
        last = max((index for index, phase in enumerate(phases) if phase.state), default=0)
        phases[last] = replace(phases[last], state=mark, percent=None)
    return [*phases, ShownPhase(gettext("Ready"), "done" if job.status == JobStatus.SUCCEEDED else "")]


def _times(job: FineTuningJob, run: Run | None) -> Times:
    """Return when each phase began and ended.

    The last step ends training: a final evaluation, exports and the upload follow it. A job that stopped before, or
    whose last step is not known, has no such phase.
    """
    queued, taken, begun = (run.created_at, run.leased_at, run.training_started_at) if run else (None, None, None)
    trained = _trained_at(job) if begun else None
    times: Times = {
        _VALIDATE: (job.created_at, job.queued_at),
        _QUEUE: (queued or job.queued_at, taken),
        _START: (taken, begun),
        _TRAIN: (begun, trained or job.finished_at),
    }
    return times if job.finished_at and not trained else {**times, _FINISH: (trained, job.finished_at)}


def _trained_at(job: FineTuningJob) -> datetime.datetime | None:
    if not job.total_steps or job.step < job.total_steps:
        return None
    newest = with_number(job, "train_loss").order_by("sequence").last()
    return newest.created_at if newest else None


def _lengths(job: FineTuningJob, times: Times, progress: JobProgress, now: datetime.datetime) -> dict[str, float]:
    """Return the seconds of each phase: those that passed, and those expected while it is live; none without either."""
    passed = {name: _seconds(begun, ended or now) for name, (begun, ended) in times.items()}
    if job.finished_at:
        return passed
    expected = expected_seconds(job=job)
    if not expected.training:
        return dict.fromkeys(times, 0.0)
    training = expected.training * (1 - job.step / job.total_steps if job.total_steps else 1)
    left = {
        _QUEUE: job.estimate.get("queue_seconds") or 0.0,
        _START: expected.loading,
        _TRAIN: training + passed[_TRAIN],
        _FINISH: expected.closing,
    }
    if progress.seconds_left and times[_TRAIN][0]:
        left[_TRAIN] = passed[_TRAIN] + max(progress.seconds_left - expected.closing, 0.0)
    return {name: seconds if times[name][1] else max(seconds, left.get(name, 0.0)) for name, seconds in passed.items()}


def _note(begun: datetime.datetime, ended: datetime.datetime, run: Run | None = None) -> str:
    words = duration(int(_seconds(begun, ended)))
    if run and run.attempt > 1:
        words += gettext(", attempt %(attempt)s") % {"attempt": run.attempt}
    return words


def _seconds(begun: datetime.datetime | None, ended: datetime.datetime | None) -> float:
    return max(0.0, (ended - begun).total_seconds()) if begun and ended else 0.0
