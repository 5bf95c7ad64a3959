"""The rehearsal before the first billed second: the worst step, an evaluation and a checkpoint, run and undone.

If one of them does not fit or fails, this shows now and not after hours.
"""

import math
import shutil
import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from apps.contracts.runs import RunSpec, Struct
from gpu_workers.train.data.rows import Rows, SomeRows
from gpu_workers.train.loop.callbacks import Window
from gpu_workers.train.loop.evaluation import evaluate
from gpu_workers.train.loop.random_state import read_state, restore_state

if TYPE_CHECKING:  # the trainer imports this module
    from gpu_workers.train.loop.base_trainer import RunTrainer

_FOLDER = "rehearsal"
_MIN_INTERVAL_SECONDS = 15.0
_MAX_SHARE = 0.02  # the largest share of the time for saving, however often a pool fails


class Rehearsal(Struct, frozen=True, kw_only=True):
    seconds: float
    save_seconds: float


def rehearse(trainer: "RunTrainer", validation: Rows | SomeRows | None) -> Rehearsal:
    """Run one of each and leave no trace: weights, gradients and random numbers are as before."""
    started = time.monotonic()
    numbers = read_state()
    try:
        # Run forward and backward with the optimizer's state in memory, as in every step but the first.
        state = [(torch.zeros_like(p), torch.zeros_like(p)) for p in trainer.model.parameters() if p.requires_grad]
        batch = trainer.data_collator(trainer.longest_rows())
        trainer.current_gradient_accumulation_steps = 1  # set by the loop, which has not started yet
        trainer.training_step(trainer.model_wrapped, batch)
        del state, batch
        if validation is not None:
            size = trainer.args.per_device_train_batch_size
            longest = np.argsort(validation.lengths, kind="stable")[-size:]
            evaluate(
                trainer.model,
                SomeRows(validation, longest),
                device=trainer.args.device,
                collate=trainer.eval_collator,
                batch_size=size,
                loss_parts=trainer.loss_parts,
                should_stop=lambda: False,
            )
        save_seconds = _save(trainer)
    finally:
        trainer.model.zero_grad(set_to_none=True)
        trainer.progress.window = Window()
        restore_state(numbers)
    return Rehearsal(seconds=time.monotonic() - started, save_seconds=save_seconds)


def checkpoint_interval_seconds(spec: RunSpec, *, save_seconds: float) -> float:
    """Return the time between checkpoints that loses the least time: Daly's first order, sqrt(2 d M) - d.

    It is at most the control plane's interval, which also applies without a measured failure rate. (Daly 2006, doi
    10.1016/j.future.2004.11.016; Young 1974 is the same without the last term.)
    """
    asked = float(spec.checkpoint_interval_seconds)
    if spec.seconds_between_failures is None:
        return asked
    best = math.sqrt(2 * save_seconds * spec.seconds_between_failures) - save_seconds
    least = max(_MIN_INTERVAL_SECONDS, save_seconds / _MAX_SHARE)
    return min(max(best, least), max(asked, least))


def _save(trainer: "RunTrainer") -> float:
    root = trainer.work_dir / _FOLDER
    started = time.monotonic()
    try:
        trainer.write_checkpoint(root)
        return time.monotonic() - started
    finally:
        if trainer.args.process_index == 0:
            shutil.rmtree(root, ignore_errors=True)
