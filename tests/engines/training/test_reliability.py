"""Runs that are interrupted, run out of memory, go wrong or get no better."""

import math
import random

import msgspec
import pytest
import safetensors.torch
import torch

from apps.contracts.failures import FailureCode
from apps.contracts.hyperparameters import Method, Objective
from apps.contracts.runs import EvaluationCompleted, LogLine, SamplesGenerated, StepCompleted, Stopped, TrainingStarted
from gpu_workers.common.events import AdapterReady, CheckpointReady, EventWriter
from gpu_workers.train.attempt import _smaller
from gpu_workers.train.failures import TrainingFailed
from gpu_workers.train.loop import callbacks, rehearsal, run_callback
from gpu_workers.train.loop.callbacks import StopFlag
from gpu_workers.train.loop.rehearsal import checkpoint_interval_seconds
from gpu_workers.train.loop.sft import Trainer
from tests.support.engines.attempts import attempt, make_run_spec
from tests.support.engines.rows import SMALL, make_pairs, make_rows, unlike

ROWS = make_rows(32)
STEPS = 32 // SMALL.batch_size * SMALL.epochs
# Other colours than those of the training rows: the more is learned, the worse they fit.
OTHER = make_rows(16, seed=3).replace(b'"assistant", "content": "', b'"assistant", "content": "not ')
PATIENT = msgspec.structs.replace(SMALL, epochs=12, learning_rate=2e-2, early_stopping_patience=2)


@pytest.fixture(autouse=True)
def report_every_step(monkeypatch):
    monkeypatch.setattr(callbacks, "REPORT_INTERVAL_SECONDS", 0.0)


class StopAt(StopFlag):
    """SIGTERM during the step before `step` ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
        super().__init__()
        original = callbacks.ProgressCallback.on_step_end

        def on_step_end(callback, args, state, control, **kwargs):
            self.is_set = state.global_step == step
            original(callback, args, state, control, **kwargs)

        monkeypatch.setattr(callbacks.ProgressCallback, "on_step_end", on_step_end)


@pytest.fixture(scope="module")
def validated(tiny_model, tmp_path_factory):
    """A run of SMALL with validation rows, that nothing disturbed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(callbacks, "REPORT_INTERVAL_SECONDS", 0.0)
        return attempt(tmp_path_factory.mktemp("validated"), tiny_model, ROWS, validation=unlike(ROWS))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "interruptions"),
    [
        ("supervised", 3),
        ("dpo", 1),
        pytest.param("full", 1, marks=pytest.mark.nightly),
        pytest.param("orpo", 1, marks=pytest.mark.nightly),
    ],
)
def test_a_run_interrupted_at_random_steps_ends_with_identical_weights(
    tiny_model, tmp_path, monkeypatch, validated, fully_trained, kind, interruptions
):
    """Interruptions of one run, each resumed from the checkpoint before; dropout draws numbers in every step."""
    recipe, rows = SMALL, ROWS
    if kind == "full":
        recipe = msgspec.structs.replace(SMALL, method=Method.FULL, learning_rate=1e-3)
    if kind in ("dpo", "orpo"):
        recipe, rows = msgspec.structs.replace(SMALL, objective=Objective(kind)), make_pairs(32)
    validation = unlike(rows) if kind != "full" else None
    given = {"recipe": recipe, "validation": validation}
    whole = {"supervised": validated, "full": fully_trained}.get(kind) or attempt(
        tmp_path / "whole", tiny_model, rows, **given
    )

    resume = None
    for index, step in enumerate(sorted(random.Random(7).sample(range(1, STEPS), interruptions))):
        with monkeypatch.context() as patch:
            part = attempt(
                tmp_path / f"part{index}", tiny_model, rows, resume=resume, stop=StopAt(patch, step), **given
            )
        assert isinstance(part.outcome, Stopped)
        assert part.outcome.step == step
        resume = part.newest_checkpoint
    last = attempt(tmp_path / "last", tiny_model, rows, resume=resume, **given)

    assert last.outcome.step == STEPS
    assert last.outcome.trained_tokens == whole.outcome.trained_tokens
    assert last.outcome.train_loss == whole.outcome.train_loss
    tensors = whole.tensors()
    assert last.tensors().keys() == tensors.keys()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in last.tensors().items())


