"""Machines of a group train as one process does. Here each machine is a folder, and they meet on the loopback."""

import os
import signal
import socket
import time
from pathlib import Path

import msgspec
import pytest

from apps.contracts.addresses.machines import NodeGroup
from apps.contracts.failures import FailureCode
from apps.contracts.runs import Hyperparameters, Method, StepCompleted, Stopped
from gpu_workers.common.config import child_environment, rank_environment
from gpu_workers.common.events import RESUME_FOLDER, AdapterReady, read_outcome
from gpu_workers.train.loop.launch import interface_of, place_in
from gpu_workers.trainer.children.executor import MODULE
from gpu_workers.trainer.children.fork_server import Forked, ForkServer
from tests.support.engines.attempts import ELSEWHERE, Tried, make_run_spec, prepare
from tests.support.engines.processes import PLAIN, ROWS, assert_trained_alike, wait_for

ADDRESS = "127.0.0.1"
_PATIENCE_SECONDS = 300.0  # on a busy machine


class Group:
    """Machines that begin at once; each has its own folder.

    With `starts_ranks` each has a process that starts its training process, as outside of tests; else it is a fork.
    """

    def __init__(
        self,
        folder: Path,
        model: Path,
        fork_server: ForkServer,
        *,
        nodes: int = 2,
        starts_ranks: bool = False,
        **changes: object,
    ):
        with socket.socket() as free:
            free.bind((ADDRESS, 0))
            port = free.getsockname()[1]
        self.folders = [folder / str(rank) for rank in range(nodes)]
        self.started: list[Forked] = []
        for rank, work_dir in enumerate(self.folders):
            work_dir.mkdir(parents=True, exist_ok=True)
            prepare(work_dir, ROWS)
            place = NodeGroup(rank=rank, node_count=nodes, master_address=ADDRESS, master_port=port, address=ADDRESS)
            spec = make_run_spec(
                model, **({"recipe": PLAIN} | changes), parallelism="ddp", gpu_count=nodes, group=place
            )
            (work_dir / "spec.json").write_bytes(msgspec.json.encode(spec))
            with (work_dir / "log").open("wb") as log:
                arguments = [str(work_dir / "spec.json"), str(work_dir)]
                alone = {} if starts_ranks else rank_environment(index=0, **place_in(place, 1))
                environment = child_environment(threads=1, extra=alone)
                self.started.append(fork_server.fork(MODULE, arguments, log=log.fileno(), environment=environment))
            self.started[-1].stdin.close()  # it waits for its secrets

    def end(self) -> Tried:
        """Wait for all; return what the first one made."""
        wait_for(self.started)
        outcome = read_outcome(self.folders[0])
        assert outcome is not None, self.log(0)
        return Tried(self.folders[0], outcome)

    def wait_for_step(self, step: int) -> None:
        """Let them train at least so far."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not any(event.step >= step for event in Tried(self.folders[0], None).of(StepCompleted)):
            assert time.monotonic() < deadline and self.started[0].poll() is None, self.log(0)
            time.sleep(0.05)

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to all processes of a machine, as its worker would."""
        os.killpg(self.started[rank].pid, number)

    def log(self, rank: int) -> str:
        return (self.folders[rank] / "log").read_text()[-3000:]


@pytest.mark.parametrize(
    ("nodes", "starts_ranks"),
    [
        (2, False),
        pytest.param(2, True, marks=pytest.mark.nightly),  # each imports torch anew
        pytest.param(4, False, marks=pytest.mark.nightly),
    ],
)
def test_machines_lose_as_one_process_does(tiny_model, tmp_path, alone, fork_server, nodes, starts_ranks):
    group = Group(tmp_path, tiny_model, fork_server, nodes=nodes, starts_ranks=starts_ranks)

    tried = group.end()

    assert isinstance(tried.outcome, AdapterReady), group.log(0)
    assert_trained_alike(tried, alone(Method.LORA))
    for folder in group.folders[1:]:  # they trained to the end, and have nothing to deliver
        assert isinstance(read_outcome(folder), AdapterReady)
        assert not (folder / "adapter").exists()


LONG = msgspec.structs.replace(PLAIN, epochs=40)


def test_the_death_of_a_machine_is_told_apart_and_the_next_group_resumes(
    tiny_model, tmp_path, fork_server, monkeypatch
):
    recipe: Hyperparameters = LONG
    group = Group(tmp_path / "first", tiny_model, fork_server, recipe=recipe, checkpoint_interval_seconds=1)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not list(group.folders[0].glob("checkpoints/checkpoint-*")):
        assert time.monotonic() < deadline and group.started[0].poll() is None, group.log(0)
        time.sleep(0.05)

    group.signal(1, signal.SIGKILL)
    lost = group.end()

    assert lost.outcome.code is FailureCode.WORKER_LOST, (lost.outcome, group.log(0))
    checkpoint = lost.newest_checkpoint
    step = int(checkpoint.name.split("-")[1])
    for rank in range(2):  # as the workers of the next attempt fetch it
        folder = tmp_path / "second" / str(rank) / RESUME_FOLDER
        folder.mkdir(parents=True)
        for file in checkpoint.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
    group = Group(tmp_path / "second", tiny_model, fork_server, recipe=recipe, resume_from=ELSEWHERE)
    group.wait_for_step(step + 1)
    group.signal(1, signal.SIGTERM)  # of one machine alone, and not of the first
    stopped = group.end()

    assert isinstance(stopped.outcome, Stopped), (stopped.outcome, group.log(0))
    assert stopped.outcome.step > step
    assert stopped.newest_checkpoint.name == f"checkpoint-{stopped.outcome.step}"
    assert read_outcome(group.folders[1]).step == stopped.outcome.step


def test_the_interface_of_an_address_is_found():
    assert interface_of(ADDRESS) == "lo"
    assert interface_of("192.0.2.1") == ""
