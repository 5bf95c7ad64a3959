"""The base of every objective's trainer: a resumable order of rows, and checkpoints that are whole or absent."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import torch.distributed
from accelerate import Accelerator
from torch.utils.data import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainerState, TrainingArguments

from apps.contracts.runs import RunSpec
from gpu_workers.common.artifacts import folder_bytes, read_manifest
from gpu_workers.common.events import CHECKPOINTS_FOLDER, UNNUMBERED, CheckpointReady, EventWriter
from gpu_workers.common.pulse import beat
from gpu_workers.train.data.encoding import ShuffledSampler, TokenRow
from gpu_workers.train.data.rows import PairRow, Rows
from gpu_workers.train.loop.checkpoint import RANDOM_FILE, TrainingState, save_checkpoint
from gpu_workers.train.loop.process_group import is_distributed
from gpu_workers.train.loop.random_state import gather_states, load_state, restore_state
from gpu_workers.train.loop.run_callback import RunCallback
from gpu_workers.train.model.sharding import (
    average_gradients,
    gather_optimizer,
    gather_trained,
    is_sharded,
    scatter_model,
    scatter_optimizer,
)
from gpu_workers.train.model.weights import MODEL_FILE, save_trained


class RunTrainer:
    """A mixin for TRL's trainers, placed before them. The builder sets `progress`, `events` and `eval_collator`."""

    model: torch.nn.Module
    model_wrapped: torch.nn.Module
    args: TrainingArguments
    accelerator: Accelerator
    data_collator: Callable[..., dict[str, torch.Tensor]]
    current_gradient_accumulation_steps: int
    optimizer: torch.optim.Optimizer
    lr_scheduler: torch.optim.lr_scheduler.LRScheduler
    add_callback: Callable[[TrainerCallback], None]
    train: Callable[..., Any]
    state: TrainerState
    processing_class: PreTrainedTokenizerBase
    progress: RunCallback
    events: EventWriter
    eval_collator: Callable[..., dict[str, torch.Tensor]]  # makes a batch of validation rows
    _rows: Rows

    def __init__(
        self, *args: object, spec: RunSpec, work_dir: Path, sampler: ShuffledSampler, **kwargs: object
    ) -> None:
        self.spec = spec
        self.work_dir = work_dir
        self._sampler = sampler
        super().__init__(*args, **kwargs)

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> ShuffledSampler:
        return self._sampler

    def loss_parts(
        self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return a batch's summed loss, the number of correct predictions, and the number scored."""
        raise NotImplementedError

    def longest_rows(self) -> Sequence[TokenRow] | Sequence[PairRow]:
        """Return the micro-batch that needs the most memory, as input of the collator."""
        size = self.args.per_device_train_batch_size
        return self._rows.items(np.argsort(self._rows.lengths, kind="stable")[-size:])

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: torch.Tensor | None = None) -> torch.Tensor:
        """Record the gradient norm. Called once per optimizer step, whether or not gradients are clipped."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)  # type: ignore[misc]
        self.progress.window.grad_norm = norm
        self.progress.window.steps += 1
        return norm

    def training_step(
        self,
        model: torch.nn.Module,
        inputs: dict[str, torch.Tensor],
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
        beat()
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Keep nothing, because the log history would grow with every step and be part of every checkpoint."""

    def write_checkpoint(self, root: Path) -> tuple[Path, str] | None:
        """Write everything that a resume needs.

        Every process must call this; the first one writes and gets the folder.
        """
        sharded = is_sharded(self.model)
        weights = gather_trained(self.model) if sharded else None
        optimizer_state = gather_optimizer(self.model, self.optimizer) if sharded else None
        random_states, written = gather_states(), None
        if self.args.process_index == 0:
            state = TrainingState(
                model=self.unwrapped_model,
                optimizer=self.optimizer,
                scheduler=self.lr_scheduler,
                trainer_state=self.state,
                progress=self.progress.snapshot(self.state.global_step),
                best_weights=self.progress.best.file,
                random_states=random_states,
                state_dict=weights,
                optimizer_state=optimizer_state,
                scaler=self.accelerator.scaler,
            )
            written = save_checkpoint(root, self.spec, state)
        if is_distributed():
            torch.distributed.barrier()
        return written

    def _sync_replicated_trainable_parameters(self, model: torch.nn.Module) -> None:
        average_gradients(model, self.accelerator)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            restore_state(load_state(Path(checkpoint) / RANDOM_FILE, process=self.args.process_index))

    def _load_scaler(self, checkpoint: str | None) -> None:
        if self.accelerator.scaler is not None:  # the run before may have trained in float16, and this one may not
            super()._load_scaler(checkpoint)  # type: ignore[misc]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        if is_sharded(self.model):
            return scatter_model(self.model, Path(resume_from_checkpoint) / MODEL_FILE)
        return super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not is_sharded(self.model):
            return super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        scatter_optimizer(self.model, self.optimizer, Path(checkpoint) / "optimizer.pt")
        scheduler = torch.load(Path(checkpoint) / "scheduler.pt", map_location="cpu", weights_only=True)
        return self.lr_scheduler.load_state_dict(scheduler)

    def save_trained(self, path: Path) -> None:
        """Write the current trained weights, for the first process to read."""
        weights = gather_trained(self.model) if is_sharded(self.model) else None
        if self.args.process_index == 0:
            save_trained(path, self.unwrapped_model, self.spec, state_dict=weights)
        if is_distributed():
            torch.distributed.barrier()

    @property
    def unwrapped_model(self) -> PreTrainedModel | peft.PeftModel:
        return self.accelerator.unwrap_model(self.model)

    def _save_checkpoint(self, model: torch.nn.Module, trial: object) -> None:
        progress, step = self.progress, self.state.global_step
        progress.watch.pause()
        written = self.write_checkpoint(self.work_dir / CHECKPOINTS_FOLDER)
        progress.record_saved(step)
        if written is not None:
            folder, digest = written
            self.events.write(
                CheckpointReady(
                    sequence=UNNUMBERED,
                    step=step,
                    folder=f"{CHECKPOINTS_FOLDER}/{folder.name}",
                    manifest_sha256=digest,
                    bytes=folder_bytes(read_manifest(folder)),
                    trained_tokens=progress.trained_tokens,
                    training_seconds=progress.watch.seconds,
                    train_loss=progress.mean_recent_loss,
                )
            )
        progress.sample_at_checkpoint(step)
        progress.watch.start()
