"""The callback of a run: the rehearsal, the sampler's epoch, evaluations, early stopping, and when to save."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import TrainerControl, TrainerState, TrainingArguments

from apps.contracts.failures import FailureCode
from apps.contracts.hyperparameters import Method
from apps.contracts.runs import (
    EvaluationCompleted,
    LogLine,
    Phase,
    PhaseChanged,
    RunSpec,
    SamplesGenerated,
    TrainingStarted,
)
from gpu_workers.common.events import UNNUMBERED, EventWriter
from gpu_workers.train.data.encoding import ShuffledSampler
from gpu_workers.train.data.rows import Rows, SomeRows
from gpu_workers.train.failures import TrainingFailed
from gpu_workers.train.loop.callbacks import ProgressCallback, StopFlag
from gpu_workers.train.loop.checkpoint import BestWeights, Progress
from gpu_workers.train.loop.evaluation import Evaluation, evaluate
from gpu_workers.train.loop.process_group import is_distributed
from gpu_workers.train.loop.rehearsal import checkpoint_interval_seconds, rehearse
from gpu_workers.train.model.samples import SampleWriter

if TYPE_CHECKING:  # the trainer imports this module
    from gpu_workers.train.loop.base_trainer import RunTrainer

_MAX_EPOCH_CHECKPOINTS = 20
_MAX_SAVING_SHARE = 0.05  # of an epoch's time, for the checkpoint at its end
_MIN_SECONDS_APART = 1.0
_SAMPLES_SHARE = 0.02  # of training's time, for the samples at checkpoints


class RunCallback(ProgressCallback):
    """ProgressCallback with the parts that need the trainer: rehearsal, epochs, evaluation, early stopping."""

    def __init__(
        self,
        events: EventWriter,
        stop: StopFlag,
        *,
        sampler: ShuffledSampler,
        spec: RunSpec,
        training: Rows,
        validation: Rows | None,
        work_dir: Path,
        checkpoint_interval_seconds: float,
        steps_per_epoch: int,
    ) -> None:
        super().__init__(
            events,
            stop,
            checkpoint_interval_seconds=checkpoint_interval_seconds,
            steps_per_epoch=steps_per_epoch,
        )
        self.trainer: RunTrainer
        self.validation = validation and self._bounded(validation, spec, steps_per_epoch, events)
        self.valid_loss: float | None = None  # of the last evaluation
        self.is_rehearsing = False  # a speed probe trains without rehearsal and reports nothing
        self.is_announced = False
        self.is_stopped_early = False
        self.best = BestWeights(work_dir, spec)
        self._training = training
        self._evaluated_step = 0
        self._save_seconds = 0.0
        # Saved so that, if this attempt ends during its exports, the next one only has to make the exports.
        self.saves_last_step = bool(spec.exports) and spec.hyperparameters.method is not Method.FULL
        self._spec = spec
        self._sampler = sampler
        self._samples: SampleWriter | None = None
        self._sampled_seconds = 0.0  # at checkpoints

    def _bounded(self, rows: Rows, spec: RunSpec, steps_per_epoch: int, events: EventWriter) -> Rows | SomeRows:
        """Return the rows that every evaluation reads: the same ones, and no more than the recipe allows."""
        recipe = spec.hyperparameters
        most = recipe.evaluated_rows(steps_per_epoch=steps_per_epoch)
        if len(rows) <= most:
            return rows
        events.write(
            LogLine(
                sequence=UNNUMBERED,
                level="info",
                message=f"Each evaluation during training reads {most:,} of the {len(rows):,} validation rows, so "
                "that it takes little of the time.",
            )
        )
        chosen = np.random.default_rng(recipe.seed).permutation(len(rows))[:most]
        return SomeRows(rows, np.sort(chosen))

    def snapshot(self, step: int) -> Progress:
        return Progress(
            step=step,
            trained_tokens=self.trained_tokens,
            recent_losses=tuple(self.recent_losses),
            tokens=self.tokens,
            evaluated_step=self._evaluated_step,
            best_loss=self.best.loss,
            best_step=self.best.step,
            evaluations_since_best=self.best.evaluations_since,
            valid_loss=self.valid_loss,
        )

    def restore(self, progress: Progress) -> None:
        super().restore(progress)
        self._evaluated_step = progress.evaluated_step
        self.valid_loss = progress.valid_loss
        self.best.restore(progress)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Rehearse, then announce the start. The first billed second follows."""
        if self.is_rehearsing:
            measured = rehearse(self.trainer, self.validation)
            self._save_seconds = measured.save_seconds
            self.interval_seconds = checkpoint_interval_seconds(self._spec, save_seconds=measured.save_seconds)
            self.say(
                f"Rehearsed the longest batch, an evaluation and a checkpoint in {measured.seconds:.1f} s; "
                f"a checkpoint takes {measured.save_seconds:.2f} s and is written every {self.interval_seconds:.0f} s."
            )
            if self._spec.parallelism == "single" and not self._spec.hyperparameters.cpu_offload:
                rows = self.validation or self._training
                self._samples = SampleWriter(rows, self.trainer.processing_class, self._spec.hyperparameters)
            if state.global_step == 0 and not self.is_announced:
                self.sample(0)
            # Announce the start, once per attempt, even if training begins again with smaller batches.
            if not self.is_announced:
                self._events.write(
                    TrainingStarted(
                        sequence=UNNUMBERED,
                        total_steps=state.max_steps,
                        start_step=state.global_step,
                        rows=len(self._training),
                        trained_tokens_per_epoch=self._training.n_trained,
                    )
                )
            self.is_announced = True
            self._events.write(PhaseChanged(sequence=UNNUMBERED, phase=Phase.TRAINING))
        super().on_train_begin(args, state, control, **kwargs)
        if self._evaluated_step < state.global_step and self.is_evaluation_due(state):
            self._evaluate(state, control)  # the attempt before ended between a step and its evaluation

    def sample_at_checkpoint(self, step: int) -> None:
        """Sample, unless samples have already taken their share of the time."""
        if self._sampled_seconds <= _SAMPLES_SHARE * self.watch.seconds:
            began = time.monotonic()
            self.sample(step)
            self._sampled_seconds += time.monotonic() - began

    def sample(self, step: int) -> None:
        """Report the model's answers to the same few prompts. Call it while the time is not billed.

        Training continues without samples if they fail, for example because memory runs out.
        """
        if self._samples is None or not self._samples.prompts or self._stop.is_set:
            return
        try:
            samples = self._samples.write(self.trainer.unwrapped_model)
        except Exception as error:  # noqa: BLE001 - a run does not end because of an extra
            self._samples = None
            self.say(f"There are no more samples: the model could not answer ({type(error).__name__}).", level="warn")
            return
        self._events.write(SamplesGenerated(sequence=UNNUMBERED, step=step, samples=samples))

    def say(self, message: str, *, level: str = "info") -> None:
        self._events.write(LogLine(sequence=UNNUMBERED, level=level, message=message))

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._sampler.epoch = state.global_step // self.steps_per_epoch

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        lr_scheduler: torch.optim.lr_scheduler.LRScheduler,
        **kwargs: object,
    ) -> None:
        """Evaluate before the checkpoint of the same step is written, so that it includes the evaluation."""
        super().on_step_end(args, state, control, lr_scheduler=lr_scheduler, **kwargs)
        if self.is_evaluation_due(state):
            self._evaluate(state, control)

    def is_evaluation_due(self, state: TrainerState) -> bool:
        """Return whether to evaluate: every `eval_steps` steps or at each epoch's end, and after the last step."""
        every = self._spec.hyperparameters.eval_steps or self.steps_per_epoch
        return self.validation is not None and (state.global_step % every == 0 or state.global_step >= state.max_steps)

    def is_save_due(self, now: float, state: TrainerState) -> bool:
        """Return whether to save: by the clock, or at an epoch's end if a save is short against the time since the
        last.
        """
        epochs = self._spec.hyperparameters.epochs
        every = self.steps_per_epoch * -(-epochs // _MAX_EPOCH_CHECKPOINTS)
        is_adapter = self._spec.hyperparameters.method is not Method.FULL
        is_epoch_end = self.is_rehearsing and is_adapter and state.global_step % every == 0
        is_cheap = now - self._saved_at >= max(self._save_seconds / _MAX_SAVING_SHARE, _MIN_SECONDS_APART)
        return super().is_save_due(now, state) or (is_epoch_end and is_cheap)

    def _evaluate(self, state: TrainerState, control: TrainerControl) -> None:
        [is_stopping] = self._stop.agree()
        if self.validation is None or is_stopping:
            return
        self.watch.pause()
        self._events.write(PhaseChanged(sequence=UNNUMBERED, phase=Phase.EVALUATING))
        evaluation = evaluate_rows(
            self.trainer,
            self.validation,
            should_stop=lambda: self._stop.is_set and not is_distributed(),  # processes would stop at different batches
        )
        if evaluation is not None:
            if not math.isfinite(evaluation.valid_loss):
                raise TrainingFailed(
                    FailureCode.LOSS_NOT_FINITE,
                    f"The validation loss is not a finite number at step {state.global_step}; lower the learning rate.",
                )
            self._evaluated_step, self.valid_loss = state.global_step, evaluation.valid_loss
            self._events.write(
                EvaluationCompleted(
                    sequence=UNNUMBERED,
                    step=state.global_step,
                    valid_loss=evaluation.valid_loss,
                    valid_mean_token_accuracy=evaluation.valid_mean_token_accuracy,
                )
            )
            self._stop_early(evaluation.valid_loss, state, control)
        self._events.write(PhaseChanged(sequence=UNNUMBERED, phase=Phase.TRAINING))
        self.watch.start()

    def _stop_early(self, valid_loss: float, state: TrainerState, control: TrainerControl) -> None:
        patience = self._spec.hyperparameters.early_stopping_patience
        if patience is None:
            return
        self.best.record(valid_loss, state.global_step, self.trainer)
        if self.best.evaluations_since >= patience and state.global_step < state.max_steps:
            self.is_stopped_early = control.should_training_stop = True
            control.should_save = False  # a resume from it would train on
            self.say(
                f"Stopped at step {state.global_step} of {state.max_steps}: {patience} evaluations without a better "
                f"loss than {self.best.loss:.4f} at step {self.best.step}, whose weights are kept."
            )


def evaluate_rows(
    trainer: "RunTrainer", rows: Rows | SomeRows, *, should_stop: Callable[[], bool]
) -> Evaluation | None:
    """Return loss and accuracy over the rows, or None if stopped in the middle."""
    return evaluate(
        trainer.model,
        rows,
        device=trainer.args.device,
        collate=trainer.eval_collator,
        batch_size=trainer.args.per_device_train_batch_size,
        loss_parts=trainer.loss_parts,
        should_stop=should_stop,
    )
