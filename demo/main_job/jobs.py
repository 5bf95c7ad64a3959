"""One fine-tuning job from its creation to its end, with a next step for every state that it can be in."""

import time
from decimal import Decimal

import msgspec
import openai
from openai.types.fine_tuning import FineTuningJob, FineTuningJobEvent

from demo.main_job.answers import JOB_ENDED, Billing, ErrorMembers, JobMembers, JobStatus, StepMetrics
from demo.main_job.pauses import MIN_CAP_USD, resume
from demo.main_job.platform import DemoFailed, Platform, extra, found, message_of
from demo.main_job.quotes import trainer_hint, trainer_obstacle, wait_for_quote
from demo.main_job.stages import HINT_SECONDS, POLL_SECONDS, Quiet, Stage, until
from demo.main_job.state import State
from demo.main_job.training_file import CHECKS_FILES

CAP_OVER_QUOTE = 20  # a busy machine slows a job; the unspent rest is returned
MAX_JOBS = 3  # of one kind in one run of this program
RUNNING_HINT_SECONDS = 120.0  # steps are reported in bundles


def train(
    platform: Platform, state: State, stage: Stage, file_id: str, *, name: str, quantization: str | None
) -> FineTuningJob:
    """Return a job that succeeded: the earlier one, or a new one if the earlier one failed or was cancelled.

    Raises DemoFailed if another job would fail in the same way, and after MAX_JOBS jobs.
    """
    job = found(lambda: platform.openai.fine_tuning.jobs.retrieve(state[name])) if state[name] else None
    if job is not None:
        stage.line("job", f"kept from before: {job.id}, {job.status.replace('_', ' ')}")
    for attempt in range(1, MAX_JOBS + 1):
        if job is None:
            job = create_job(platform, stage, file_id, name=name, quantization=quantization)
            state[name], seen = job.id, ""
        else:
            events = platform.openai.fine_tuning.jobs.list_events(job.id, limit=100)
            seen = next((event.id for event in events), "")
        job = follow(platform, stage, job.id, seen=seen)
        if job.status == JobStatus.SUCCEEDED:
            return job
        reason = why_it_ended(job)
        if job.error and extra(job.error, ErrorMembers).blame == "customer" and job.error.code != "cannot_launch":
            state[name] = ""
            help_text = platform.operator_hint if job.error.code == "insufficient_quota" else ""
            raise DemoFailed(f"{reason} A new job would fail in the same way. {help_text}".rstrip(), process="trainer")
        stage.line("job", f"{reason} A new job starts." if attempt < MAX_JOBS else reason)
        job = None
    raise DemoFailed(f"{MAX_JOBS} jobs ended without an adapter.", process="trainer")


def create_job(platform: Platform, stage: Stage, file_id: str, *, name: str, quantization: str | None) -> FineTuningJob:
    """Show the estimate, and create the job with a cap far above it, for a metered pool. Raises DemoFailed."""
    quote = wait_for_quote(platform, stage, file_id, quantization=quantization)
    p90 = Decimal(quote.cost_usd.p90 or 0)
    balance = Decimal(platform.get("/billing", Billing).available_usd)
    if balance < p90:
        short = f"The job costs up to ${p90:.4f}, and the balance is ${balance:.4f}."
        raise DemoFailed(f"{short} {platform.operator_hint}")
    cap = min(max(MIN_CAP_USD, CAP_OVER_QUOTE * p90), balance)

    def create() -> FineTuningJob | None:
        try:
            return platform.openai.fine_tuning.jobs.create(
                model=platform.account["base_model"],
                training_file=file_id,
                suffix=f"banking-{name}",
                extra_body={
                    "quantization": quantization,
                    "compute": {"pool": platform.account["pool"]},
                    "budget": {"max_cost_usd": str(cap)},
                },
            )
        except openai.APIStatusError as refused:
            if refused.code == "cannot_launch":  # the worker is restarting
                return None
            if refused.code in ("insufficient_quota", "spend_cap_too_low"):  # the balance is the highest cap
                raise DemoFailed(f"The job cannot start: {message_of(refused)} {platform.operator_hint}") from refused
            raise

    job = until(create, lambda: trainer_hint(platform, file_id), platform, stage, "job", process="trainer")
    held = Decimal(extra(job, JobMembers).spend_cap_usd or cap)
    stage.line("hold", f"${held:.4f} set aside for {job.id}, the most that it can cost. What is not spent returns.")
    return job


