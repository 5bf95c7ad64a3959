"""Machines of a group train as one process does. Here each machine is a folder, and they meet on the loopback."""

import os
import shutil
import signal
import time
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from apps.contracts.addresses.machines import NodeGroup
from apps.contracts.failures import FailureCode
from apps.contracts.hyperparameters import Hyperparameters, Method
from apps.contracts.runs import LogLine, StepCompleted, Stopped
from gpu_workers.common.config import child_environment, rank_environment
from gpu_workers.common.events import RESUME_FOLDER, AdapterReady, read_outcome
from gpu_workers.train.loop.checkpoint import BEST_FILE
from gpu_workers.train.loop.launch import interface_of, place_in
from gpu_workers.trainer.children.executor import MODULE
from gpu_workers.trainer.children.fork_server import Forked, ForkServer
from tests.services.ports import free_port
from tests.support.engines.attempts import ELSEWHERE, Tried, attempt, make_run_spec, prepare
from tests.support.engines.processes import PLAIN, ROWS, assert_trained_alike, wait_for
from tests.support.engines.rows import unlike

ADDRESS = "127.0.0.1"
_PATIENCE_SECONDS = 300.0  # on a busy machine


class Group:
    """Machines that begin at once; each has its own folder.

    With `starts_ranks` each has a process that starts its training processes, as outside of tests; else these are
    forks. They resume from a checkpoint if one is given.
    """

    def __init__(
        self,
        folder: Path,
        model: Path,
        fork_server: ForkServer,
        *,
        nodes: int = 2,
        gpus_here: int = 1,
        starts_ranks: bool = False,
        validation: bytes | None = None,
        resume: Path | None = None,
        **changes: object,
    ):
        port = free_port()
        self.folders = [folder / str(rank) for rank in range(nodes)]
        self.started: list[Forked] = []
        for rank, work_dir in enumerate(self.folders):
            work_dir.mkdir(parents=True, exist_ok=True)
            prepare(work_dir, ROWS, validation=validation)
            if resume is not None:  # as the worker fetches it
                shutil.copytree(resume, work_dir / RESUME_FOLDER)
            place = NodeGroup(rank=rank, node_count=nodes, master_address=ADDRESS, master_port=port, address=ADDRESS)
            spec = make_run_spec(
                model,
                **({"recipe": PLAIN, "parallelism": "ddp"} | changes),
                has_validation=validation is not None,
                resume_from=ELSEWHERE if resume else None,
                gpu_count=nodes * gpus_here,
                group=place,
            )
            (work_dir / "spec.json").write_bytes(msgspec.json.encode(spec))
            ranks = [rank_environment(index=index, **place_in(place, gpus_here)) for index in range(gpus_here)]
            with (work_dir / "log").open("wb") as log:
                for alone in [{}] if starts_ranks else ranks:
                    arguments = [str(work_dir / "spec.json"), str(work_dir)]
                    environment = child_environment(threads=1, extra=alone)
                    forked = fork_server.fork(MODULE, arguments, log=log.fileno(), environment=environment)
                    forked.stdin.close()  # it waits for its secrets
                    self.started.append(forked)

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
        """Send a signal to the one process of a machine, as its worker would."""
        os.killpg(self.started[rank].pid, number)

    def log(self, rank: int) -> str:
        return (self.folders[rank] / "log").read_text()[-3000:]


WITH_COPIES = {"parallelism": "fsdp", "gpus_here": 2, "model_copies": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "machines"),
    [
        (Method.LORA, {}),
        pytest.param(Method.LORA, {"starts_ranks": True}, marks=pytest.mark.nightly),  # each imports torch anew
        pytest.param(Method.LORA, {"nodes": 4}, marks=pytest.mark.nightly),
        (Method.FULL, {"parallelism": "fsdp"}),
        pytest.param(Method.QLORA, {"parallelism": "fsdp"}, marks=pytest.mark.nightly),
        # A copy of the model in each machine, and one over all of them.
        (Method.FULL, WITH_COPIES),
        pytest.param(Method.LORA, WITH_COPIES, marks=pytest.mark.nightly),
        pytest.param(Method.FULL, {"parallelism": "fsdp", "gpus_here": 2}, marks=pytest.mark.nightly),
    ],
)
def test_machines_lose_as_one_process_does(tiny_model, tmp_path, alone, fork_server, method, machines):
    recipe = msgspec.structs.replace(PLAIN, method=method)
    group = Group(tmp_path, tiny_model, fork_server, recipe=recipe, **machines)

    tried = group.end()

    assert isinstance(tried.outcome, AdapterReady), group.log(0)
    assert_trained_alike(tried, alone(method))
    for folder in group.folders[1:]:  # they trained to the end, and have nothing to deliver
        assert isinstance(read_outcome(folder), AdapterReady)
        assert not (folder / "adapter").exists()


LONG = msgspec.structs.replace(PLAIN, epochs=40)


