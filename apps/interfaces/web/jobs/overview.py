"""The first tab of a job's page: its charts, and its recipe and results beside the estimate."""

from apps.estimates.physics.gpus import GIB
from apps.finetuning.lifecycle import JOB_TERMINAL
from apps.finetuning.models import FineTuningJob
from apps.interfaces.web.charts import memory_charts
from apps.interfaces.web.jobs.curves import with_number
from apps.interfaces.web.jobs.evaluation import evaluation_of
from apps.interfaces.web.jobs.outcome import find_outcome, outcome_rows
from apps.interfaces.web.jobs.recipe import recipe_lines, recipe_reasons
from apps.interfaces.web.shell.live import with_units
from apps.interfaces.web.wizard.draft import Draft
from apps.interfaces.web.wizard.steps.compute_table import memory_parts

_SHOWN_EVALUATIONS = 100


def overview_of(job: FineTuningJob, *, speed: float | None) -> dict[str, object]:
    """Return the context of the tab. `speed` is that of the present attempt, in tokens per second."""
    evaluated = with_number(job, "valid_loss").order_by("-sequence")[:_SHOWN_EVALUATIONS]
    outcome = find_outcome(job)
    return {
        "evaluations": [event.data for event in reversed(evaluated)],
        "evaluation": evaluation_of(job.adapter_version),
        **attempts_of(job),
        **machine_of(job, speed=outcome.actual_tokens_per_second if outcome else speed),
        "outcome": outcome_rows(outcome),
        "recipe": recipe_lines(job),
        "reasons": recipe_reasons(job),
        "again_url": Draft.of_job(job).url(),
    }


def machine_of(job: FineTuningJob, *, speed: float | None) -> dict[str, object]:
    """Return the memory, the speed and the GPU's last figures. A job has no estimate until its files are valid."""
    measured = with_number(job, "gpu_utilization").order_by("sequence").last()
    awaits_gpu = job.status not in JOB_TERMINAL and job.pool is not None and job.pool.gpu_type_id != "cpu"
    memory = None
    if job.estimate:
        parts = memory_parts((part["key"], part["bytes"]) for part in job.estimate["parts"])
        memory = memory_charts.memory_bar(parts, job.estimate["capacity_bytes"] / GIB)
    return {
        "memory": memory,
        "speed": speed,
        "gpu": with_units(measured.data) if measured else None,
        "shows_gpu": measured is not None or awaits_gpu,
    }


def attempts_of(job: FineTuningJob) -> dict[str, object]:
    """Return the attempts, and the highest peak memory of one."""
    runs = list(job.runs.order_by("attempt"))
    return {"runs": runs, "peak_bytes": max((run.peak_memory_bytes or 0 for run in runs), default=0)}
