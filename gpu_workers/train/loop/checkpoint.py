"""Checkpoints that are whole or absent: everything an exact resume needs, hashed, flushed, renamed into place.

The weights of the best evaluation are part of it.
"""

import importlib.metadata
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import peft
import torch
from safetensors.torch import load_file
from transformers.trainer_callback import TrainerState

from apps.contracts.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from apps.contracts.hyperparameters import Method
from apps.contracts.runs import Manifest, RunSpec
from gpu_workers.common.artifacts import MANIFEST_FILE, seal_folder, verify_folder
from gpu_workers.train.loop.random_state import State, save_states
from gpu_workers.train.model.sharding import broadcast_model, is_sharded
from gpu_workers.train.model.weights import MODEL_FILE, write_weights

if TYPE_CHECKING:  # the trainer imports this module
    from gpu_workers.train.loop.base_trainer import RunTrainer

PROGRESS_FILE = "progress.json"
BEST_FILE = "best.safetensors"
RANDOM_FILE = "rng_state.pth"
SCALER_FILE = "scaler.pt"  # transformers' name: its trainer reads the file on a resume
KEPT = 2

# Files that transformers does not require for a resume: it continues silently with a wrong state.
_REQUIRED = {
    "optimizer.pt",
    "scheduler.pt",
    RANDOM_FILE,
    "trainer_state.json",
    PROGRESS_FILE,
}


class IncompleteCheckpoint(Exception):
    """The folder is sealed but lacks a part that an exact resume needs."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Counts over the whole job, across attempts."""

    step: int
    trained_tokens: int
    recent_losses: tuple[float, ...] = ()
    evaluated_step: int = 0
    best_loss: float | None = None
    best_step: int = 0
    evaluations_since_best: int = 0
    valid_loss: float | None = None  # of the last evaluation
    tokens: int | None = None  # None: written before tokens were counted, so the job's total is unknown


class TrainingState(msgspec.Struct, kw_only=True):
    """The live objects that a checkpoint is made of."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    trainer_state: TrainerState
    progress: Progress
    random_states: Sequence[State]  # of all processes
    best_weights: Path | None = None
    state_dict: dict[str, torch.Tensor] | None = None  # gathered, if the live tensors are shards
    optimizer_state: dict[str, object] | None = None  # likewise
    scaler: torch.amp.GradScaler | None = None  # of training in float16


def save_checkpoint(root: Path, spec: RunSpec, state: TrainingState) -> tuple[Path, str]:
    """Write `checkpoint-<step>` below `root`, keep the newest two; return its folder and manifest SHA-256."""
    root.mkdir(parents=True, exist_ok=True)
    step = state.progress.step
    temporary, final = root / f"tmp-{step}", root / f"checkpoint-{step}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    write_weights(temporary, state.model, spec, dtype=torch.float32, state_dict=state.state_dict)
    torch.save(state.optimizer_state or state.optimizer.state_dict(), temporary / "optimizer.pt")
    torch.save(state.scheduler.state_dict(), temporary / "scheduler.pt")
    if state.scaler is not None:
        torch.save(state.scaler.state_dict(), temporary / SCALER_FILE)
    save_states(state.random_states, temporary / RANDOM_FILE)
    state.trainer_state.save_to_json(str(temporary / "trainer_state.json"))
    (temporary / PROGRESS_FILE).write_bytes(msgspec.json.encode(state.progress))
    if state.best_weights is not None:
        os.link(state.best_weights, temporary / BEST_FILE)
    digest = seal_folder(
        temporary,
        final,
        lambda files: Manifest(
            kind="checkpoint",
            run_id=spec.run_id,
            attempt=spec.attempt,
            step=step,
            files=files,
            metadata=geometry(spec),
        ),
    )
    whole = [path for path in root.glob("checkpoint-*") if (path / MANIFEST_FILE).exists()]
    for path in sorted(whole, key=lambda path: int(path.name.rpartition("-")[2]))[:-KEPT]:
        shutil.rmtree(path)
    return final, digest


def open_checkpoint(folder: Path) -> tuple[Manifest, Progress]:
    """Verify every hash and that no file is missing; raises BrokenArtifact or IncompleteCheckpoint."""
    manifest = verify_folder(folder)
    names = {file.name for file in manifest.files}
    weights = {MODEL_FILE} if MODEL_FILE in names else {WEIGHTS_FILE, CONFIG_FILE}
    missing = (_REQUIRED | weights) - names
    if missing:
        raise IncompleteCheckpoint(f"The checkpoint lacks {', '.join(sorted(missing))}.")
    return manifest, msgspec.json.decode((folder / PROGRESS_FILE).read_bytes(), type=Progress)


def geometry(spec: RunSpec) -> dict[str, str]:
    """Return the conditions that must be equal for a resumed run to be bit-exact."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "peft", "trl")}
    if spec.validation is not None:  # its rows and near duplicates are not trained on
        versions |= {"validation_sha256": spec.validation.sha256, "left_out": "equal and near copies"}
    return versions | {
        "hyperparameters": msgspec.json.encode(spec.hyperparameters).decode(),
        "dataset_sha256": spec.training.sha256,
        "base_model": f"{spec.base_model.id}@{spec.base_model.revision or ''}",
        "processes": str(spec.gpu_count),
        "threads": str(torch.get_num_threads()),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def explain_inexact_resume(manifest: Manifest, spec: RunSpec) -> str | None:
    """Return which conditions changed since the checkpoint, or None if the resume is exact."""
    now = geometry(spec)
    then = {"processes": now["processes"]} | manifest.metadata  # which earlier releases did not name
    changed = sorted(name for name, value in now.items() if then.get(name) != value)
    return ", ".join(changed) or None


class BestWeights:
    """The weights of the best evaluation so far, kept in a file and delivered at the end.

    A lower loss is better; an equal one is not.
    """

    def __init__(self, work_dir: Path, spec: RunSpec) -> None:
        self.loss: float | None = None
        self.step = 0
        self.evaluations_since = 0
        self._path = work_dir / BEST_FILE
        self._spec = spec

    @property
    def file(self) -> Path | None:
        return self._path if self.loss is not None and self._path.exists() else None

    def record(self, loss: float, step: int, trainer: "RunTrainer") -> None:
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

    def put_back(self, trainer: "RunTrainer") -> int | None:
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
