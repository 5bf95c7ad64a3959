"""One attempt from its files to its result: encode, load, train, export.

If memory runs out, it continues with a smaller recipe.
"""

import gc
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from transformers import set_seed

from apps.contracts.chat import ChatRenderer
from apps.contracts.failures import FailureCode
from apps.contracts.hyperparameters import Hyperparameters
from apps.contracts.runs import LogLine, Manifest, Phase, PhaseChanged, RunSpec, Stopped
from gpu_workers.common.artifacts import BrokenArtifact, folder_bytes, read_manifest
from gpu_workers.common.events import (
    ADAPTER_FOLDER,
    CHECKPOINTS_FOLDER,
    EVENTS_FILE,
    RESUME_FOLDER,
    START_FOLDER,
    TRAINING_FILE,
    UNNUMBERED,
    AdapterReady,
    ChildOutcome,
    EventWriter,
)
from gpu_workers.train.data.encoding import load_renderer
from gpu_workers.train.data.rows import Rows, encode
from gpu_workers.train.data.selection import select_rows
from gpu_workers.train.failure_codes import is_out_of_memory
from gpu_workers.train.failures import StopRequested, TrainingFailed
from gpu_workers.train.loop.base_trainer import RunTrainer
from gpu_workers.train.loop.callbacks import StopFlag
from gpu_workers.train.loop.checkpoint import (
    IncompleteCheckpoint,
    Progress,
    explain_inexact_resume,
    open_checkpoint,
)
from gpu_workers.train.loop.launch import Rank
from gpu_workers.train.loop.process_group import first_rank_first
from gpu_workers.train.loop.sft import build_trainer, count_steps, micro_batch_size
from gpu_workers.train.model.attention import attention_of
from gpu_workers.train.model.base_model import fetch_base_model
from gpu_workers.train.model.hardware import choose_engine, detect
from gpu_workers.train.model.loading import load_model
from gpu_workers.train.model.memory import peak_memory_bytes
from gpu_workers.train.model.sharding import gather_trained, is_sharded
from gpu_workers.train.model.weights import export_result


