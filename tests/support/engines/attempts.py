"""A training attempt in this process, on a few rows."""

import shutil
from pathlib import Path

import msgspec
import safetensors.torch
import torch

from apps.contracts.hyperparameters import Hyperparameters
from apps.contracts.runs import BaseModelRef, CheckpointRef, DatasetRef, Event, RunSpec
from gpu_workers.common.events import (
    ADAPTER_FOLDER,
    CHECKPOINTS_FOLDER,
    EVENTS_FILE,
    RESUME_FOLDER,
    START_FOLDER,
    TRAINING_FILE,
    VALIDATION_FILE,
    ChildOutcome,
    EventTail,
)
from gpu_workers.train.attempt import Attempt
from gpu_workers.train.loop.callbacks import StopFlag
from tests.support.engines.rows import SMALL

ELSEWHERE = CheckpointRef(id="ckpt_1", step=0, manifest_sha256="", files=())


class Tried:
    """What an attempt left in its folder."""

    def __init__(self, work_dir: Path, outcome: ChildOutcome) -> None:
        self.work_dir = work_dir
        self.outcome = outcome
        self.events: list[Event] = EventTail(work_dir / EVENTS_FILE).read()

    def of(self, kind: type) -> list:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def result(self) -> Path:
        return self.work_dir / ADAPTER_FOLDER

    @property
    def newest_checkpoint(self) -> Path:
        return max(self.work_dir.glob(f"{CHECKPOINTS_FOLDER}/*"), key=lambda path: int(path.name.split("-")[1]))

    def tensors(self) -> dict[str, torch.Tensor]:
        [file] = self.result.glob("*.safetensors")
        return safetensors.torch.load_file(file)


def attempt(
    work_dir: Path,
    model: Path,
    rows: bytes,
    *,
    recipe: Hyperparameters = SMALL,
    validation: bytes | None = None,
    resume: Path | None = None,
    start: Path | None = None,
    stop: StopFlag | None = None,
    **changes: object,
) -> Tried:
    """Run an attempt to its end; raises what it raises."""
    work_dir.mkdir(parents=True, exist_ok=True)
    prepare(work_dir, rows, validation=validation)
    for folder, name in ((resume, RESUME_FOLDER), (start, START_FOLDER)):
        if folder is not None:
            shutil.copytree(folder, work_dir / name)
    spec = make_run_spec(model, recipe, has_validation=validation is not None, **changes)
    spec = msgspec.structs.replace(
        spec, resume_from=ELSEWHERE if resume else None, start_from=ELSEWHERE if start else None
    )
    trial = Attempt(spec, work_dir, stop or StopFlag(), hub_token=None)
    try:
        return Tried(work_dir, trial.run())
    finally:
        trial.close()


def prepare(work_dir: Path, rows: bytes, *, validation: bytes | None = None) -> None:
    (work_dir / TRAINING_FILE).write_bytes(rows)
    if validation is not None:
        (work_dir / VALIDATION_FILE).write_bytes(validation)


def make_run_spec(model: Path, recipe: Hyperparameters, *, has_validation: bool = False, **changes: object) -> RunSpec:
    nothing = DatasetRef(id="ds", sha256="", bytes=0, rows=0, url="")
    fields = {
        "run_id": "run_1",
        "job_id": "ftjob-1",
        "organization_id": "org_1",
        "attempt": 1,
        "base_model": BaseModelRef(id="bm_1", name="tiny", path=str(model)),
        "training": nothing,
        "validation": nothing if has_validation else None,
        "hyperparameters": recipe,
    }
    return RunSpec(**fields | changes)  # type: ignore[arg-type]
