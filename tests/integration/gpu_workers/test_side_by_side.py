"""Several runs on one machine: each has its GPUs, and what happens to one does not happen to another."""

import contextlib
import os
import re
import signal
import threading
from pathlib import Path

import msgspec
import pytest

from apps.contracts.failures import FailureCode
from apps.contracts.runs import Failed, Stopped, Succeeded
from gpu_workers.trainer import agent as agent_module
from gpu_workers.trainer.children.executor import SubprocessExecutor
from gpu_workers.trainer.publication import Publisher
from tests.support.agent import Draining, add_run, make_agent
from tests.support.waiting import wait_until

GPUS = ("GPU-a", "GPU-b", "GPU-c")


def children(tmp_path: Path) -> dict[str, tuple[int, str]]:
    """Each run's living child: its process, and the GPUs it sees."""
    found = {}
    for file in (tmp_path / "work" / "runs").glob("*/child.json"):
        with contextlib.suppress(OSError):
            pid = msgspec.json.decode(file.read_bytes())["pid"]
            text = Path(f"/proc/{pid}/environ").read_text()
            if seen := re.search(r"CUDA_VISIBLE_DEVICES=([^\0]*)", text):  # there is none for a moment at each exec
                found[file.parent.name.rpartition("-")[0]] = pid, seen[1]
    return found


def wait_for_children(tmp_path: Path, *runs: str) -> dict[str, tuple[int, str]]:
    """Return the living children once they are those of these runs."""
    return wait_until(lambda: (found := children(tmp_path)).keys() == set(runs) and found)


@pytest.mark.slow
def test_runs_share_a_machine_and_neither_cancel_nor_lost_lease_nor_crash_of_one_touches_another(
    plane, models, tmp_path
):
    add_run(plane, models, attempt=1, gpu_count=2)
    for attempt in (2, 3):
        add_run(plane, models, attempt=attempt)
    draining = Draining(make_agent(plane, tmp_path, "wait", devices=GPUS))

    first = wait_for_children(tmp_path, "run_1", "run_2")
    assert {run: seen for run, (_, seen) in first.items()} == {"run_1": "GPU-a,GPU-b", "run_2": "GPU-c"}

    plane.cancelled.add("run_1")
    second = wait_for_children(tmp_path, "run_2", "run_3")
    assert second["run_2"] == first["run_2"] and second["run_3"][1] == "GPU-a"

    plane.stale.add("run_2")
    assert wait_for_children(tmp_path, "run_3") == {"run_3": second["run_3"]}

    os.kill(second["run_3"][0], signal.SIGKILL)
    draining.join()

    assert plane.ends.keys() == {"run_1", "run_3"}
    assert isinstance(plane.ends["run_1"], Stopped) and plane.ends["run_1"].reason == "cancelled"
    assert isinstance(plane.ends["run_3"], Failed) and plane.ends["run_3"].code is FailureCode.INTERNAL_ERROR


def test_a_worker_claims_again_when_a_run_that_hung_has_ended(plane, models, tmp_path, monkeypatch):
    has_third = threading.Event()

    class Supervisor:
        def __init__(self, _config, _api, _executor, claim, _work_dir, *, on_stuck, **_):
            self.run_id, self.on_stuck = claim.spec.run_id, on_stuck

        def run(self):
            if self.run_id == "run_1":
                has_third.wait(10)
            elif self.run_id == "run_2":
                self.on_stuck()
            else:
                has_third.set()

    monkeypatch.setattr(agent_module, "RunSupervisor", Supervisor)
    for attempt in (1, 2, 3):
        add_run(plane, models, attempt=attempt)

    make_agent(plane, tmp_path, "succeed", devices=GPUS[:2]).drain()

    assert has_third.is_set()


def test_the_parts_after_training_are_made_on_the_gpus_of_the_run(plane, models, tmp_path):
    add_run(plane, models, gpu_count=2)
    seen = tmp_path / "seen"
    publisher = Publisher(
        SubprocessExecutor(thread_limit=1, command=("sh", "-c", f"echo $CUDA_VISIBLE_DEVICES >> {seen}"))
    )

    make_agent(plane, tmp_path, "succeed", publisher=publisher, devices=GPUS).drain()

    assert set(seen.read_text().split()) == {"GPU-a,GPU-b"}
    assert isinstance(plane.ends["run_1"], Succeeded)
