"""Explanations of failed jobs: whose fault, the cause in one sentence, the evidence, and a priced suggestion."""

import datetime

import msgspec
from django.utils.translation import gettext_noop

from apps.contracts.failures import CAUSES, Blame, FailureCode
from apps.estimates.physics.gpus import GIB
from apps.finetuning.jobs.suggestions import Suggestion, suggest
from apps.finetuning.lifecycle import JobStatus
from apps.finetuning.models import FineTuningJob


class Evidence(msgspec.Struct, frozen=True):
    """One fact that supports the cause."""

    name: str
    value: str


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    blame: Blame
    cause: str
    evidence: tuple[Evidence, ...]
    suggestion: Suggestion
    log_tail: str = ""  # the end of the last attempt's log; the worker removed the secrets


def explain(*, job: FineTuningJob, now: datetime.datetime) -> Explanation | None:
    """Return why the job failed; None unless it failed."""
    if job.status != JobStatus.FAILED:
        return None
    code = _failure_code(job.error_code)
    return Explanation(
        code=job.error_code,
        blame=code.blame if code else Blame.CUSTOMER,  # other codes are refusals before anything ran
        cause=CAUSES[code] if code else job.error_message,
        evidence=tuple(_evidence(job)),
        suggestion=suggest(job=job, now=now),
        log_tail=job.runs.order_by("-attempt").values_list("log_tail", flat=True).first() or "",
    )


def _failure_code(code: str) -> FailureCode | None:
    try:
        return FailureCode(code)
    except ValueError:
        return None


def _evidence(job: FineTuningJob) -> list[Evidence]:
    found = [Evidence(gettext_noop("Reported"), job.error_message)]
    if job.total_steps and job.step:
        found.append(Evidence(gettext_noop("Step"), f"{job.step} of {job.total_steps}"))
    losses = [event.data.get("train_loss") for event in job.events.filter(type="metrics").order_by("-sequence")[:3]]
    shown = [f"{loss:.3f}" for loss in reversed(losses) if loss is not None]
    if shown:
        found.append(Evidence(gettext_noop("Last losses"), ", ".join(shown)))
    runs = list(job.runs.order_by("attempt"))
    peak = max((run.peak_memory_bytes or 0 for run in runs), default=0)
    if peak and job.estimate.get("capacity_bytes"):
        capacity = job.estimate["capacity_bytes"]
        found.append(Evidence(gettext_noop("Peak memory"), f"{peak / GIB:.1f} of {capacity / GIB:.1f} GiB"))
    if len(runs) > 1:
        codes = ", ".join(run.failure_code or run.status for run in runs)
        found.append(Evidence(gettext_noop("Attempts"), f"{len(runs)}: {codes}"))
    return found
