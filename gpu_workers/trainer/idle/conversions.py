"""Conversions of finished models: a later merge or GGUF export, made as after a training on this machine."""

import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from apps.contracts.hyperparameters import Hyperparameters
from apps.contracts.worker_api import ConversionClaim, ConversionReport, ConversionRequest, UploadRequest
from gpu_workers.common.api_client import ApiClient, ApiError, StaleLease, Unavailable
from gpu_workers.common.artifacts import read_manifest
from gpu_workers.common.base_models import NotInstalled, locate_base_model
from gpu_workers.common.config import WorkerConfig
from gpu_workers.common.transfers import Interrupted, StoreUnavailable, Transfers
from gpu_workers.trainer.idle.finished_models import fetch_model, publish_parts
from gpu_workers.trainer.preparation import CheckpointBroken
from gpu_workers.trainer.publication import Publisher, SealedFolder

log = logging.getLogger(__name__)


class Converter:
    """Makes the conversions that customers ordered, one at a time."""

    def __init__(self, config: WorkerConfig, api: ApiClient, *, device: str, publisher: Publisher) -> None:
        self._config = config
        self._api = api
        self._device = device
        self._publisher = publisher

    def run_one(self, *, should_stop: Callable[[], bool]) -> bool:
        """Take, make and deliver one conversion, unless `should_stop` ends it; return whether there was one."""
        try:
            taken = self._api.take_conversion(ConversionClaim(base_models=self._config.base_models))
            if taken is None:
                return False
            lease = _Lease(self._api, taken, should_stop)
            report = self._convert(taken, lease)
            if not lease.is_lost:
                self._api.finish_conversion(taken.id, report)
        except (ApiError, Unavailable) as error:
            log.warning("No conversion: %s", error)
            return False
        return True

    def _convert(self, request: ConversionRequest, lease: "_Lease") -> ConversionReport:
        work_dir = self._config.work_dir / "runs" / "conversion"
        shutil.rmtree(work_dir, ignore_errors=True)
        work_dir.mkdir(parents=True)
        try:
            return self._make(request, work_dir, lease)
        except Interrupted:
            return ConversionReport(is_interrupted=True)
        except (NotInstalled, StoreUnavailable, CheckpointBroken, OSError, msgspec.DecodeError) as error:
            log.warning("%s was not made: %s", request.id, error)
            return ConversionReport(problem=f"The trainer could not make it: {type(error).__name__}.")
        except ApiError as error:
            log.warning("%s was not stored: %s", request.id, error)
            return ConversionReport(problem="The trainer could not store what it made.")
        finally:
            shutil.rmtree(work_dir, ignore_errors=True)

    def _make(self, request: ConversionRequest, work_dir: Path, lease: "_Lease") -> ConversionReport:
        base = locate_base_model(request.base_model, self._config.base_model_roots)
        fetch_model(request.adapter, work_dir, lease.should_stop)
        published = publish_parts(
            self._publisher,
            (request.kind,),
            work_dir,
            id=request.id,
            base=base,
            adapter=request.adapter,
            recipe=Hyperparameters(),
            device=self._device,
            should_stop=lease.should_stop,
            base_bytes=request.base_bytes,
        )
        if lease.should_stop():
            return ConversionReport(is_interrupted=True)
        if published.missing:
            cause = published.missing[0].cause
            return ConversionReport(problem=f"It could not be made: {cause}."[:300], is_lasting=bool(published.lasting))
        sealed = published.exports[request.kind]
        self._store(request, work_dir, sealed, lease)
        return ConversionReport(manifest_sha256=sealed.manifest_sha256)

    def _store(self, request: ConversionRequest, work_dir: Path, sealed: SealedFolder, lease: "_Lease") -> None:
        folder = work_dir / sealed.folder
        wanted = UploadRequest(manifest=read_manifest(folder), manifest_sha256=sealed.manifest_sha256)
        transfers = Transfers(should_stop=lease.should_stop)
        try:
            transfers.upload_folder(folder, lambda: self._api.create_conversion_upload(request.id, wanted))
        finally:
            transfers.close()


class _Lease:
    """Extends the lease of a conversion whenever its work asks whether to stop."""

    def __init__(self, api: ApiClient, request: ConversionRequest, should_stop: Callable[[], bool]) -> None:
        self._api = api
        self._request = request
        self._is_wanted_elsewhere = should_stop
        self._kept_at = time.monotonic()
        self.is_lost = False

    def should_stop(self) -> bool:
        """Return whether a run goes first, this process stops, or the lease is lost."""
        if not self.is_lost and time.monotonic() - self._kept_at >= self._request.beat_seconds:
            self._kept_at = time.monotonic()
            self._keep()
        return self.is_lost or self._is_wanted_elsewhere()

    def _keep(self) -> None:
        try:
            self._api.keep_conversion(self._request.id)
        except StaleLease:
            self.is_lost = True
        except (ApiError, Unavailable) as error:
            log.warning("The lease of %s was not kept: %s", self._request.id, error)
