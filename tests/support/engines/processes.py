"""Several training processes, and what one process makes of the same recipe."""

import itertools
from typing import BinaryIO

import msgspec
import pytest
import torch

from apps.contracts.hyperparameters import Hyperparameters, Objective
from apps.contracts.runs import StepCompleted
from gpu_workers.common.config import child_environment, rank_environment
from gpu_workers.common.events import EVENTS_FILE
from gpu_workers.trainer.children.executor import MODULE
from gpu_workers.trainer.children.fork_server import Forked, ForkServer
from tests.services.ports import free_port
from tests.support.engines.attempts import Tried
from tests.support.engines.rows import SMALL, make_pairs, make_rows

ROWS, PAIRS = make_rows(32), make_pairs(32)
PLAIN = msgspec.structs.replace(SMALL, lora_dropout=0.0, epochs=2)


def rows_for(recipe: Hyperparameters) -> bytes:
    return ROWS if recipe.objective is Objective.SUPERVISED else PAIRS


def fork(fork_server: ForkServer, arguments: list[str], log: BinaryIO, *, count: int, module: str = MODULE) -> None:
    port = free_port()
    ranks = [
        fork_server.fork(
            module,
            arguments,
            log=log.fileno(),
            environment=child_environment(threads=1, extra=rank_environment(index=index, count=count, port=port)),
        )
        for index in range(count)
    ]
    wait_for(ranks)


def wait_for(started: list[Forked]) -> None:
    for process in started:
        process.stdin.close()
    for process in started:
        process.wait(300)


def assert_trained_alike(tried: Tried, single: Tried, *, start_step: int = 0) -> None:
    """Compare a run of several processes, from this step on, with the whole run of one."""
    losses = [step.train_loss for step in single.of(StepCompleted)]
    steps = tried.of(StepCompleted)
    assert steps[-1].step == len(losses) == 16
    assert tried.outcome.trained_tokens == single.outcome.trained_tokens
    for before, step in itertools.pairwise([None, *steps]):  # a report is the mean of the steps since the one before
        since = before.step if before else start_step
        assert step.train_loss == pytest.approx(sum(losses[since : step.step]) / (step.step - since), rel=5e-3)
    mine, other = tried.tensors(), single.tensors()
    assert mine.keys() == other.keys()
    assert all(mine[name].shape == tensor.shape for name, tensor in other.items())
    flat = [torch.cat([tensors[name].float().flatten() for name in sorted(other)]) for tensors in (mine, other)]
    assert torch.nn.functional.cosine_similarity(*flat, dim=0) > 0.9
    assert (tried.work_dir / EVENTS_FILE).read_bytes().count(b"training_started") == 1
