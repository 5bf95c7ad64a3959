"""The trainer's loop: claim runs while GPUs are free, execute each in a thread, and measure while no run waits.

Each run has its GPUs, lease, processes, folder and log, and the end of one does not affect the others. The control
plane's row is the truth. If any process dies here, the lease expires and another attempt resumes from the last
confirmed checkpoint. So this process may be killed at any line.
"""

import logging
import shutil
import socket
import threading
import time
from functools import partial

from apps.contracts.worker_api import ClaimRequest, ClaimResponse, ProbeRequest
from gpu_workers.common.api_client import ApiClient, ApiError, Unavailable
from gpu_workers.common.config import WorkerConfig
from gpu_workers.common.preflight import NotReady, installed_software, require_ready
from gpu_workers.trainer.children.devices import Devices
from gpu_workers.trainer.children.executor import SubprocessExecutor, kill_stale_children
from gpu_workers.trainer.idle.conversions import Converter
from gpu_workers.trainer.idle.examinations import Examiner
from gpu_workers.trainer.idle.probes import Prober
from gpu_workers.trainer.idle.rehearsals import Rehearser
from gpu_workers.trainer.lease_keeper import leave
from gpu_workers.trainer.preparation import safe_name
from gpu_workers.trainer.publication import Publisher
from gpu_workers.trainer.supervision.group_member import GroupMember
from gpu_workers.trainer.supervision.run_supervisor import RunSupervisor

log = logging.getLogger(__name__)

_SECONDS_BETWEEN_LOOKS = 2.0  # between checks for a run, during a measurement
_SECONDS_BETWEEN_CLAIMS = 5.0  # while some GPUs are free and others train
# After a run, before a measurement: another run may follow, and a shared machine answers with the new adapter first.
_QUIET_SECONDS = 30.0