class Attempt:
    """The phases of one attempt, in order."""

    def __init__(
        self, spec: RunSpec, work_dir: Path, stop: StopFlag, *, hub_token: str | None, rank: Rank | None = None
    ) -> None:
        self._spec = spec
        self._work_dir = work_dir
        self._stop = stop
        self._hub_token = hub_token
        self._rank = rank or Rank()
        self._events = EventWriter(work_dir / EVENTS_FILE if self._rank.is_first else Path(os.devnull))
        self._is_engine_told = False
        self._is_announced = False
        self._is_shrunk = False
        self.start_step = 0
        self._spent_seconds = 0.0
        self._base_folder = Path()

    def run(self) -> ChildOutcome:
        """Load, train, export; raises TrainingFailed or StopRequested."""
        self._enter(Phase.DOWNLOADING)
        with first_rank_first(self._rank):
            folder = self._base_folder = fetch_base_model(self._spec.base_model, hub_token=self._hub_token)
        self._enter(Phase.LOADING)
        training, validation = self._encode_both(folder)
        resume = self._work_dir / RESUME_FOLDER if self._spec.resume_from is not None else None
        while True:
            resumed = self._open_resume(resume)
            self._check_stop()
            trainer = self._build(folder, training, validation)
            try:
                return self._train(trainer, resume, resumed)
            except (RuntimeError, MemoryError) as error:
                # The other machines of a group know nothing of it, nor have they its checkpoints. The processes of this
                # machine rehearse the same rows, but then each trains on its own: one may run out alone.
                has_trained = self._rank.count > 1 and trainer.progress.is_announced
                if not is_out_of_memory(error) or self._spec.group is not None or has_trained:
                    raise
                self._spent_seconds = max(self._spent_seconds, trainer.progress.saved_seconds)
                self._is_announced = trainer.progress.is_announced
                smaller = _smaller(self._spec.hyperparameters, gpu_count=self._spec.gpu_count)
                if smaller is None:
                    raise
            del trainer
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            resume = self._shrink(smaller, resume)

    def close(self) -> None:
        self._events.close()

    def _build(self, folder: Path, training: Rows, validation: Rows | None) -> RunTrainer:
        recipe = self._spec.hyperparameters
        steps = count_steps(len(training), recipe)
        engine = choose_engine(detect(), recipe, steps=steps, attention=attention_of(folder))
        if not self._is_engine_told:
            for reason in engine.reasons:
                self._say("info", reason)
        self._is_engine_told = True
        set_seed(recipe.seed)
        trainer = build_trainer(
            model=load_model(
                folder,
                recipe,
                start=self._work_dir / START_FOLDER if self._spec.start_from is not None else None,
                engine=engine,
                is_sharded=self._spec.parallelism == "fsdp",
                copies=self._spec.model_copies,
            ),
            folder=folder,
            training=training,
            validation=validation,
            spec=self._spec,
            work_dir=self._work_dir,
            events=self._events,
            stop=self._stop,
            engine=engine,
        )
        trainer.progress.is_rehearsing = True
        trainer.progress.is_announced = self._is_announced
        trainer.progress.watch.go_on_from(self._spent_seconds)
        return trainer

    def _train(self, trainer: RunTrainer, resume: Path | None, resumed: Progress | None) -> ChildOutcome:
        if resumed is not None:
            trainer.progress.restore(resumed)
            trainer.progress.best.restore(resumed, folder=resume)
        self._check_stop()
        trainer.train(resume_from_checkpoint=str(resume) if resumed else None)
        step, total_steps = trainer.state.global_step, trainer.state.max_steps
        trainer.progress.watch.pause()
        if step < total_steps and self._stop.is_set:
            return Stopped(
                reason="stopped",
                step=step,
                training_seconds=trainer.progress.watch.seconds,
                trained_tokens=trainer.progress.trained_tokens,
                tokens=trainer.progress.tokens,
                peak_memory_bytes=peak_memory_bytes(),
            )
        if step != total_steps and not trainer.progress.is_stopped_early:
            message = f"Training ended at step {step} of {total_steps}."
            raise TrainingFailed(FailureCode.INCOMPLETE_TRAINING, message)
        return self._export(trainer, step)

    def _shrink(self, smaller: Hyperparameters, resume: Path | None) -> Path | None:
        """Switch to the smaller recipe, and to the newest checkpoint of this attempt or the one that it began with."""
        rows = micro_batch_size(smaller)
        self._is_shrunk = True
        self._spec = msgspec.structs.replace(self._spec, hyperparameters=smaller)
        newest = max((self._work_dir / CHECKPOINTS_FOLDER).glob("checkpoint-*"), key=_step_of, default=resume)
        where = f"from step {_step_of(newest)}" if newest and newest != resume else "from where it began"
        self._say(
            "warn",
            f"Memory ran out. Going on {where} with {rows} row{'s' if rows > 1 else ''} at a time, gradient "
            f"checkpointing on and the same {smaller.batch_size} rows a step: slower, the same result.",
        )
        return newest

    def _export(self, trainer: RunTrainer, step: int) -> AdapterReady:
        best_step = trainer.progress.best.put_back(trainer)
        trainer.progress.sample(step if best_step is None else best_step)
        folder = self._work_dir / ADAPTER_FOLDER
        weights = gather_trained(trainer.model) if is_sharded(trainer.model) else None
        digest = ""
        if self._rank.is_first:
            digest = export_result(
                folder,
                trainer.unwrapped_model,
                self._spec,
                step=step,
                base_folder=self._base_folder,
                state_dict=weights,
            )
        return AdapterReady(
            folder=ADAPTER_FOLDER,
            manifest_sha256=digest,
            bytes=folder_bytes(read_manifest(folder)) if self._rank.is_first else 0,
            step=step,
            training_seconds=trainer.progress.watch.seconds,
            trained_tokens=trainer.progress.trained_tokens,
            tokens=trainer.progress.tokens,
            train_loss=trainer.progress.mean_recent_loss,
            valid_loss=trainer.progress.valid_loss if best_step is None else trainer.progress.best.loss,
            peak_memory_bytes=peak_memory_bytes(),
            is_stopped_early=trainer.progress.is_stopped_early,
            best_step=best_step,
            base_bytes=sum(file.stat().st_size for file in self._base_folder.glob("*.safetensors")),
        )

    def _open_resume(self, folder: Path | None) -> Progress | None:
        if folder is None:
            return None
        try:
            manifest, progress = open_checkpoint(folder)
        except (BrokenArtifact, IncompleteCheckpoint) as error:
            raise TrainingFailed(FailureCode.CHECKPOINT_INVALID, f"The checkpoint cannot be used: {error}") from error
        if folder.name == RESUME_FOLDER and not self._is_shrunk:  # else its plan was too big
            adopted = _adopted(manifest, self._spec)
            self._spec = msgspec.structs.replace(self._spec, hyperparameters=adopted)
        changed = explain_inexact_resume(manifest, self._spec)
        if changed is not None:
            self._say("warn", f"Resumed from step {progress.step}, not bit-exact: {changed} changed.")
        else:
            self._say("info", f"Resumed from step {progress.step}.")
        self.start_step = progress.step
        return progress

    def _encode_both(self, folder: Path) -> tuple[Rows, Rows | None]:
        """Return the rows for training and those for validation."""
        renderer = load_renderer(folder, self._spec.base_model.chat_template)
        selection = select_rows(self._work_dir, self._spec)
        for level, message in selection.notes:
            self._say(level, message)
        training = self._encode(TRAINING_FILE, renderer, keep=selection.training)
        if selection.validation_file is None:
            return training, None
        try:
            return training, self._encode(selection.validation_file, renderer, keep=selection.validation)
        except TrainingFailed as error:
            if error.code is not FailureCode.NO_TRAINABLE_TOKENS:
                raise
            limit = self._spec.hyperparameters.max_length
            self._say("warn", f"No validation row has a trained token within {limit} tokens, so none is evaluated.")
            return training, None

    def _encode(self, name: str, renderer: ChatRenderer, *, keep: Sequence[bool] | None) -> Rows:
        recipe = self._spec.hyperparameters
        rows = encode(self._work_dir / name, renderer, recipe, keep=keep)
        if rows.n_truncated:
            self._say("warn", f"{rows.n_truncated} rows were cut to {recipe.max_length} tokens.")
        if rows.n_dropped:
            self._say("warn", f"{rows.n_dropped} rows were left out: nothing trained remains after truncation.")
        return rows

    def _enter(self, phase: Phase) -> None:
        self._check_stop()
        self._events.write(PhaseChanged(sequence=UNNUMBERED, phase=phase))

    def _say(self, level: str, message: str) -> None:
        self._events.write(LogLine(sequence=UNNUMBERED, level=level, message=message))

    def _check_stop(self) -> None:
        if self._stop.is_set:
            raise StopRequested


