"""Real runs: the agent with a control plane over HTTP, and torch in the child."""

import os
import signal
import threading
from pathlib import Path

import msgspec
import pytest
import safetensors.torch
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from apps.contracts.failures import FailureCode
from apps.contracts.hyperparameters import Method
from apps.contracts.parity import PARITY_FILE
from apps.contracts.runs import (
    CheckpointSaved,
    EvaluationCompleted,
    Failed,
    LogLine,
    RunSpec,
    StepCompleted,
    Stopped,
    Succeeded,
    TrainingStarted,
)
from gpu_workers.trainer.agent import Agent
from gpu_workers.trainer.publication import MERGED_EXPORT
from tests.support.engines.rows import RECIPE, make_rows, unlike
from tests.twins.control_plane import ControlPlane

QUICK = msgspec.structs.replace(RECIPE, epochs=6)
ROWS = make_rows(120)
STEPS = 120 // QUICK.batch_size * QUICK.epochs


def add_run(plane: ControlPlane, model: Path, **options: object) -> RunSpec:
    return plane.add_run(ROWS, base_model=model, **{"hyperparameters": QUICK} | options)


def adapter_of(plane: ControlPlane, outcome: object) -> dict[str, torch.Tensor]:
    assert isinstance(outcome, Succeeded), outcome
    return safetensors.torch.load(plane.stored_files(outcome.upload_id)["adapter_model.safetensors"])


def drain_in_thread(agent: Agent) -> threading.Thread:
    thread = threading.Thread(target=agent.drain)
    thread.start()
    return thread


def signal_child(work_dir: Path, number: signal.Signals) -> None:
    [file] = (work_dir / "runs").glob("*/child.json")
    os.kill(msgspec.json.decode(file.read_bytes())["pid"], number)


@pytest.fixture(scope="module")
def uninterrupted() -> dict[str, torch.Tensor]:
    """The adapter of a run that nothing disturbed, filled by the first test that has one."""
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("method", [Method.LORA, Method.QLORA])
def test_a_run_learns_its_rows_and_delivers_an_adapter(plane, tiny_model, make_agent, uninterrupted, method, tmp_path):
    """Agent, training child and publishing children as they are."""
    recipe = msgspec.structs.replace(QUICK, method=method)
    add_run(plane, tiny_model, hyperparameters=recipe, validation=unlike(make_rows(30, seed=1)))
    if method is Method.LORA:
        plane.queue[-1] = msgspec.structs.replace(plane.queue[-1], exports=(MERGED_EXPORT,))

    make_agent().drain()

    [outcome] = plane.outcomes
    tensors = adapter_of(plane, outcome)
    steps = plane.events_of(StepCompleted)
    evaluations = plane.events_of(EvaluationCompleted)
    [started] = plane.events_of(TrainingStarted)
    assert (started.total_steps, started.start_step, started.rows) == (STEPS, 0, 120)
    assert outcome.step == steps[-1].step == STEPS
    assert outcome.trained_tokens == steps[-1].trained_tokens == started.trained_tokens_per_epoch * QUICK.epochs
    assert outcome.tokens > outcome.trained_tokens, "prompts count, padding does not"
    assert outcome.tokens % QUICK.epochs == 0
    assert outcome.peak_memory_bytes > 10**8
    assert steps[-1].train_loss < steps[0].train_loss
    assert steps[-1].train_mean_token_accuracy > 0.5 > steps[0].train_mean_token_accuracy
    assert len(evaluations) == QUICK.epochs
    assert outcome.valid_loss == evaluations[-1].valid_loss < evaluations[0].valid_loss
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert_peft_loads(plane, outcome.upload_id, tiny_model, tmp_path / "loaded")
    if method is Method.LORA:
        assert_published(plane, outcome)
        uninterrupted |= tensors


def assert_published(plane: ControlPlane, outcome: Succeeded) -> None:
    """A model that learnt its rows beats its base."""
    assert outcome.report is not None and outcome.report.rows == 30
    found = {comparison.name: comparison for comparison in outcome.report.comparisons}
    assert (found["loss"].verdict, found["token_accuracy"].verdict) == ("better", "better")
    assert found["loss"].tuned.value == pytest.approx(outcome.valid_loss, rel=0.1)  # the trainer's own last word
    assert PARITY_FILE in plane.stored_files(outcome.upload_id)
    assert "model.safetensors" in plane.stored_files(outcome.exports[0].upload_id)


