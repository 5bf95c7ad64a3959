"""The trainer's loop: claim a run, execute it, clean up, and measure while no run waits.

The control plane's row is the truth. If any process dies here, the lease expires and another attempt resumes from the
last confirmed checkpoint. This process may therefore be killed at any line.
"""

import logging
import shutil
import threading
import time

from apps.contracts.worker_api import ClaimRequest, ClaimResponse
from gpu_workers.common.api_client import ApiClient, ApiError, Unavailable
from gpu_workers.common.config import WorkerConfig
from gpu_workers.common.preflight import NotReady, installed_software, require_ready
from gpu_workers.trainer.children.executor import SubprocessExecutor, kill_stale_children
from gpu_workers.trainer.preparation import safe_name
from gpu_workers.trainer.probes import Prober
from gpu_workers.trainer.publication import Publisher
from gpu_workers.trainer.run_supervisor import RunSupervisor

log = logging.getLogger(__name__)

_SECONDS_BETWEEN_LOOKS = 2.0  # between checks for a run, during a measurement
# After a run, before a measurement: another run may follow, and a shared machine answers with the new adapter first.
_QUIET_SECONDS = 30.0


class Agent:
    """One trainer process. `drain()` works until nothing waits; a signal handler may call `request_stop()`."""

    def __init__(
        self,
        config: WorkerConfig,
        api: ApiClient,
        *,
        executor: SubprocessExecutor,
        publisher: Publisher | None,
        prober: Prober | None,
    ) -> None:
        self._config = config
        self._api = api
        self._executor = executor
        self._publisher = publisher
        self._prober = prober
        self._stop = threading.Event()
        self._waiting: ClaimResponse | None = None  # claimed during a measurement, not begun yet
        self._looked_at = 0.0
        self._measures_from = 0.0
        self._runs_dir = config.work_dir / "runs"

    def request_stop(self) -> None:
        """Make the current run save a checkpoint and stop; claim no further run."""
        self._stop.set()

    def recover(self) -> None:
        """Remove the remains of an earlier process: children first, then their files."""
        self._runs_dir.mkdir(parents=True, exist_ok=True)
        killed = kill_stale_children(self._runs_dir)
        if killed:
            log.warning("Killed %d processes of an earlier agent", killed)
        for folder in self._runs_dir.iterdir():
            shutil.rmtree(folder, ignore_errors=True)

    def drain(self) -> int:
        """Execute waiting runs, then missing measurements, until none is left; return the number of runs."""
        done = 0
        while self._waiting is not None or not self._stop.is_set():
            try:
                claim = self._waiting or self._claim()
            except (NotReady, Unavailable, ApiError) as error:
                log.error("No claim: %s", error)
                return done
            self._waiting = None
            if claim is not None:
                self._work_on(claim)
                done += 1
            else:
                self._looked_at = time.monotonic()
                if self._prober is None or not self._prober.run_one(
                    should_stop=self._is_wanted_elsewhere, not_before=self._measures_from
                ):
                    return done
        return done

    def _claim(self) -> ClaimResponse | None:
        require_ready(self._config.work_dir)
        return self._api.claim(ClaimRequest(base_models=self._config.base_models, software=installed_software()))

    def _is_wanted_elsewhere(self) -> bool:
        """Return whether to end a measurement: this process stops, or a run has arrived, which goes first."""
        if self._stop.is_set() or self._waiting is not None:
            return True
        if time.monotonic() - self._looked_at < _SECONDS_BETWEEN_LOOKS:
            return False
        self._looked_at = time.monotonic()
        try:
            self._waiting = self._claim()
        except (NotReady, Unavailable, ApiError) as error:
            log.warning("No claim during a measurement: %s", error)
        return self._waiting is not None

    def _work_on(self, claim: ClaimResponse) -> None:
        spec = claim.spec
        work_dir = self._runs_dir / f"{safe_name(spec.run_id)}-{spec.attempt}"
        log.info("Claimed %s attempt %d", spec.run_id, spec.attempt)
        attempt = RunSupervisor(
            self._config,
            self._api,
            self._executor,
            claim,
            work_dir,
            publisher=self._publisher,
            is_stopping=self._stop.is_set,
        )
        try:
            attempt.run()
        finally:
            shutil.rmtree(work_dir, ignore_errors=True)
            self._measures_from = time.monotonic() + _QUIET_SECONDS
