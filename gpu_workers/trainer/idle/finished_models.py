"""Parts of a model that was finished earlier or elsewhere, made by the same children as after a training."""

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from apps.contracts.hyperparameters import Hyperparameters
from apps.contracts.runs import BaseModelRef, CheckpointRef, DatasetRef, RunSpec
from gpu_workers.common.events import ADAPTER_FOLDER, SPEC_FILE, AdapterReady
from gpu_workers.common.files import PRIVATE, replace_file
from gpu_workers.common.transfers import Transfers
from gpu_workers.trainer.preparation import Fetch
from gpu_workers.trainer.progress_watch import ProgressWatch
from gpu_workers.trainer.publication import Published, Publisher, PublishSecrets

_STALL_SECONDS = 600.0


def fetch_model(model: CheckpointRef, work_dir: Path, should_stop: Callable[[], bool]) -> None:
    """Download the model's files and check them. Raises StoreUnavailable, CheckpointBroken, Interrupted."""
    transfers = Transfers(should_stop=should_stop)
    try:
        Fetch(work_dir, transfers, lambda: None).checkpoint(model, ADAPTER_FOLDER)
    finally:
        transfers.close()


def publish_parts(
    publisher: Publisher,
    parts: Sequence[str],
    work_dir: Path,
    *,
    id: str,
    base: BaseModelRef,
    adapter: CheckpointRef,
    recipe: Hyperparameters,
    device: str,
    should_stop: Callable[[], bool],
    rows: int = 0,
    base_bytes: int = 0,
) -> Published:
    """Make the parts of the model in `work_dir` on one device. `rows` lie in its training file.

    `base_bytes` of the base model's files lengthen the time limit of a part.
    """
    spec = RunSpec(
        run_id=id,
        job_id=id,
        organization_id="",
        attempt=1,
        base_model=msgspec.structs.replace(base, hub_token=None),
        training=DatasetRef(id=id, sha256="", bytes=0, rows=rows, url=""),
        hyperparameters=recipe,
    )
    replace_file(work_dir / SPEC_FILE, msgspec.json.encode(spec), mode=PRIVATE)
    ready = AdapterReady(
        folder=ADAPTER_FOLDER, manifest_sha256=adapter.manifest_sha256, bytes=0, step=0, training_seconds=0.0,
        trained_tokens=0, base_bytes=base_bytes,
    )  # fmt: skip
    return publisher.publish(
        spec,
        ready,
        work_dir,
        devices=[device],
        secrets=lambda part: PublishSecrets(part=part, hub_token=base.hub_token),
        should_stop=should_stop,
        begun=lambda child: None,
        watch=ProgressWatch(least_seconds=_STALL_SECONDS),
        parts=parts,
    )