@pytest.mark.slow
def test_a_resume_continues_with_the_scale_of_float16(tiny_model, tmp_path, monkeypatch):
    """A GPU without bfloat16 scales the loss, here by a number that grows with every second step."""
    scales: list[float] = []
    original = Trainer.__init__

    def make(trainer, *args, **kwargs):
        original(trainer, *args, **kwargs)
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=2)

    def on_optimizer_step(callback, args, state, control, **kwargs):
        scales.append(callback.trainer.accelerator.scaler.get_scale())

    with monkeypatch.context() as without_bfloat16:
        without_bfloat16.setattr(Trainer, "__init__", make)
        without_bfloat16.setattr(run_callback.RunCallback, "on_optimizer_step", on_optimizer_step, raising=False)
        whole = attempt(tmp_path / "whole", tiny_model, ROWS)
        expected, scales[:] = list(scales), []
        with monkeypatch.context() as patch:
            part = attempt(tmp_path / "part", tiny_model, ROWS, stop=StopAt(patch, 3))
        last = attempt(tmp_path / "last", tiny_model, ROWS, resume=part.newest_checkpoint)
    elsewhere = attempt(tmp_path / "elsewhere", tiny_model, ROWS, resume=part.newest_checkpoint)

    assert scales == expected
    tensors = whole.tensors()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in last.tensors().items())
    assert elsewhere.outcome.step == STEPS  # on a GPU with bfloat16, which scales nothing


@pytest.mark.slow
def test_the_same_prompts_are_answered_before_training_and_after(validated):
    first, *_, last = validated.of(SamplesGenerated)

    assert (first.step, last.step) == (0, STEPS)
    assert [each.prompt for each in first.samples] == [each.prompt for each in last.samples]
    assert len(first.samples) == 3 and all(each.prompt and each.reference for each in first.samples)


@pytest.mark.slow
def test_a_run_goes_on_if_samples_fail(tiny_model, tmp_path, monkeypatch):
    def fail(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr("gpu_workers.train.model.samples.write_answers", fail)

    tried = attempt(tmp_path, tiny_model, ROWS)

    assert tried.outcome.step == STEPS and not tried.of(SamplesGenerated)
    [told] = [line.message for line in tried.of(LogLine) if "samples" in line.message]
    assert "OutOfMemoryError" in told


@pytest.mark.slow
def test_a_rehearsal_leaves_no_trace(validated, tiny_model, tmp_path, monkeypatch):
    unrehearsed_result = rehearsal.Rehearsal(seconds=0.0, save_seconds=0.0)
    monkeypatch.setattr("gpu_workers.train.loop.run_callback.rehearse", lambda trainer, validation: unrehearsed_result)

    plain = attempt(tmp_path, tiny_model, ROWS, validation=unlike(ROWS))

    assert any("Rehearsed" in line.message for line in validated.of(LogLine))
    assert not (validated.work_dir / "rehearsal").exists()
    tensors = plain.tensors()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in validated.tensors().items())


