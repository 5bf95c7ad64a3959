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
from apps.contracts.struct import Struct
from gpu_workers.executor import Child, SubprocessExecutor

log = logging.getLogger(__name__)

PUBLISHED_FILE = "published.json"
PUBLISHED_FOLDER = "published"
MERGED_EXPORT = "merged_16bit"
MODULE = "gpu_workers.train.publish"
LIMIT_SECONDS = 1_800.0
_POLL_SECONDS = 0.1


class SealedFolder(Struct, frozen=True, kw_only=True):
    """A folder below the work folder, with its manifest."""

    folder: str
    manifest_sha256: str
    bytes: int


class Published(Struct, frozen=True, kw_only=True):
    """What the child leaves: the adapter with its probe, the merged model where asked for, the comparison."""

    adapter: SealedFolder
    merged: SealedFolder | None = None
    report: EvaluationReport | None = None


class Publisher:
    """Runs the child and waits for it."""

    def __init__(self, executor: SubprocessExecutor) -> None:
        self._executor = executor

    def start(self, work_dir: Path, *, hub_token: str | None) -> Child:
        return self._executor.start(work_dir, hub_token=hub_token)

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
