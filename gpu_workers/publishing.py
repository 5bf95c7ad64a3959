"""After training: run the publishing child on the exported adapter, and take what it made.

It compares base and tuned model, writes the probe of the parity certificate and merges. Whatever becomes of it, the
trained adapter is stored: without it the version has no report, and no certificate.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from apps.contracts.evaluation import EvaluationReport
from apps.contracts.runs import Export, Succeeded
from apps.contracts.struct import Struct
from apps.contracts.worker_api import JudgeAccess
from gpu_workers.events import AdapterReady
from gpu_workers.executor import Child, SubprocessExecutor
from gpu_workers.reporter import Uploader

log = logging.getLogger(__name__)

PUBLISHED_FILE = "published.json"
PUBLISHED_FOLDER = "published"
MERGED_EXPORT = "merged_16bit"
GGUF_EXPORT = "gguf"
MODULE = "gpu_workers.train.publish"
LIMIT_SECONDS = 1_800.0
_POLL_SECONDS = 0.1


class SealedFolder(Struct, frozen=True, kw_only=True):
    """A folder below the work folder, with its manifest."""

    folder: str
    manifest_sha256: str
    bytes: int


class Published(Struct, frozen=True, kw_only=True):
    """What the child leaves: the adapter with its probe, the exports asked for, the comparison.

    `notes` say which export could not be made, and why.
    """

    adapter: SealedFolder
    merged: SealedFolder | None = None
    gguf: SealedFolder | None = None
    report: EvaluationReport | None = None
    notes: tuple[str, ...] = ()


class PublishSecrets(Struct, frozen=True, kw_only=True):
    """What the child is told on its standard input and no file holds. Without `judge`, `judge_refusal` says why."""

    hub_token: str | None = None
    judge: JudgeAccess | None = None
    judge_refusal: str = ""


class Publisher:
    """Runs the child and waits for it."""

    def __init__(self, executor: SubprocessExecutor) -> None:
        self._executor = executor

    def start(self, work_dir: Path, *, secrets: PublishSecrets) -> Child:
        return self._executor.start(work_dir, hub_token=secrets.hub_token, more=msgspec.to_builtins(secrets))

    def wait(self, child: Child, work_dir: Path, *, should_stop: Callable[[], bool]) -> Published | None:
        """Return what the child made, None when it failed, took too long or was not to go on."""
        ends = time.monotonic() + LIMIT_SECONDS
        while child.poll() is None:
            if should_stop() or time.monotonic() > ends:
                child.kill()
                return None
            child.wait(_POLL_SECONDS)
        return read_published(work_dir)


def read_published(work_dir: Path) -> Published | None:
    try:
        return msgspec.json.decode((work_dir / PUBLISHED_FILE).read_bytes(), type=Published)
    except (FileNotFoundError, msgspec.DecodeError):
        log.warning("The publishing child left nothing")
        return None


def alone(ready: AdapterReady) -> Published:
    """Return the trained adapter as it is: no report, no probe."""
    return Published(
        adapter=SealedFolder(folder=ready.folder, manifest_sha256=ready.manifest_sha256, bytes=ready.bytes)
    )


def deliver(ready: AdapterReady, published: Published, work_dir: Path, uploader: Uploader) -> Succeeded:
    """Store every folder and return what to report; raises what `Uploader.store` raises."""
    places = uploader.store(work_dir / published.adapter.folder, published.adapter.manifest_sha256)
    made = ((MERGED_EXPORT, published.merged), (GGUF_EXPORT, published.gguf))
    exports = tuple(_store(kind, sealed, work_dir, uploader) for kind, sealed in made if sealed is not None)
    return Succeeded(
        upload_id=places.upload_id,
        manifest_sha256=published.adapter.manifest_sha256,
        step=ready.step,
        train_loss=ready.train_loss,
        valid_loss=ready.valid_loss,
        training_seconds=ready.training_seconds,
        trained_tokens=ready.trained_tokens,
        tokens=ready.tokens,
        peak_memory_bytes=ready.peak_memory_bytes,
        is_stopped_early=ready.is_stopped_early,
        best_step=ready.best_step,
        report=published.report,
        exports=exports,
    )


def _store(kind: str, sealed: SealedFolder, work_dir: Path, uploader: Uploader) -> Export:
    stored = uploader.store(work_dir / sealed.folder, sealed.manifest_sha256)
    return Export(kind=kind, upload_id=stored.upload_id, manifest_sha256=sealed.manifest_sha256)