def test_what_cannot_be_saved_fails_before_the_first_billed_second(tiny_model, tmp_path, monkeypatch):
    def full_disk(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gpu_workers.train.loop.base_trainer.save_checkpoint", full_disk)

    with pytest.raises(OSError, match="No space"):
        attempt(tmp_path, tiny_model, ROWS)

    assert b"training_started" not in (tmp_path / "events.jsonl").read_bytes()


class MemoryOf:
    """A machine whose memory holds only so many rows at a time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rows: int, *, from_step: int = 0) -> None:
        original = Trainer.loss_parts

        def loss_parts(trainer, model, inputs):
            packed = inputs.get("cu_seq_lens_q")
            n_rows = len(inputs["input_ids"] if packed is None else packed[1:])
            if n_rows > rows and trainer.state.global_step >= from_step:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
            return original(trainer, model, inputs)

        monkeypatch.setattr(Trainer, "loss_parts", loss_parts)


@pytest.mark.slow
def test_out_of_memory_halves_the_micro_batch_and_goes_on_from_the_checkpoint(tiny_model, tmp_path, monkeypatch):
    recipe = msgspec.structs.replace(SMALL, lora_dropout=0.0)
    plain = attempt(tmp_path / "plain", tiny_model, ROWS, recipe=recipe)
    MemoryOf(monkeypatch, 2, from_step=10)
    monkeypatch.setattr(
        "gpu_workers.train.loop.run_callback.checkpoint_interval_seconds", lambda spec, save_seconds: 0.0
    )

    tried = attempt(tmp_path / "small", tiny_model, ROWS, recipe=recipe)

    [told] = [line.message for line in tried.of(LogLine) if line.level == "warn" and "Memory" in line.message]
    assert told == (
        "Memory ran out. Going on from step 10 with 2 rows at a time, gradient checkpointing on and the same 4 rows "
        "a step: slower, the same result."
    )
    assert [event.start_step for event in tried.of(TrainingStarted)] == [0]  # billing begins once
    assert tried.outcome.step == STEPS
    assert tried.outcome.trained_tokens == plain.outcome.trained_tokens
    assert tried.outcome.train_loss == pytest.approx(plain.outcome.train_loss, rel=1e-2)


def test_memory_that_holds_no_single_row_ends_the_run(tiny_model, tmp_path, monkeypatch):
    MemoryOf(monkeypatch, 0)

    with pytest.raises(torch.OutOfMemoryError):
        attempt(tmp_path, tiny_model, ROWS)

    assert b"training_started" not in (tmp_path / "events.jsonl").read_bytes()


def test_a_smaller_recipe_keeps_the_rows_of_a_step():
    recipe = msgspec.structs.replace(SMALL, batch_size=12, gradient_accumulation_steps=1)
    sizes = []
    while (smaller := _smaller(recipe, gpu_count=1)) is not None:
        recipe = smaller
        sizes.append((recipe.gradient_accumulation_steps, recipe.gradient_checkpointing))

    assert sizes == [(2, True), (4, True), (12, True)]


def test_a_loss_of_zero_ends_the_run(tiny_model, tmp_path, monkeypatch):
    original = Trainer.loss_parts

    def loss_parts(trainer, model, inputs):
        loss, n_correct, n_trained = original(trainer, model, inputs)
        return loss * 0.0, n_correct, n_trained

    monkeypatch.setattr(Trainer, "loss_parts", loss_parts)

    with pytest.raises(TrainingFailed) as failure:
        attempt(tmp_path, tiny_model, ROWS)

    assert failure.value.code is FailureCode.LOSS_IS_ZERO


def test_training_that_ends_short_of_its_last_step_is_no_success(tiny_model, tmp_path, monkeypatch):
    original = callbacks.ProgressCallback.on_step_end

    def give_up(callback, args, state, control, **kwargs):
        original(callback, args, state, control, **kwargs)
        control.should_training_stop = state.global_step == 5

    monkeypatch.setattr(callbacks.ProgressCallback, "on_step_end", give_up)

    with pytest.raises(TrainingFailed, match=f"step 5 of {STEPS}") as failure:
        attempt(tmp_path, tiny_model, ROWS)

    assert failure.value.code is FailureCode.INCOMPLETE_TRAINING


@pytest.mark.slow
def test_early_stopping_keeps_the_best_weights_and_says_so(tiny_model, tmp_path, monkeypatch):
    tried = attempt(tmp_path, tiny_model, ROWS, recipe=PATIENT, validation=OTHER)

    outcome, losses = tried.outcome, [event.valid_loss for event in tried.of(EvaluationCompleted)]
    best = losses.index(min(losses))
    assert isinstance(outcome, AdapterReady)
    assert outcome.is_stopped_early
    assert outcome.step == len(losses) * 8 < 12 * 8
    assert len(losses) == best + 1 + 2
    assert (outcome.best_step, outcome.valid_loss) == ((best + 1) * 8, min(losses))
    assert any("whose weights are kept" in line.message for line in tried.of(LogLine))
    stop = StopAt(monkeypatch, outcome.best_step + 1)
    more_patient = msgspec.structs.replace(PATIENT, early_stopping_patience=100)
    again = attempt(tmp_path / "again", tiny_model, ROWS, recipe=more_patient, validation=OTHER, stop=stop)
    assert again.of(EvaluationCompleted)[best].valid_loss == min(losses)


@pytest.fixture(scope="module")
def overfitted(tiny_model, tmp_path_factory):
    """A run that reads rows of another kind every fourth step."""
    recipe = msgspec.structs.replace(PATIENT, eval_steps=4)
    folder = tmp_path_factory.mktemp("overfitted")
    return recipe, attempt(folder, tiny_model, ROWS, recipe=recipe, validation=OTHER)


@pytest.mark.slow
def test_validation_rows_are_read_between_epochs_and_a_run_that_gets_worse_stops(overfitted):
    _, tried = overfitted

    outcome, evaluations = tried.outcome, tried.of(EvaluationCompleted)
    losses = [event.valid_loss for event in evaluations]
    best = losses.index(min(losses))
    assert [event.step for event in evaluations] == [4 * number for number in range(1, len(losses) + 1)]
    assert outcome.is_stopped_early and len(losses) == best + 1 + 2
    assert outcome.step == 4 * len(losses) < 12 * 8
    assert (outcome.best_step, outcome.valid_loss) == (4 * (best + 1), min(losses))
    assert outcome.trained_tokens == tried.of(StepCompleted)[-1].trained_tokens  # every step that was run


@pytest.mark.slow
def test_its_published_weights_are_those_of_its_best_evaluation(overfitted, tiny_model, tmp_path, monkeypatch):
    recipe, tried = overfitted
    stop = StopAt(monkeypatch, tried.outcome.best_step)

    part = attempt(tmp_path, tiny_model, ROWS, recipe=recipe, validation=OTHER, stop=stop)

    best = safetensors.torch.load_file(part.newest_checkpoint / "adapter_model.safetensors")
    published = tried.tensors()
    assert part.newest_checkpoint.name == f"checkpoint-{tried.outcome.best_step}"
    assert published.keys() == best.keys()
    assert all(torch.equal(tensor, best[name].to(torch.bfloat16)) for name, tensor in published.items())


def test_a_large_validation_file_is_read_in_part_while_training(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr("apps.contracts.hyperparameters.MIN_EVALUATED_ROWS", 4)
    recipe = msgspec.structs.replace(SMALL, epochs=1, eval_steps=4)  # 16 rows between two evaluations
    read = []
    original = run_callback.evaluate

    def evaluate(model, rows, **options):
        read.append(len(rows))
        return original(model, rows, **options)

    monkeypatch.setattr(run_callback, "evaluate", evaluate)

    tried = attempt(tmp_path, tiny_model, ROWS, recipe=recipe, validation=unlike(make_rows(32, seed=1)))

    assert read == [4, 4]
    assert any("reads 4 of the 32 validation rows" in line.message for line in tried.of(LogLine))


@pytest.mark.slow
def test_each_epoch_ends_with_a_checkpoint_that_knows_its_evaluation(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(run_callback, "_MIN_SECONDS_APART", 0.0)
    monkeypatch.setattr(run_callback, "_MAX_SAVING_SHARE", 1e9)  # as if an epoch took long

    tried = attempt(tmp_path, tiny_model, ROWS, validation=unlike(ROWS))

    saved = [event.step for event in tried.of(CheckpointReady)]
    per_epoch = STEPS // SMALL.epochs
    assert saved == [per_epoch * epoch for epoch in range(1, SMALL.epochs)]  # the last one is the result
    kinds = [(type(event), event.step) for event in tried.of((CheckpointReady, EvaluationCompleted))]
    assert kinds.index((EvaluationCompleted, per_epoch)) < kinds.index((CheckpointReady, per_epoch))


@pytest.mark.slow
def test_an_attempt_at_the_last_step_has_nothing_to_train_and_gives_the_same_result(tiny_model, tmp_path):
    """What an attempt that ended while its exports were made leaves to the next one."""
    promised = {"exports": ("merged_16bit",), "validation": unlike(ROWS)}
    whole = attempt(tmp_path / "whole", tiny_model, ROWS, **promised)
    assert whole.newest_checkpoint.name == f"checkpoint-{STEPS}"

    again = attempt(tmp_path / "again", tiny_model, ROWS, resume=whole.newest_checkpoint, **promised)

    assert again.of(StepCompleted) == []
    assert again.outcome.step == STEPS
    assert again.outcome.trained_tokens == whole.outcome.trained_tokens
    assert again.outcome.valid_loss == whole.outcome.valid_loss
    assert all(torch.equal(tensor, whole.tensors()[name]) for name, tensor in again.tensors().items())


def test_a_reported_speed_is_a_mean_over_seconds_of_training(tmp_path):
    events = EventWriter(tmp_path / "events.jsonl")
    callback = callbacks.ProgressCallback(events, StopFlag(), checkpoint_interval_seconds=60, steps_per_epoch=10)
    callback._counted.append((0.0, 0.0))

    speeds = [callback._tokens_per_second(second, 1_000) for second in range(1, 21)]
    slow_step = callback._tokens_per_second(20.5, 32)  # one step, beside the upload of a checkpoint

    assert speeds == [pytest.approx(1_000)] * 20
    assert slow_step == pytest.approx(1_000, rel=0.06)
    events.close()


def test_the_cadence_of_checkpoints_is_youngs_and_dalys():
    def interval(save_seconds, **changes):
        return checkpoint_interval_seconds(make_run_spec(None, SMALL, **changes), save_seconds=save_seconds)

    often = {"seconds_between_failures": 3600.0, "checkpoint_interval_seconds": 300}
    assert interval(2.0) == 300  # nothing measured: what was asked
    assert interval(2.0, **often) == pytest.approx(math.sqrt(2 * 2 * 3600) - 2)
    assert interval(0.001, **often) == 15  # never so often that a fast disk is all that works
    assert interval(20.0, **often) == 1000  # saving takes 2 % of the time at most
    assert interval(2.0, **often | {"seconds_between_failures": 1e9}) == 300


@pytest.mark.slow
def test_progress_says_memory_and_time_left(trained):
    steps = trained.of(StepCompleted)

    assert all(step.memory_bytes > 10**8 for step in steps)
    assert steps[-1].eta_seconds == 0.0
    assert steps[3].eta_seconds > steps[-2].eta_seconds > 0