class Agent:
    """One trainer process. `drain()` works until nothing waits; a signal handler may call `request_stop()`."""

    def __init__(
        self,
        config: WorkerConfig,
        api: ApiClient,
        *,
        devices: Devices,
        executor: SubprocessExecutor,
        publisher: Publisher | None,
        prober: Prober | None,
        rehearser: Rehearser | None = None,
        examiner: Examiner | None = None,
        converter: Converter | None = None,
        address: str = "",  # where the other machines of a group would reach this one
    ) -> None:
        self._config = config
        self._api = api
        self._devices = devices
        self._executor = executor
        self._publisher = publisher
        self._prober = prober
        self._rehearser = rehearser
        self._examiner = examiner
        self._converter = converter
        self._address = address
        self._stop = threading.Event()
        self._waiting: ClaimResponse | None = None  # claimed during a measurement, not begun yet
        self._lock = threading.Lock()  # of the next two and the devices
        self._active: set[str] = set()  # the leases of the runs in execution
        self._hanging: set[str] = set()  # of these, those that do not end
        self._ended = threading.Event()  # set by each run at its end
        self._looked_at = 0.0
        self._measures_from = 0.0
        self._may_measure = False  # the last claim was answered
        self._runs_dir = config.work_dir / "runs"

    def request_stop(self) -> None:
        """Make the current runs save checkpoints and stop. Claim no further run."""
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
        """Execute waiting runs, then missing measurements, until none is left; return the number of runs.

        Runs are executed side by side while GPUs are free. It returns when the last one has ended.
        """
        done = 0
        while True:
            claim = self._next()
            if claim is not None:
                done += self._begin(claim)
            elif self._active:
                self._ended.wait(_SECONDS_BETWEEN_CLAIMS if self._may_claim() else None)
                self._ended.clear()
            elif self._stop.is_set() or not self._measure():
                return done

    def _next(self) -> ClaimResponse | None:
        """Return a run to begin now, if there is one and GPUs are free."""
        claim, self._waiting = self._waiting, None
        if claim is not None or not self._may_claim():
            return claim
        self._may_measure = False
        try:
            claim = self._claim()
        except (NotReady, Unavailable, ApiError) as error:
            log.error("No claim: %s", error)
            return None
        self._may_measure = True
        return claim

    def _may_claim(self) -> bool:
        return not self._stop.is_set() and not self._hanging and bool(self._devices.free)

    def _claim(self) -> ClaimResponse | None:
        require_ready(self._config.work_dir)
        with self._lock:
            free, leases = len(self._devices.free), tuple(self._active)
        request = ClaimRequest(
            base_models=self._config.base_models,
            software=installed_software(),
            free_gpus=free,
            gpu_count=len(self._devices.names),
            leases=leases,
            address=self._address,
            port=_free_port() if self._address else None,
        )
        return self._api.claim(request)

    def _measure(self) -> bool:
        """Take one rehearsal, examination, conversion or missing measurement, on a machine without runs.

        Return whether it did.

        A rehearsal goes first, because a customer waits for it, unless the pool has no measured speed for quotes.
        """
        self._looked_at = time.monotonic()
        if not self._may_measure:
            return False
        probe = self._prober.find() if self._prober else None
        is_urgent = probe is not None and probe.is_first
        if is_urgent and self._run_probe(probe):
            return True
        if self._rehearser and self._rehearser.run_one(should_stop=self._is_wanted_elsewhere):
            return True
        if self._examiner and self._examiner.run_one(should_stop=self._is_wanted_elsewhere):
            return True
        if self._converter and self._converter.run_one(should_stop=self._is_wanted_elsewhere):
            return True
        return not is_urgent and self._run_probe(probe)

    def _run_probe(self, probe: ProbeRequest | None) -> bool:
        if self._prober is None or probe is None:
            return False
        return self._prober.run(probe, should_stop=self._is_wanted_elsewhere, not_before=self._measures_from)

    def _is_wanted_elsewhere(self) -> bool:
        """Return whether to end a measurement, because this process stops or a run has arrived, which goes first."""
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

    def _begin(self, claim: ClaimResponse) -> bool:
        """Start the run in a thread that lives until it ends; return whether it has the GPUs it needs."""
        with self._lock:
            try:
                devices = self._devices.take(claim.spec.gpus_here)
            except ValueError as error:  # its lease ends with the next claim
                log.error("%s cannot begin: %s", claim.spec.run_id, error)
                return False
            self._active.add(claim.lease_id)
        work = threading.Thread(target=self._work_on, args=(claim, devices), name=claim.spec.run_id, daemon=True)
        work.start()
        return True

    def _work_on(self, claim: ClaimResponse, devices: tuple[str, ...]) -> None:
        try:
            self._execute(claim, devices)
        except Exception:
            log.exception("%s ended without a report", claim.spec.run_id)
        finally:
            self._measures_from = time.monotonic() + _QUIET_SECONDS
            with self._lock:
                self._devices.give_back(devices)
                self._active.discard(claim.lease_id)
                self._hanging.discard(claim.lease_id)
                self._leave_if_alone()
            self._ended.set()

    def _set_hanging(self, lease_id: str) -> None:
        """Claim nothing until the run ends. End this process as soon as every other run has ended."""
        with self._lock:
            if lease_id in self._active:
                self._hanging.add(lease_id)
                self._leave_if_alone()

    def _leave_if_alone(self) -> None:
        if self._hanging and self._hanging == self._active:
            leave()

    def _execute(self, claim: ClaimResponse, devices: tuple[str, ...]) -> None:
        spec = claim.spec
        work_dir = self._runs_dir / f"{safe_name(spec.run_id)}-{spec.attempt}"
        log.info("Claimed %s attempt %d for GPU %s", spec.run_id, spec.attempt, ", ".join(devices))
        supervise = GroupMember if spec.is_led_elsewhere else partial(RunSupervisor, publisher=self._publisher)
        attempt = supervise(
            self._config,
            self._api,
            self._executor,
            claim,
            work_dir,
            devices=devices,
            is_stopping=self._stop.is_set,
            on_stuck=partial(self._set_hanging, claim.lease_id),
        )
        try:
            attempt.run()
        finally:
            shutil.rmtree(work_dir, ignore_errors=True)


def _free_port() -> int:
    """Return a port that is free now. If it is taken when a group meets there, the attempt fails and is repeated."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])
