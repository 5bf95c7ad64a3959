"""The weights of the best evaluation so far: kept on disk, in every checkpoint, and delivered at the end."""

import os
from pathlib import Path

import peft
from safetensors.torch import load_file

from apps.contracts.runs import Method, RunSpec
from gpu_workers.train.loop.checkpoint import BEST_FILE, Progress
from gpu_workers.train.loop.trainer_protocol import ResumableTrainer
from gpu_workers.train.model.sharding import broadcast_model, is_sharded


class BestWeights:
    """The best weights so far: a lower loss is better, an equal one is not."""

    def __init__(self, work_dir: Path, spec: RunSpec) -> None:
        self.loss: float | None = None
        self.step = 0
        self.evaluations_since = 0
        self._path = work_dir / BEST_FILE
        self._spec = spec

    @property
    def file(self) -> Path | None:
        return self._path if self.loss is not None and self._path.exists() else None

    def record(self, loss: float, step: int, trainer: ResumableTrainer) -> None:
        """Record an evaluation, and save the weights if they are the best so far."""
        if self.loss is not None and not loss < self.loss:
            self.evaluations_since += 1
            return
        self.loss, self.step, self.evaluations_since = loss, step, 0
        trainer.save_trained(self._path)

    def restore(self, progress: Progress, *, folder: Path | None = None) -> None:
        """Continue from a checkpoint; `folder` holds its files."""
        self.loss, self.step = progress.best_loss, progress.best_step
        self.evaluations_since = progress.evaluations_since_best
        if folder is not None and (folder / BEST_FILE).exists() and not self._path.exists():
            os.link(folder / BEST_FILE, self._path)

    def put_back(self, trainer: ResumableTrainer) -> int | None:
        """Load the best weights into the model, unless the last ones are the best; return their step."""
        if self.loss is None or self.step == trainer.state.global_step:
            return None
        tensors = load_file(self.file) if self.file else {}  # the first machine of a group has the file, and delivers
        if is_sharded(trainer.model):
            broadcast_model(trainer.model, tensors)
        elif tensors and self._spec.hyperparameters.method is Method.FULL:
            trainer.unwrapped_model.load_state_dict(tensors, strict=False)
        elif tensors:
            peft.set_peft_model_state_dict(trainer.unwrapped_model, tensors)
        return self.step
