"""Examinations of uploaded adapters: what PEFT makes of fixed rows, computed as after a training on this machine."""

import json
import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from apps.contracts.parity import PARITY_FILE, ParityProbe
from apps.contracts.runs import DatasetRef, Hyperparameters, RunSpec
from apps.contracts.worker_api import ExaminationReport, ExaminationRequest
from gpu_workers.common.api_client import ApiClient, ApiError, Unavailable
from gpu_workers.common.base_models import NotInstalled, locate_base_model
from gpu_workers.common.config import WorkerConfig
from gpu_workers.common.events import ADAPTER_FOLDER, SPEC_FILE, TRAINING_FILE, AdapterReady
from gpu_workers.common.files import PRIVATE, replace_file
from gpu_workers.common.transfers import Interrupted, StoreUnavailable, Transfers
from gpu_workers.trainer.preparation import CheckpointBroken, Fetch
from gpu_workers.trainer.progress_watch import ProgressWatch
from gpu_workers.trainer.publication import Publisher, PublishSecrets

log = logging.getLogger(__name__)

_STALL_SECONDS = 600.0
_LONGEST_SECONDS = 1_800.0  # then the control plane waits no longer
# Short chats of many kinds of text. Every base model's tokenizer and template can write them.
_CHATS = (
    ("Where is my card? It was sent two weeks ago.", "It takes up to ten days. I will order another one for you."),
    ("Write a Python function that adds two numbers.", "def add(a: int, b: int) -> int:\n    return a + b"),
    ("What is 17 times 23?", "17 times 23 is 391, because 17 * 20 = 340 and 17 * 3 = 51."),
    ("Übersetze: The weather is fine today.", "Das Wetter ist heute schön."),
    ("Answer in JSON: which city is the capital of France?", '{"country": "France", "capital": "Paris"}'),
    ("Tell me a story in one sentence.", "A lighthouse keeper taught the fog to sing, and no ship was lost again."),
)


class NotExamined(Exception):
    """The probe could not be computed."""


class Examiner:
    """Answers the control plane's requests for probes of uploaded adapters, one at a time."""

    def __init__(self, config: WorkerConfig, api: ApiClient, *, device: str, publisher: Publisher) -> None:
        self._config = config
        self._api = api
        self._device = device
        self._publisher = publisher

    def run_one(self, *, should_stop: Callable[[], bool]) -> bool:
        """Take and report one request; return whether there was one. If `should_stop` says so, give it back."""
        try:
            taken = self._api.take_examination()
            if taken is None:
                return False
            try:
                report = ExaminationReport(id=taken.id, probe=self._examine(taken, should_stop))
            except NotExamined as error:
                report = ExaminationReport(id=taken.id, error=str(error)[:300])
            self._api.report_examination(report)
        except (ApiError, Unavailable) as error:
            log.warning("No examination: %s", error)
            return False
        return True

    def _examine(self, request: ExaminationRequest, should_stop: Callable[[], bool]) -> ParityProbe:
        work_dir = self._config.work_dir / "runs" / "examination"
        shutil.rmtree(work_dir, ignore_errors=True)
        work_dir.mkdir(parents=True)
        ends_at = time.monotonic() + _LONGEST_SECONDS
        try:
            return self._compute(request, work_dir, lambda: should_stop() or time.monotonic() > ends_at)
        except (NotInstalled, StoreUnavailable, CheckpointBroken, Interrupted, OSError, msgspec.DecodeError) as error:
            raise NotExamined(f"The adapter was not examined: {type(error).__name__}.") from error
        finally:
            shutil.rmtree(work_dir, ignore_errors=True)

    def _compute(self, request: ExaminationRequest, work_dir: Path, should_stop: Callable[[], bool]) -> ParityProbe:
        base = locate_base_model(request.base_model, self._config.base_model_roots)
        transfers = Transfers(should_stop=should_stop)
        try:
            Fetch(work_dir, transfers, lambda: None).checkpoint(request.adapter, ADAPTER_FOLDER)
        finally:
            transfers.close()
        rows = write_rows(work_dir / TRAINING_FILE)
        spec = RunSpec(
            run_id=request.id,
            job_id=request.id,
            organization_id="",
            attempt=1,
            base_model=msgspec.structs.replace(base, hub_token=None),
            training=DatasetRef(id=request.id, sha256="", bytes=0, rows=rows, url=""),
            hyperparameters=Hyperparameters(lora_rank=request.lora_rank, target_modules=request.target_modules),
        )
        replace_file(work_dir / SPEC_FILE, msgspec.json.encode(spec), mode=PRIVATE)
        ready = AdapterReady(
            folder=ADAPTER_FOLDER, manifest_sha256=request.adapter.manifest_sha256, bytes=0, step=0,
            training_seconds=0.0, trained_tokens=0,
        )  # fmt: skip
        published = self._publisher.publish(
            spec,
            ready,
            work_dir,
            devices=[self._device],
            secrets=lambda part: PublishSecrets(part=part, hub_token=base.hub_token),
            should_stop=should_stop,
            begun=lambda child: None,
            watch=ProgressWatch(least_seconds=_STALL_SECONDS),
        )
        if published.missing:
            raise NotExamined(f"The numbers of a certificate were not computed: {published.missing[0].cause}.")
        content = (work_dir / published.adapter.folder / PARITY_FILE).read_bytes()
        return msgspec.json.decode(content, type=ParityProbe)


def write_rows(path: Path) -> int:
    """Write the fixed rows as a training file; return their number."""
    rows = [
        {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}
        for asked, answer in _CHATS
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return len(rows)
