"""kill -9 of each process at each point of a job: it still ends once, is billed once, and its adapter answers."""

from collections.abc import Callable
from pathlib import Path

import pytest

from gpu_workers.common.process_tree import identify, is_alive, list_descendants, read_command
from tests.e2e.platform import Platform, until

pytestmark = pytest.mark.chaos

PROCESSES = ("trainer", "training-child", "web", "internal", "gateway", "celery", "vllm")
POINTS = ("queued", "first step", "after a checkpoint", "uploading", "finishing")


def _said(platform: Platform, job_id: str, start: str) -> bool:
    return any(message.startswith(start) for message in platform.messages(job_id))


def _adapter_is_stored(platform: Platform, job_id: str) -> bool:
    runs: Path = platform.home / "objects"
    return any(runs.glob(f"org/*/runs/{job_id}/a*/adapter/*/manifest.json"))


REACHED: dict[str, Callable[[Platform, str], bool]] = {
    "queued": lambda platform, job_id: True,
    "first step": lambda platform, job_id: _said(platform, job_id, "Step"),
    "after a checkpoint": lambda platform, job_id: _said(platform, job_id, "Checkpoint saved"),
    "uploading": lambda platform, job_id: _said(platform, job_id, "Uploading"),
    "finishing": _adapter_is_stored,
}


# The training child is there from its start until it hands its work over.
CASES = [
    (process, point)
    for process in PROCESSES
    for point in POINTS
    if process != "training-child" or point in ("first step", "after a checkpoint")
]


@pytest.mark.parametrize(("process", "point"), CASES)
def test_a_job_survives(platform: Platform, file_id: str, process: str, point: str):
    before = platform.wait_for_settled_books()
    job_id = platform.create_job(file_id, epochs=6)
    until(lambda: REACHED[point](platform, job_id), 200, f"the job did not get to {point!r}")

    platform.kill(process)
    until(platform.answers, 120, "the dashboard and the API did not come back")
    job = platform.wait_for_end(job_id, 400)

    assert job.status == "succeeded", job.error
    assert platform.messages(job_id).count("The job has successfully completed") == 1
    platform.wait_until_answers(job.fine_tuned_model, 180)
    after = platform.wait_for_settled_books()
    assert after["ledger_sum_nano"] == 0
    charged = float(after["training_usd"]) - float(before["training_usd"])
    assert charged == pytest.approx(float(job.model_extra["cost_usd"]), abs=1e-9)
    billed_seconds = job.model_extra["billed_gpu_seconds"]
    assert 0 < billed_seconds <= job.finished_at - job.created_at + 1
    used_usd = billed_seconds * platform.price_usd_per_second(file_id)
    most_usd = float(job.model_extra["spend_cap_usd"])  # a firm price: a longer job costs no more
    assert charged == pytest.approx(min(used_usd, most_usd), abs=1e-9)


def test_a_killed_engine_leaves_no_orphan_and_answers_again(platform: Platform, file_id: str):
    job = platform.wait_for_end(platform.create_job(file_id, epochs=1))
    platform.wait_until_answers(job.fine_tuned_model)
    launcher = identify(platform.pid("vllm"))
    titles = {process: read_command(process) for process in list_descendants(launcher.pid)}
    assert any(each.startswith("VLLM::EngineCore") for each in titles.values()), titles

    platform.kill("vllm")

    until(lambda: not any(map(is_alive, [launcher, *titles])), 10, "engine processes are still there")
    assert platform.wait_until_answers(job.fine_tuned_model, 180)


def test_a_paused_job_whose_trainer_is_killed_ends_once_and_is_paid_once(platform: Platform, file_id: str):
    before = platform.wait_for_settled_books()
    job_id = platform.create_job(file_id, epochs=2)
    until(lambda: _said(platform, job_id, "Step"), 300, "no first step")
    jobs = platform.client.fine_tuning.jobs
    platform.pause(job_id)
    until(lambda: platform.job(job_id).status == "paused", 120, "the job does not pause")
    paused = platform.job(job_id)
    resumed = f"Resumed from step {jobs.checkpoints.list(job_id).data[0].step_number}."
    jobs.resume(job_id)
    until(lambda: resumed in platform.messages(job_id), 300, "the job does not resume at its checkpoint")
    platform.kill("trainer")

    job = platform.wait_for_end(job_id)

    assert job.status == "succeeded", job.error
    messages = platform.messages(job.id)
    assert messages.count("The job has successfully completed") == 1
    assert "Lost contact with the worker" in messages
    assert paused.model_extra["held_usd"] == "0"
    assert float(job.model_extra["cost_usd"]) > float(paused.model_extra["cost_usd"]) > 0
    after = platform.wait_for_settled_books()
    assert after["ledger_sum_nano"] == 0
    charged = float(after["training_usd"]) - float(before["training_usd"])
    assert charged == pytest.approx(float(job.model_extra["cost_usd"]))
