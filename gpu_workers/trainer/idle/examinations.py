"""Examinations of uploaded adapters: PEFT's results for fixed rows, computed as after a training on this machine."""

import json
import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from apps.contracts.hyperparameters import Hyperparameters
from apps.contracts.parity import PARITY_FILE, ParityProbe
from apps.contracts.worker_api import ExaminationReport, ExaminationRequest
from gpu_workers.common.api_client import ApiClient, ApiError, Unavailable
from gpu_workers.common.base_models import NotInstalled, locate_base_model
from gpu_workers.common.config import WorkerConfig
from gpu_workers.common.events import TRAINING_FILE
from gpu_workers.common.transfers import Interrupted, StoreUnavailable
from gpu_workers.trainer.idle.finished_models import fetch_model, publish_parts
from gpu_workers.trainer.preparation import CheckpointBroken
from gpu_workers.trainer.publication import EVALUATION, Publisher

log = logging.getLogger(__name__)

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
        """Take and report one request; return whether there was one.

        If `should_stop` returns true, return the request.
        """
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
        fetch_model(request.adapter, work_dir, should_stop)
        published = publish_parts(
            self._publisher,
            (EVALUATION,),
            work_dir,
            id=request.id,
            base=base,
            adapter=request.adapter,
            recipe=Hyperparameters(lora_rank=request.lora_rank, target_modules=request.target_modules),
            rows=write_rows(work_dir / TRAINING_FILE),
            device=self._device,
            should_stop=should_stop,
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
