"""Delivery of numbered events to the control plane, and of checkpoints and results to the object store."""

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from apps.contracts.runs import CheckpointSaved, Export, LogLine, MissingPart, RunEvent, StepCompleted, Succeeded
from apps.contracts.worker_api import UploadRequest, UploadResponse
from gpu_workers.common.api_client import ApiClient, ApiError, Lease, StaleLease, Unauthorized, Unavailable
from gpu_workers.common.artifacts import read_manifest
from gpu_workers.common.events import UNNUMBERED, AdapterReady, CheckpointReady
from gpu_workers.common.transfers import Interrupted, StoreUnavailable, Transfers
from gpu_workers.trainer.lease_keeper import LeaseKeeper
from gpu_workers.trainer.publication import Published

log = logging.getLogger(__name__)

_SEND_EVERY_SECONDS = 0.5
_BATCH_EVENTS = 200
_BUFFER_EVENTS = 4000


class Durable(msgspec.Struct, frozen=True, kw_only=True):
    """The progress that the control plane has confirmed. Billing never exceeds it unless the adapter itself arrives."""

    step: int = 0
    training_seconds: float = 0.0
    trained_tokens: int = 0


class Reporter:
    """Sends events in order, each until it is accepted.

    It has its own thread, because a slow network must not delay a fence.
    """

    def __init__(self, api: ApiClient, lease: Lease, keeper: LeaseKeeper) -> None:
        self._api = api
        self._lease = lease
        self._keeper = keeper
        self._buffer: list[RunEvent] = []
        self._sequence = 0
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reporter", daemon=True)
        self.durable = Durable()

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=15)

    def add(self, event: RunEvent) -> None:
        """Number the event and queue it."""
        with self._lock:
            self._sequence += 1
            self._buffer.append(msgspec.structs.replace(event, sequence=self._sequence))
            if len(self._buffer) > _BUFFER_EVENTS:
                # After a long silence of the control plane, every second progress report is dropped, and nothing else.
                steps = [event for event in self._buffer if isinstance(event, StepCompleted)]
                dropped = {event.sequence for event in steps[::2]}
                self._buffer = [event for event in self._buffer if event.sequence not in dropped]

    def flush(self, *, timeout_seconds: float, must_end: Callable[[], bool] = lambda: False) -> bool:
        """Wait until all queued events are accepted, or `must_end`; return whether they were."""
        deadline = time.monotonic() + timeout_seconds
        self._wake.set()
        while self._buffer and not self._keeper.is_lost and time.monotonic() < deadline and not must_end():
            self._ended.wait(0.02)
        return not self._buffer

    def _run(self) -> None:
        while not self._ended.is_set() and not self._keeper.is_lost:
            self._wake.wait(_SEND_EVERY_SECONDS)
            self._wake.clear()
            self.send()

    def send(self) -> None:
        """Send queued events, oldest first. An event that cannot be sent now stays queued."""
        with self._lock:
            batch = tuple(self._buffer[:_BATCH_EVENTS])
        if not batch:
            return
        try:
            self._api.report_events(self._lease, batch, patience_seconds=0)
        except (StaleLease, Unauthorized):
            self._keeper.refuse()
        except Unavailable as error:
            log.warning("Events not accepted yet: %s", error)
        except ApiError as error:
            self._send_singly(batch, error)
        else:
            self._accepted(batch)
            if len(batch) == _BATCH_EVENTS:
                self._wake.set()  # more are waiting

    def _send_singly(self, batch: tuple[RunEvent, ...], refusal: ApiError) -> None:
        """Send the events of a refused batch one by one; log the refused event and let the others through."""
        log.warning("Events refused: %s", refusal)
        for event in batch:
            try:
                self._api.report_events(self._lease, (event,), patience_seconds=5)
            except (StaleLease, Unauthorized):
                return self._keeper.refuse()
            except Unavailable:
                return None
            except ApiError as error:
                log.error("Dropped %s %d: %s", type(event).__name__, event.sequence, error)
                self._remove((event,))
            else:
                self._accepted((event,))
        return None

    def _accepted(self, events: tuple[RunEvent, ...]) -> None:
        for event in events:
            if isinstance(event, CheckpointSaved):
                self.durable = Durable(
                    step=event.step, training_seconds=event.training_seconds, trained_tokens=event.trained_tokens
                )
        self._remove(events)

    def _remove(self, events: tuple[RunEvent, ...]) -> None:
        done = {event.sequence for event in events}
        with self._lock:
            self._buffer = [event for event in self._buffer if event.sequence not in done]


