"""Children that are alive and do nothing: ended with evidence; and slow ones, which are left alone."""

import re
import sys
import threading
from collections.abc import Sequence

import msgspec
import pytest

from apps.contracts.failures import Blame, FailureCode
from apps.contracts.hyperparameters import Hyperparameters
from apps.contracts.runs import BaseModelRef, CheckpointSaved, Failed, Phase, RunOutcome, Succeeded
from apps.contracts.worker_api import ProbeRequest
from gpu_workers.common.process_tree import list_descendants, read_command
from gpu_workers.trainer import agent, lease_keeper
from gpu_workers.trainer.idle import probes
from gpu_workers.trainer.supervision import run_supervisor
from tests.support.agent import ROWS, Draining, add_run, make_agent

STALL_SECONDS = 3.0


@pytest.fixture(autouse=True)
def impatience(plane):
    plane.stall_seconds = STALL_SECONDS


def drain_at_once(plane, models, tmp_path, behaviours: Sequence[str]) -> dict[str, RunOutcome]:
    """Run a child of each behaviour, each on a GPU of its own; return their outcomes. Each is waited for."""
    for attempt, _ in enumerate(behaviours, start=1):
        add_run(plane, models, attempt=attempt)
    gpus = tuple(str(number) for number, _ in enumerate(behaviours))
    make_agent(plane, tmp_path, ",".join(behaviours), devices=gpus).drain()
    assert len(plane.outcomes) == len(behaviours)
    return {behaviour: plane.ends[f"run_{attempt}"] for attempt, behaviour in enumerate(behaviours, start=1)}


@pytest.mark.slow
def test_children_that_do_nothing_are_ended_with_evidence_in_the_log(plane, models, tmp_path):
    """In each phase; after a checkpoint, which counts what was stored and no second more; and one that is stopped."""
    in_phase = {phase: f"hang-in-{phase}" for phase in Phase}
    plane.stall_seconds = 2 * STALL_SECONDS  # all children start at once, and each must have begun

    outcomes = drain_at_once(plane, models, tmp_path, [*in_phase.values(), "hang", "stand-still"])

    for outcome in outcomes.values():
        assert isinstance(outcome, Failed)
        assert (outcome.code, outcome.code.blame) == (FailureCode.STALLED, Blame.PLATFORM)
        assert outcome.code.is_retryable
    for phase, behaviour in in_phase.items():
        outcome = outcomes[behaviour]
        assert f"s while {phase}, after step 0" in outcome.message
        assert "scripted_child.py" in outcome.log_tail and "Fatal Python error: Aborted" in outcome.log_tail
        assert re.search(
            r"process \d+ \(.+\): state [SRD], waits in ", outcome.log_tail
        )  # it wakes five times a second
    [saved] = plane.events_of(CheckpointSaved)
    assert outcomes["hang"].training_seconds == saved.training_seconds
    assert "state T" in outcomes["stand-still"].log_tail
    assert not any(str(tmp_path) in read_command(process) for process in list_descendants(1))


@pytest.mark.slow
def test_slow_children_without_events_are_left_alone(plane, models, tmp_path):
    outcomes = drain_at_once(plane, models, tmp_path, ["beat", "read"])

    assert [type(outcome) for outcome in outcomes.values()] == [Succeeded, Succeeded]
    for run in ("run_1", "run_2"):
        assert max(beat.work for beat in plane.beats_of[run]) > 3


@pytest.mark.slow
def test_a_step_that_should_take_long_has_ten_times_as_long(plane, models, tmp_path):
    spec = add_run(plane, models)
    plane.queue[0] = msgspec.structs.replace(spec, expected_training_seconds=20 * 0.6)

    make_agent(plane, tmp_path, "hang").drain()

    [seconds] = re.findall(r"No progress for (\d+) s", plane.outcomes[0].message)
    assert int(seconds) >= 10 * 0.6  # a busy machine notices it later


@pytest.mark.slow
def test_a_store_that_trickles_ends_the_run(plane, models, tmp_path):
    """Bytes come, but so few that the file would take years."""
    plane.add_run(ROWS * 1000, base_model=models, hyperparameters=Hyperparameters())
    plane.trickle_seconds = 0.1

    make_agent(plane, tmp_path, "succeed").drain()

    [outcome] = plane.outcomes
    assert outcome.code is FailureCode.STALLED and "while downloading" in outcome.message


@pytest.mark.slow
def test_a_measurement_that_hangs_is_ended(plane, models, tmp_path, monkeypatch):
    monkeypatch.setattr(probes, "_STALL_SECONDS", 0.5)  # it is tried three times
    base_model = BaseModelRef(id="tiny", name="tiny", path=str(models))
    plane.probes = [ProbeRequest(base_model=base_model, method="lora", micro_batch_size=1, sequence_length=8)]
    hang = (sys.executable, "-c", "import time; time.sleep(600)")

    assert make_agent(plane, tmp_path, "succeed", probe_command=hang).drain() == 0

    assert plane.reports == []


@pytest.mark.slow
def test_a_worker_that_hangs_itself_leaves_once_its_lease_is_gone_and_its_other_runs_have_ended(
    plane, models, tmp_path, monkeypatch, caplog
):
    """Inside a driver's call, say: the control plane ends the run, and a supervisor starts another worker."""
    left, ends = threading.Event(), []
    monkeypatch.setattr(lease_keeper, "_STUCK_SECONDS", 0.2)
    worker = make_agent(plane, tmp_path, "wait", devices=("0", "1"))
    # In place of the process's end: a process that has left claims nothing.
    monkeypatch.setattr(agent, "leave", lambda: (ends.append(dict(plane.ends)), worker.request_stop(), left.set()))
    hang = {"run_1": lambda: left.wait(120)}
    monkeypatch.setattr(run_supervisor, "check_run", lambda spec, *_: hang.get(spec.run_id, tuple)() and ())
    for attempt in (1, 2, 3):
        add_run(plane, models, attempt=attempt)
    draining = Draining(worker)
    plane.wait_for(lambda: any(beat.step for beat in plane.beats))
    plane.stale.add("run_1")
    plane.wait_for(lambda: "this process hangs" in caplog.text)
    assert not left.is_set()

    plane.cancelled.add("run_2")
    draining.join()

    assert left.is_set() and [*ends[0]] == ["run_2"]
    assert [spec.run_id for spec in plane.queue] == ["run_3"]