def follow(platform: Platform, stage: Stage, job_id: str, *, seen: str = "") -> FineTuningJob:
    """Print state changes after the event `seen` and draw the live loss until the job is over; return the job.

    The next step follows from the job's current state, never from its events. A paused job is resumed.
    """
    quiet = Quiet()
    while True:
        job = platform.openai.fine_tuning.jobs.retrieve(job_id)
        for event in _new_events(platform, job_id, seen):
            seen = event.id
            _show_event(stage, event)
        if job.status in JOB_ENDED:
            return job
        if job.status == JobStatus.PAUSED:
            resume(platform, stage, job, is_watched=quiet.is_begun)
        ours = extra(job, JobMembers)
        process = CHECKS_FILES if job.status == JobStatus.VALIDATING_FILES else "trainer"
        hint_after = RUNNING_HINT_SECONDS if job.status == JobStatus.RUNNING else HINT_SECONDS
        now = (job.status, ours.step, ours.queue_position, ours.waiting_reason, seen)
        quiet.see(now, hint_after=hint_after)
        if quiet.is_too_long:
            text = f"{job.id} has been {job.status.replace('_', ' ')} for {quiet.seconds:.0f} s and nothing changed."
            raise DemoFailed(text, process=process)
        if quiet.is_hint_due:
            stage.line("job", f"{why_it_waits(platform, job)} Log: {platform.log(process)}")
        time.sleep(POLL_SECONDS)


def _new_events(platform: Platform, job_id: str, seen: str) -> list[FineTuningJobEvent]:
    fresh = []
    for event in platform.openai.fine_tuning.jobs.list_events(job_id, limit=100):  # newest first
        if event.id <= seen:
            break
        fresh.append(event)
    return fresh[::-1]


def _show_event(stage: Stage, event: FineTuningJobEvent) -> None:
    if event.type != "metrics":
        stage.line("job", event.message)
        return
    step = msgspec.convert(event.data, StepMetrics)
    if step.train_loss is not None:
        text = f"step {step.step}/{step.total_steps}  loss {step.train_loss:.3f}"
        stage.bar(step.step / step.total_steps, f"{text}  {step.tokens_per_second:,.0f} tokens/s")


def why_it_waits(platform: Platform, job: FineTuningJob) -> str:
    """Return why the job does not progress."""
    ours = extra(job, JobMembers)
    match job.status:
        case JobStatus.VALIDATING_FILES:
            return f"The files are still being checked. The processes celery and {CHECKS_FILES} do that."
        case JobStatus.QUEUED if ours.waiting_reason:
            return f"The job is queued: {ours.waiting_reason}"
        case JobStatus.QUEUED if (ours.queue_position or 1) > 1:
            return f"The job is queued behind {(ours.queue_position or 1) - 1} other jobs of {ours.pool}."
        case JobStatus.QUEUED if ours.queue_position:
            return f"The job is queued. {trainer_hint(platform, job.training_file)}"
        case JobStatus.QUEUED:
            why = f"It has no place in line, as happens while its organization is suspended. {platform.operator_hint}"
            return f"The job is queued. {trainer_obstacle(platform, job.training_file) or why}"
        case JobStatus.PAUSING:
            return "The trainer saves a checkpoint before the job pauses."
        case _:
            return "The trainer has reported nothing new for a while."


def why_it_ended(job: FineTuningJob) -> str:
    """Return in plain words why a job has no adapter."""
    if job.status == JobStatus.CANCELLED:
        return f"{job.id} was cancelled."
    error = extra(job.error, ErrorMembers) if job.error else ErrorMembers()
    cause, reported = error.cause or "", (job.error and job.error.message) or "the platform gives no cause"
    advice = error.suggestion.text if error.suggestion else ""
    said = [f"{job.id} failed: {cause or reported}"]
    said += [f"Reported: {reported}"] if cause and reported not in cause else []
    said += [f"The platform suggests: {advice}"] if advice else []
    return " ".join(said)