class Uploader:
    """Stores sealed folders. Each file goes to its signed URL, the manifest last."""

    def __init__(self, api: ApiClient, lease: Lease, transfers: Transfers) -> None:
        self._api = api
        self._lease = lease
        self._transfers = transfers

    def store(self, folder: Path, manifest_sha256: str) -> UploadResponse:
        """Store a sealed folder. Raises StoreUnavailable, Unavailable, ApiError or Interrupted."""
        request = UploadRequest(manifest=read_manifest(folder), manifest_sha256=manifest_sha256)
        return self._transfers.upload_folder(folder, lambda: self._api.create_upload(self._lease, request))


def deliver(ready: AdapterReady, published: Published, work_dir: Path, uploader: Uploader) -> Succeeded:
    """Store every folder and return the result to report; raises the errors of `Uploader.store`.

    An export that cannot be stored is a missing part.
    """
    places = uploader.store(work_dir / published.adapter.folder, published.adapter.manifest_sha256)
    exports, missing = [], list(published.missing)
    for kind, sealed in published.exports.items():
        try:
            stored = uploader.store(work_dir / sealed.folder, sealed.manifest_sha256)
        except (StaleLease, Unauthorized):
            raise
        except (StoreUnavailable, Unavailable, ApiError) as error:
            log.error("The export %s was not stored: %s", kind, error)
            may_be_stored = not isinstance(error, ApiError)  # the platform's refusal is final
            missing.append(MissingPart(kind=kind, cause=f"it was made, but {_refusal(error)}", is_made=may_be_stored))
        else:
            exports.append(Export(kind=kind, upload_id=stored.upload_id, manifest_sha256=sealed.manifest_sha256))
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
        exports=tuple(exports),
        missing=tuple(missing),
    )


def _refusal(error: StoreUnavailable | Unavailable | ApiError) -> str:
    match error:
        case StoreUnavailable():
            return str(error)
        case Unavailable():
            return "the platform could not be reached"
    return "the platform did not accept it"


class CheckpointUploader:
    """Uploads checkpoints during training. If they come faster than the upload, only the newest waiting one is kept."""

    def __init__(self, uploader: Uploader, reporter: Reporter, keeper: LeaseKeeper, work_dir: Path) -> None:
        self._uploader = uploader
        self._reporter = reporter
        self._keeper = keeper
        self._work_dir = work_dir
        self._pending: CheckpointReady | None = None
        self._changed = threading.Condition()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="checkpoint-uploader", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, event: CheckpointReady) -> None:
        """Take a checkpoint.

        Its files are linked elsewhere, because the child keeps only the newest two checkpoints.
        """
        try:
            _link_folder(self._work_dir / event.folder, self._aside(event.step))
        except FileNotFoundError:
            return log.warning("Checkpoint %d was replaced by newer ones before its upload", event.step)
        with self._changed:
            replaced, self._pending = self._pending, event
            self._changed.notify()
        if replaced is not None:
            shutil.rmtree(self._aside(replaced.step), ignore_errors=True)
        return None

    def finish(self, *, timeout_seconds: float, must_end: Callable[[], bool] = lambda: False) -> None:
        """Wait until the newest checkpoint is stored, the time is up, or `must_end`."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        deadline = time.monotonic() + timeout_seconds
        while self._thread.is_alive() and time.monotonic() < deadline and not must_end():
            self._thread.join(timeout=0.05)

    def _run(self) -> None:
        while (event := self._next()) is not None:
            self._store(event)
            shutil.rmtree(self._aside(event.step), ignore_errors=True)

    def _next(self) -> CheckpointReady | None:
        with self._changed:
            self._changed.wait_for(lambda: self._pending is not None or self._is_closing)
            event, self._pending = self._pending, None
        return None if self._keeper.is_lost else event

    def _store(self, event: CheckpointReady) -> None:
        try:
            places = self._uploader.store(self._aside(event.step), event.manifest_sha256)
        except (StaleLease, Unauthorized):
            return self._keeper.refuse()
        except (StoreUnavailable, Unavailable, ApiError, OSError) as error:
            log.warning("Checkpoint %d not stored: %s", event.step, error)
            message = f"The checkpoint of step {event.step} could not be stored; training goes on."
            return self._reporter.add(LogLine(sequence=UNNUMBERED, level="warn", message=message))
        except Interrupted:
            return None
        return self._reporter.add(
            CheckpointSaved(
                sequence=UNNUMBERED,
                step=event.step,
                upload_id=places.upload_id,
                manifest_sha256=event.manifest_sha256,
                bytes=event.bytes,
                trained_tokens=event.trained_tokens,
                training_seconds=event.training_seconds,
                train_loss=event.train_loss,
            )
        )

    def _aside(self, step: int) -> Path:
        return self._work_dir / "uploading" / str(step)


def _link_folder(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for file in source.iterdir():
        os.link(file, target / file.name)
