"""Handling of a paused job: the reason for the pause, and how to continue."""

import time
from decimal import Decimal

import openai
from openai.types.fine_tuning import FineTuningJob

from demo.main_job.answers import Billing, JobMembers, JobStatus
from demo.main_job.platform import DemoFailed, Platform, extra, message_of
from demo.main_job.stages import POLL_SECONDS, Stage

MIN_CAP_USD = Decimal(1)
PAUSED_BY_PERSON_SECONDS = 20.0
PAUSE_REASONS = {
    "Paused at the spend cap": "it reached its spend cap",
    "The spend cap is close": "it came close to its spend cap",
    "A budget of the organization is used up": "a budget of the organization is used up",
    "The organization is suspended": "the organization is suspended",
    "Paused by us, unbilled": "it took much longer than quoted",
    "Pause requested": "a person paused it",
}


def resume(platform: Platform, stage: Stage, job: FineTuningJob, *, is_watched: bool) -> None:
    """Print why the job paused, raise its cap if that stopped it, and resume it. Raises DemoFailed."""
    jobs, ours = platform.openai.fine_tuning.jobs, extra(job, JobMembers)
    reason = _why_it_paused(platform, job)
    spent, cap = Decimal(ours.cost_usd), Decimal(ours.spend_cap_usd or 0)
    if is_watched and reason == PAUSE_REASONS["Pause requested"] and _is_resumed_by_a_person(platform, stage, job):
        return
    text, body = f"The job paused because {reason}. It continues from its last checkpoint.", {}
    # A cap below the minimum came from a small balance; the rest of it may not pay for another start.
    if 2 * spent >= cap or cap < MIN_CAP_USD:
        balance = Decimal(platform.get("/billing", Billing).available_usd)
        raised = min(max(MIN_CAP_USD, 2 * cap), spent + balance)
        body = {"budget": {"max_cost_usd": str(raised)}}
    try:
        resumed = jobs.resume(job.id, extra_body=body)
    except openai.APIStatusError as refused:
        if jobs.retrieve(job.id).status != JobStatus.PAUSED:
            return  # a person resumed or cancelled it
        text = f"The job paused because {reason}, and it cannot continue: {message_of(refused)}"
        is_short = refused.code == "insufficient_quota" or refused.param == "budget.max_cost_usd"
        raise DemoFailed(f"{text} {platform.operator_hint}" if is_short else text) from refused
    if body:
        now = Decimal(extra(resumed, JobMembers).spend_cap_usd or 0)
        text = (
            f"The job paused because {reason}: ${spent:.4f} of ${cap:.4f} are spent. "
            f"The cap is now ${now:.2f}, and the job continues from its last checkpoint."
        )
    stage.line("job", text)


def _why_it_paused(platform: Platform, job: FineTuningJob) -> str:
    """Return the reason from the newest pause event."""
    for event in platform.openai.fine_tuning.jobs.list_events(job.id, limit=100):
        for words, reason in PAUSE_REASONS.items():
            if event.message.startswith(words):
                return reason
    return "of a reason that its events do not name"


def _is_resumed_by_a_person(platform: Platform, stage: Stage, job: FineTuningJob) -> bool:
    seconds = PAUSED_BY_PERSON_SECONDS
    stage.line("job", f"A person paused the job. It continues in {seconds:.0f} s, or when you press Resume.")
    give_up_at = time.monotonic() + seconds
    while time.monotonic() < give_up_at:
        if platform.openai.fine_tuning.jobs.retrieve(job.id).status != JobStatus.PAUSED:
            return True
        time.sleep(POLL_SECONDS)
    return False
