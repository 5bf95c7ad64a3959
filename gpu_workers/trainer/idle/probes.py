"""Measurements that the control plane still needs, one short training loop at a time."""

import logging
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec

from apps.contracts.hyperparameters import Method
from apps.contracts.worker_api import ProbeReport, ProbeRequest
from gpu_workers.common.api_client import ApiClient, ApiError, Unavailable
from gpu_workers.common.base_models import NotInstalled, locate_base_model
from gpu_workers.common.config import WorkerConfig
from gpu_workers.common.events import SPEC_FILE
from gpu_workers.common.files import replace_file
from gpu_workers.common.redaction import tail_of_log
from gpu_workers.trainer.children.cpu_threads import Load
from gpu_workers.trainer.children.executor import SubprocessExecutor
from gpu_workers.trainer.progress_watch import ChildActivity, ProgressWatch

log = logging.getLogger(__name__)

MODULE = "gpu_workers.bench.probe"
PROBE_FILE = "probe.json"
_STALL_SECONDS = 600.0  # without progress
_MAX_FAILURES = 3  # of one measurement in this process
_QUIET_SECONDS, _QUIET_SHARE = 2.0, 0.35  # the machine is quiet if no more of all cores was busy for so long
_FIRST_PATIENCE_SECONDS = 45.0  # vLLM starts in 25 to 40 s on two cores


class Prober:
    """Runs each probe in a separate child.

    A probe is abandoned after three failures. A refused report is a failure; stopping a probe is none.

    A probe waits for a quiet machine, because bursts end, such as many requests to a new adapter. A load that lasts
    longer than `patience_seconds` counts as normal for the machine.
    """

    def __init__(
        self,
        config: WorkerConfig,
        api: ApiClient,
        *,
        gpu_key: str,
        device: str,
        executor: SubprocessExecutor,
        patience_seconds: float = 90.0,
    ) -> None:
        self._config = config
        self._api = api
        self._gpu_key = gpu_key
        self._device = device
        self._executor = executor
        self._patience_seconds = patience_seconds
        self._failures: Counter[tuple[str, str]] = Counter()
        self._was_interrupted = False

    def find(self) -> ProbeRequest | None:
        """Return the next missing measurement; None without one, or if the control plane does not answer."""
        try:
            missing = self._api.list_missing_probes().probes
        except (ApiError, Unavailable) as error:
            log.warning("No measurement: %s", error)
            return None
        return next((request for request in missing if self._failures[_key(request)] < _MAX_FAILURES), None)

    def run(self, request: ProbeRequest, *, should_stop: Callable[[], bool], not_before: float = 0.0) -> bool:
        """Take and report the measurement; return False if the control plane does not give it.

        It begins when the machine is quiet, at `not_before` (in time.monotonic()) at the earliest. `should_stop` is
        called five times a second; if it returns true, the measurement ends without a report.
        """
        try:
            opened = self._opened(request)
            if opened is None:
                return False
            if not self._wait_for_quiet(request, should_stop=should_stop, not_before=not_before):
                return True
            report = self._measure(opened, should_stop)
            if report is not None:
                self._report(request, report)
            elif not self._was_interrupted:
                self._failures[_key(request)] += 1
        except (ApiError, Unavailable) as error:
            log.warning("No measurement: %s", error)
            return False
        return True

    def _report(self, request: ProbeRequest, report: ProbeReport) -> None:
        """Report the measurement. A refusal counts as a failure: the same measurement would be refused again."""
        try:
            self._api.report_probe(report)
        except ApiError:
            self._failures[_key(request)] += 1
            raise

    def _wait_for_quiet(self, request: ProbeRequest, *, should_stop: Callable[[], bool], not_before: float) -> bool:
        """Return true once the machine is quiet or patience ends, false if `should_stop` returns true.

        Patience is shorter for the first measurement by LoRA, because the pool cannot quote any job without it.
        """
        is_needed_now = request.is_first and request.method == Method.LORA
        patience = min(self._patience_seconds, _FIRST_PATIENCE_SECONDS) if is_needed_now else self._patience_seconds
        latest = max(time.monotonic(), not_before) + patience
        load, read_at = Load(), time.monotonic()
        while (now := time.monotonic()) < latest:
            if should_stop():
                return False
            if now - read_at >= _QUIET_SECONDS:
                is_quiet, read_at = load.busy_share() <= _QUIET_SHARE, now
                if is_quiet and now >= not_before:
                    break
            time.sleep(0.2)
        return True

    def _opened(self, request: ProbeRequest) -> ProbeRequest | None:
        """Return the request with the token of its repository; None if another worker has measured it meanwhile."""
        if request.base_model.repo is None:
            return request
        again = self._api.list_missing_probes(base_model_id=request.base_model.id).probes
        return next((each for each in again if _key(each) == _key(request)), None)

    def _measure(self, request: ProbeRequest, should_stop: Callable[[], bool]) -> ProbeReport | None:
        work_dir = self._config.work_dir / "runs" / "probe"
        shutil.rmtree(work_dir, ignore_errors=True)
        work_dir.mkdir(parents=True)
        try:
            base_model = locate_base_model(request.base_model, self._config.base_model_roots)
            token, base_model = base_model.hub_token, msgspec.structs.replace(base_model, hub_token=None)
            spec = msgspec.structs.replace(request, base_model=base_model)
            replace_file(work_dir / SPEC_FILE, msgspec.json.encode(spec))
            self._run_child(work_dir, token, should_stop, has_network=base_model.path is None)
            report = msgspec.json.decode((work_dir / PROBE_FILE).read_bytes(), type=ProbeReport)
        except (NotInstalled, OSError, msgspec.DecodeError) as error:
            log.warning("%s by %s was not measured: %s", request.base_model.name, request.method, error)
            log.debug("%s", tail_of_log(work_dir, known=[request.base_model.hub_token]))
            return None
        finally:
            shutil.rmtree(work_dir, ignore_errors=True)
        return msgspec.structs.replace(report, gpu_key=self._gpu_key)

    def _run_child(
        self, work_dir: Path, token: str | None, should_stop: Callable[[], bool], *, has_network: bool
    ) -> None:
        self._was_interrupted = False
        child = self._executor.start(work_dir, hub_token=token, devices=[self._device], has_network=has_network)
        watch = ProgressWatch(least_seconds=_STALL_SECONDS)
        watch.follow(ChildActivity(child.leader, work_dir))
        while child.wait(0.2) is None:
            self._was_interrupted = should_stop()
            if self._was_interrupted:
                child.kill()
            elif watch.check():
                log.warning("The measurement made no progress for %.0f s: ended", watch.still_seconds)
                child.end_with_stacks()


def _key(request: ProbeRequest) -> tuple[str, str]:
    return request.base_model.id, request.method