def _smaller(recipe: Hyperparameters, *, gpu_count: int) -> Hyperparameters | None:
    """Return the recipe with half the micro-batch and checkpointing on, or None if nothing smaller is left."""
    per_gpu = micro_batch_size(recipe) // gpu_count
    accumulation = recipe.gradient_accumulation_steps
    if per_gpu > 1:
        accumulation = _accumulation(recipe, at_least=2 * accumulation, gpu_count=gpu_count)
    elif recipe.gradient_checkpointing:
        return None
    return msgspec.structs.replace(recipe, gradient_accumulation_steps=accumulation, gradient_checkpointing=True)


def _adopted(manifest: Manifest, spec: RunSpec) -> Hyperparameters:
    """Return the recipe with at most as many rows at a time as the checkpoint, if nothing else differs.

    An attempt that ran out of memory used fewer rows, so the next attempt does not run out of memory again. The
    checkpoint may be from another number of GPUs.
    """
    recipe, stored = spec.hyperparameters, manifest.metadata.get("hyperparameters")
    then = msgspec.json.decode(stored, type=Hyperparameters) if stored else recipe
    accumulation, was_count = then.gradient_accumulation_steps, int(manifest.metadata.get("processes", spec.gpu_count))
    if was_count != spec.gpu_count:
        least = -(-accumulation * was_count // spec.gpu_count)
        accumulation = _accumulation(recipe, at_least=least, gpu_count=spec.gpu_count)
    adopted = msgspec.structs.replace(
        recipe,
        gradient_accumulation_steps=max(recipe.gradient_accumulation_steps, accumulation),
        gradient_checkpointing=recipe.gradient_checkpointing or then.gradient_checkpointing,
    )
    return adopted if _without_plan(adopted) == _without_plan(then) else recipe


def _without_plan(recipe: Hyperparameters) -> Hyperparameters:
    return msgspec.structs.replace(recipe, gradient_accumulation_steps=1, gradient_checkpointing=False)


def _accumulation(recipe: Hyperparameters, *, at_least: int, gpu_count: int) -> int:
    """Return the smallest number of micro-batches from `at_least` on into which the GPUs divide the batch evenly."""
    rows = recipe.batch_size
    numbers = range(at_least, rows + 1)
    return next((each for each in numbers if rows % (each * gpu_count) == 0 or each * gpu_count >= rows), at_least)


def _step_of(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2]) if "-" in folder.name else 0