@pytest.mark.slow
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
    group = Group(tmp_path / "second", tiny_model, fork_server, recipe=recipe, resume=checkpoint)
    group.wait_for_step(step + 1)
    group.signal(1, signal.SIGTERM)  # of one machine alone, and not of the first
    stopped = group.end()

    assert isinstance(stopped.outcome, Stopped), (stopped.outcome, group.log(0))
    assert stopped.outcome.step > step
    assert stopped.newest_checkpoint.name == f"checkpoint-{stopped.outcome.step}"
    assert read_outcome(group.folders[1]).step == stopped.outcome.step


# With a constant rate, what one epoch trained is the beginning of what two would have.
CONSTANT = msgspec.structs.replace(PLAIN, lr_scheduler="constant", warmup_ratio=0.0)
_STEP = 7  # of the last checkpoint of an epoch with eight steps, if each step but the last makes one


def begin(folder: Path, model: Path, fork_server: ForkServer, recipe: Hyperparameters, **changes: object) -> Path:
    """Train the first epoch on a group; return its last checkpoint."""
    once = msgspec.structs.replace(recipe, epochs=1)
    group = Group(folder, model, fork_server, recipe=once, checkpoint_interval_seconds=0, **changes)
    checkpoint = group.end().newest_checkpoint
    assert checkpoint.name == f"checkpoint-{_STEP}", group.log(0)
    return checkpoint


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallelism", "method", "before", "after"),
    [
        ("ddp", Method.LORA, 2, 1),
        pytest.param("ddp", Method.LORA, 2, 4, marks=pytest.mark.nightly),
        pytest.param("ddp", Method.LORA, 4, 2, marks=pytest.mark.nightly),
        pytest.param("ddp", Method.FULL, 2, 1, marks=pytest.mark.nightly),
        pytest.param("fsdp", Method.FULL, 2, 1, marks=pytest.mark.nightly),
        ("fsdp", Method.FULL, 2, 4),
        pytest.param("fsdp", Method.FULL, 4, 2, marks=pytest.mark.nightly),
    ],
)
def test_a_checkpoint_resumes_on_another_number_of_machines(
    tiny_model, tmp_path, alone, fork_server, parallelism, method, before, after
):
    recipe = msgspec.structs.replace(CONSTANT, method=method)
    first = {"nodes": before, "parallelism": parallelism}
    checkpoint = begin(tmp_path / "first", tiny_model, fork_server, recipe, **first)

    if (parallelism, after) == ("ddp", 1):
        tried = attempt(tmp_path / "second", tiny_model, ROWS, resume=checkpoint, recipe=recipe)
    else:
        second = {"nodes": after, "parallelism": parallelism, "resume": checkpoint}
        tried = Group(tmp_path / "second", tiny_model, fork_server, recipe=recipe, **second).end()

    assert isinstance(tried.outcome, AdapterReady), tried.outcome
    assert_trained_alike(tried, alone(method, recipe=CONSTANT), start_step=_STEP)
    said = " ".join(line.message for line in tried.of(LogLine))
    assert f"Resumed from step {_STEP}, not bit-exact: hyperparameters, processes changed." in said


@pytest.mark.slow
def test_as_many_machines_resume_exactly(tiny_model, tmp_path, fork_server):
    """Each process goes on with its own random numbers, which dropout draws."""
    recipe = msgspec.structs.replace(CONSTANT, lora_dropout=0.2)
    whole = Group(tmp_path / "whole", tiny_model, fork_server, recipe=recipe).end()
    checkpoint = begin(tmp_path / "first", tiny_model, fork_server, recipe)

    tried = Group(tmp_path / "second", tiny_model, fork_server, recipe=recipe, resume=checkpoint).end()

    tensors = whole.tensors()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in tried.tensors().items())


@pytest.mark.slow
def test_the_best_weights_of_shards_are_put_back_on_all_machines(tiny_model, tmp_path, fork_server):
    """A learning rate with which the loss only rises: the best weights are those of the first evaluation."""
    recipe = msgspec.structs.replace(
        CONSTANT, method=Method.FULL, learning_rate=0.1, eval_steps=1, early_stopping_patience=2
    )
    changes = {"recipe": recipe, "validation": unlike(ROWS), "parallelism": "fsdp"}

    tried = Group(tmp_path, tiny_model, fork_server, **changes).end()

    assert isinstance(tried.outcome, AdapterReady), tried.outcome
    best, last = tried.outcome.best_step, tried.outcome.step
    assert best is not None and best < last
    kept = load_file(tried.work_dir / BEST_FILE)
    delivered = tried.tensors()
    assert all(torch.equal(kept[name].bfloat16(), tensor) for name, tensor in delivered.items())


def test_the_interface_of_an_address_is_found():
    assert interface_of(ADDRESS) == "lo"
    assert interface_of("192.0.2.1") == ""
