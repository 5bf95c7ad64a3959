"""The whole sequence, from a file of messages to the bill of a served adapter. Read `run_main_job` first."""

import time
from pathlib import Path

from openai.types.fine_tuning import FineTuningJob

from demo.main_job.adapters import score, serve, show_answers
from demo.main_job.answers import JobEstimate, JobMembers
from demo.main_job.bills import show_bill
from demo.main_job.jobs import MAX_JOBS, train
from demo.main_job.platform import DemoFailed, Platform, extra
from demo.main_job.stages import Stage
from demo.main_job.state import State
from demo.main_job.training_file import upload


def run_main_job(platform: Platform, state: State, stage: Stage, *, rows: int, folder: Path) -> dict[str, object]:
    """Upload, estimate, train by LoRA, serve, compare and settle; return the figures."""
    started = time.monotonic()
    file_id = upload(platform, state, stage, folder)
    stage.mark("upload")
    model, job = train_and_serve(platform, state, stage, file_id, name="lora", quantization=None)
    seconds = time.monotonic() - started
    accuracy_base = score(platform, stage, platform.account["base_model"], rows)
    accuracy_lora = score(platform, stage, model, rows)
    stage.mark("score")
    show_answers(platform, stage, model)
    bill = show_bill(platform, stage, job)
    stage.mark("compare_and_bill")
    return {
        "model": model,
        "seconds_until_served": round(seconds, 1),
        "seconds_main_job": round(time.monotonic() - started, 1),
        "main_job_ended_at": time.time(),
        "accuracy_base": accuracy_base,
        "accuracy_lora": accuracy_lora,
        **seconds_of(job),
        **bill,
    }


def run_longer_check(
    platform: Platform, state: State, stage: Stage, model: str, *, rows: int, folder: Path
) -> dict[str, object]:
    """Score more rows with the main job's adapter, then train the same file by QLoRA and score that adapter."""
    accuracy_lora = score(platform, stage, model, rows)
    stage.mark("longer_score")
    file_id = upload(platform, state, stage, folder)
    qlora, job = train_and_serve(platform, state, stage, file_id, name="qlora", quantization="nf4")
    accuracy_qlora = score(platform, stage, qlora, rows)
    stage.mark("qlora_score")
    return {
        "accuracy_lora": accuracy_lora,
        "accuracy_qlora": accuracy_qlora,
        **{f"qlora_{name}": seconds for name, seconds in seconds_of(job).items()},
    }


def seconds_of(job: FineTuningJob) -> dict[str, float | None]:
    """Return the seconds of training that were quoted and billed."""
    members = extra(job, JobMembers)
    quote = members.estimate or JobEstimate()
    return {
        "quote_seconds_p10": quote.train_seconds_p10,
        "quote_seconds_p50": quote.train_seconds_p50,
        "quote_seconds_p90": quote.train_seconds_p90,
        "training_seconds_billed": members.billed_gpu_seconds,
    }


def train_and_serve(
    platform: Platform, state: State, stage: Stage, file_id: str, *, name: str, quantization: str | None
) -> tuple[str, FineTuningJob]:
    """Return a served adapter's name and its job. Repeats failed steps, a few times at most."""
    for _ in range(MAX_JOBS):
        job = train(platform, state, stage, file_id, name=name, quantization=quantization)
        stage.mark(f"{name}_train")
        if model := serve(platform, stage, job):
            stage.mark(f"{name}_serve")
            return model, job
        state[name] = ""
    raise DemoFailed(f"No adapter of {MAX_JOBS} jobs could be served.", process="serving-agent")
