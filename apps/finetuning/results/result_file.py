"""The result file of a finished job, as in OpenAI's API: metrics per step as CSV, made from the job's events.

The file is not stored. It is made on request, and exists as long as its job.
"""

import csv
import io

from django.core.cache import cache
from django.db.models import CharField, QuerySet, Value
from django.db.models.functions import Coalesce, Concat, Substr

from apps.accounts.members.visibility import visible
from apps.accounts.models import Organization
from apps.core.ids import ULID_LENGTH, ulid_of
from apps.finetuning.lifecycle import JobStatus
from apps.finetuning.models import FineTuningJob
from apps.finetuning.results.tensorboard import read_points

PURPOSE = "fine-tune-results"
FILENAME = "step_metrics.csv"
_PREFIX = "file-result-"
_KEPT_SECONDS = 30 * 24 * 3600
# Column of the file -> name in an event.
_COLUMNS = {
    "step": "step",
    "train_loss": "train_loss",
    "train_accuracy": "train_mean_token_accuracy",
    "valid_loss": "valid_loss",
    "valid_mean_token_accuracy": "valid_mean_token_accuracy",
}


def result_file_id(job: FineTuningJob) -> str | None:
    """Return the id of the job's result file; None unless it succeeded."""
    return f"{_PREFIX}{ulid_of(job.pk)}" if job.status == JobStatus.SUCCEEDED else None


def find_job_of(*, organization: Organization | str, file_id: str) -> FineTuningJob | None:
    """Return the succeeded job that the request sees whose result file has this id."""
    if not file_id.startswith(_PREFIX) or len(file_id) != len(_PREFIX) + ULID_LENGTH:
        return None
    jobs = visible(FineTuningJob.objects.for_organization(organization)).filter(status=JobStatus.SUCCEEDED)
    return jobs.filter(pk=f"ftjob-{file_id.removeprefix(_PREFIX)}").first() if "\x00" not in file_id else None


def list_jobs_with_file(*, organization: Organization | str) -> QuerySet[FineTuningJob]:
    """Return the visible jobs that have a result file; `listed_at` is the file's time and `listed_id` its id."""
    jobs = visible(FineTuningJob.objects.for_organization(organization)).filter(status=JobStatus.SUCCEEDED)
    file_id = Concat(Value(_PREFIX), Substr("id", len("ftjob-") + 1), output_field=CharField())
    return jobs.annotate(listed_at=Coalesce("finished_at", "created_at"), listed_id=file_id)


def result_bytes(*, job: FineTuningJob) -> int:
    """Return the size of the file. It never changes and is cached, because lists show it for many jobs."""
    size = cache.get_or_set(f"result-bytes:{job.pk}", lambda: len(result_csv(job=job)), _KEPT_SECONDS)
    return int(size or 0)


def result_csv(*, job: FineTuningJob) -> bytes:
    """Return the file: one row per step, ascending. A step repeated after a resume has its later values."""
    steps: dict[int, dict[str, float]] = {}
    for _, data in read_points(job=job):
        if (step := data.get("step")) is not None:
            steps.setdefault(int(step), {}).update({name: value for name, value in data.items() if value is not None})
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    writer.writerows([steps[step].get(name, "") for name in _COLUMNS.values()] for step in sorted(steps))
    return text.getvalue().encode()