def assert_peft_loads(plane: ControlPlane, upload_id: str, model: Path, folder: Path) -> None:
    folder.mkdir()
    for name, content in plane.stored_files(upload_id).items():
        (folder / name).write_bytes(content)
    base = AutoModelForCausalLM.from_pretrained(model)
    loaded = PeftModel.from_pretrained(base, folder)
    prompt = torch.tensor([[3, 100, 200, 1, 4]])
    assert not torch.equal(loaded(prompt).logits, AutoModelForCausalLM.from_pretrained(model)(prompt).logits)


@pytest.mark.slow
def test_two_runs_at_once_each_end_with_the_adapter_of_one_alone(plane, tiny_model, make_agent, uninterrupted):
    for attempt in (1, 2):
        add_run(plane, tiny_model, attempt=attempt)

    assert make_agent(devices=("GPU-a", "GPU-b"), publishes=False).drain() == 2

    ended = next(
        at for at, event in enumerate(plane.events) if isinstance(event, StepCompleted) and event.step == STEPS
    )
    assert [type(event) for event in plane.events[:ended]].count(TrainingStarted) == 2, "one after the other"
    assert len(plane.outcomes) == 2
    for outcome in plane.outcomes:
        adapter = adapter_of(plane, outcome)
        assert adapter.keys() == uninterrupted.keys()
        assert all(torch.equal(adapter[name], tensor) for name, tensor in uninterrupted.items())


@pytest.mark.slow
def test_a_pause_saves_the_step_it_stops_at_and_ends_cleanly(plane, tiny_model, make_agent, tmp_path):
    long = msgspec.structs.replace(QUICK, epochs=10 * QUICK.epochs)  # no machine is through before the pause comes
    add_run(plane, tiny_model, hyperparameters=long)  # an interval longer than the run: the pause alone checkpoints
    thread = drain_in_thread(make_agent())
    plane.wait_for(lambda: plane.events_of(StepCompleted), timeout_seconds=120)
    plane.is_pause_requested = True
    thread.join(240)

    [outcome] = plane.outcomes
    saved = plane.events_of(CheckpointSaved)[-1]
    assert isinstance(outcome, Stopped) and outcome.reason == "paused"
    assert 0 < outcome.step == saved.step < 10 * STEPS
    assert outcome.training_seconds == saved.training_seconds > 0
    assert outcome.trained_tokens == plane.events_of(StepCompleted)[-1].trained_tokens
    assert not list((tmp_path / "work" / "runs").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("end", [pytest.param(signal.SIGTERM, marks=pytest.mark.nightly), signal.SIGKILL])
def test_a_run_resumed_in_the_middle_ends_with_the_same_adapter(
    plane, tiny_model, make_agent, uninterrupted, end, tmp_path
):
    """SIGTERM: checkpoint at that step. SIGKILL: go on from the last checkpoint. The losses differ by 0 either way."""
    add_run(plane, tiny_model, checkpoint_interval_seconds=0)  # after each step
    thread = drain_in_thread(make_agent(publishes=False))
    plane.wait_for(lambda: plane.events_of(CheckpointSaved), timeout_seconds=120)
    signal_child(tmp_path / "work", end)
    thread.join(240)
    [first] = plane.outcomes
    saved = plane.events_of(CheckpointSaved)[-1]
    assert isinstance(first, Stopped if end is signal.SIGTERM else Failed)
    assert 0 < saved.step < STEPS
    assert first.training_seconds == saved.training_seconds

    plane.forget_lease()
    add_run(plane, tiny_model, attempt=2, resume_from=plane.checkpoint_ref(saved))
    make_agent(publishes=False).drain()

    resumed = adapter_of(plane, plane.outcomes[1])
    assert plane.events_of(TrainingStarted)[1].start_step == saved.step
    assert f"Resumed from step {saved.step}." in [line.message for line in plane.events_of(LogLine)]
    assert plane.events_of(StepCompleted)[-1].trained_tokens == plane.outcomes[1].trained_tokens
    if not uninterrupted:  # `make nightly` runs this test without the first one
        plane.forget_lease()
        add_run(plane, tiny_model, attempt=3)
        make_agent(publishes=False).drain()
        uninterrupted |= adapter_of(plane, plane.outcomes[2])
    assert resumed.keys() == uninterrupted.keys()
    for name, tensor in resumed.items():
        assert torch.equal(tensor, uninterrupted[name]), name


@pytest.mark.slow
def test_a_diverging_run_is_the_recipes_failure(plane, tiny_model, make_agent):
    wild = msgspec.structs.replace(QUICK, learning_rate=1e30, max_grad_norm=0.0, warmup_ratio=0.0)
    add_run(plane, tiny_model, hyperparameters=wild)

    make_agent().drain()

    assert plane.outcomes[0].code is FailureCode.LOSS_NOT_FINITE
    assert "learning rate" in plane.outcomes[0].message
