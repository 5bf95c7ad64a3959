"""Preparation of a run's folder before its child starts: fetch and verify every file, and write the spec."""

import logging
import re
from collections.abc import Callable
from pathlib import Path

import msgspec

from apps.contracts.runs import CheckpointRef, DatasetRef, RunSpec, SignedFile
from gpu_workers.common.artifacts import BrokenArtifact, verify_folder
from gpu_workers.common.base_models import locate_base_model
from gpu_workers.common.config import WorkerConfig
from gpu_workers.common.events import RESUME_FOLDER, SPEC_FILE, START_FOLDER, TRAINING_FILE, VALIDATION_FILE
from gpu_workers.common.files import PRIVATE, replace_file
from gpu_workers.common.transfers import StoreUnavailable, Transfers

log = logging.getLogger(__name__)


class CheckpointBroken(Exception):
    """The checkpoint to resume from does not match its manifest."""


def prepare(
    spec: RunSpec, work_dir: Path, config: WorkerConfig, transfers: Transfers, *, before_each: Callable[[], None]
) -> None:
    """Fetch and verify every file, and write the spec for the child, without URLs and tokens.

    `before_each` is called before each file and may raise. Raises NotInstalled, StoreUnavailable, CheckpointBroken and
    Interrupted.
    """
    base_model = locate_base_model(spec.base_model, config.base_model_roots)
    fetch = Fetch(work_dir, transfers, before_each)
    fetch.dataset(spec.training, TRAINING_FILE)
    if spec.validation is not None:
        fetch.dataset(spec.validation, VALIDATION_FILE)
    child_spec = msgspec.structs.replace(
        spec,
        base_model=msgspec.structs.replace(base_model, hub_token=None),
        training=_without_url(spec.training),
        validation=None if spec.validation is None else _without_url(spec.validation),
        resume_from=fetch.checkpoint(spec.resume_from, RESUME_FOLDER),
        start_from=fetch.checkpoint(spec.start_from, START_FOLDER),
        trackers=(),
    )
    replace_file(work_dir / SPEC_FILE, msgspec.json.encode(child_spec), mode=PRIVATE)


class Fetch:
    """Downloads into a run's folder, each file verified."""

    def __init__(self, work_dir: Path, transfers: Transfers, before_each: Callable[[], None]) -> None:
        self._work_dir = work_dir
        self._transfers = transfers
        self._before_each = before_each

    def dataset(self, dataset: DatasetRef, name: str) -> None:
        self._before_each()
        file = SignedFile(name=name, url=dataset.url, sha256=dataset.sha256, bytes=dataset.bytes)
        try:
            self._transfers.download(file, self._work_dir / name)
        except BrokenArtifact as error:
            raise StoreUnavailable(f"the dataset is not the one registered: {error}") from error

    def checkpoint(self, checkpoint: CheckpointRef | None, name: str) -> CheckpointRef | None:
        if checkpoint is None:
            return None
        folder = self._work_dir / name
        folder.mkdir(exist_ok=True)
        try:
            for file in checkpoint.files:
                self._before_each()
                self._transfers.download(file, folder / safe_name(file.name))
            verify_folder(folder, manifest_sha256=checkpoint.manifest_sha256)
        except BrokenArtifact as error:
            log.error("Checkpoint %s is broken: %s", checkpoint.id, error)
            raise CheckpointBroken(str(error)) from error
        return msgspec.structs.replace(checkpoint, files=())


def _without_url(dataset: DatasetRef) -> DatasetRef:
    return msgspec.structs.replace(dataset, url="")


def safe_name(name: str) -> str:
    """Return a safe file name, made from a name that the control plane sent."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}", name):
        raise BrokenArtifact(f"{name!r} is not a file name.")
    return name
