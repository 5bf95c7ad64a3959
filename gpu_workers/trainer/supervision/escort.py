"""The parts that all supervised attempts share: the place, the watch over the child, and failures before it runs."""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from apps.contracts.failures import FailureCode
from apps.contracts.runs import StopReason
from apps.contracts.worker_api import ClaimResponse, HeartbeatRequest
from gpu_workers.common.api_client import ApiClient, Lease
from gpu_workers.common.base_models import NotInstalled
from gpu_workers.common.config import WorkerConfig
from gpu_workers.common.transfers import StoreUnavailable
from gpu_workers.trainer.children.executor import Child, SubprocessExecutor
from gpu_workers.trainer.lease_keeper import LeaseKeeper
from gpu_workers.trainer.preparation import CheckpointBroken
from gpu_workers.trainer.run_checks import Refused

log = logging.getLogger(__name__)

PREPARATION_ERRORS = (Refused, NotInstalled, StoreUnavailable, CheckpointBroken, OSError)
_POLL_SECONDS = 0.1
_CHILD_STOP_SECONDS = 60.0  # for the child's step and checkpoint
_KILL_AFTER_FENCE_SECONDS = 10.0


class Forgotten(Exception):
    """The lease is lost: no further report is allowed."""


class StopAsked(Exception):
    """A stop was requested before the child ran."""


class Haste:
    """The end of a wait that is cut short: `is_over` from `seconds` after `is_hurried` was first seen true."""

    def __init__(self, is_hurried: Callable[[], bool], *, seconds: float) -> None:
        self._is_hurried = is_hurried
        self._seconds = seconds
        self._since: float | None = None

    def is_over(self) -> bool:
        if self._since is None and self._is_hurried():
            self._since = time.monotonic()
        return self._since is not None and time.monotonic() - self._since >= self._seconds


class Attempt:
    """A claimed place on `devices`, and its child. `on_stuck` is called if it does not end after the place is lost."""

    def __init__(
        self,
        config: WorkerConfig,
        api: ApiClient,
        executor: SubprocessExecutor,
        claim: ClaimResponse,
        work_dir: Path,
        *,
        devices: Sequence[str],
        is_stopping: Callable[[], bool],
        on_stuck: Callable[[], None],
    ) -> None:
        self._config = config
        self._api = api
        self._executor = executor
        self._claim = claim
        self._spec = claim.spec
        self._lease = Lease.of(claim)
        self._work_dir = work_dir
        self._devices = devices
        self._is_stopping = is_stopping
        self._child: Child | None = None
        self._keeper = LeaseKeeper(api, claim, status=self._current_status, on_stuck=on_stuck)

    def _current_status(self) -> HeartbeatRequest:
        return HeartbeatRequest()

    def _stop_reason(self) -> StopReason | None:
        """Return the reason for a stop. A customer's request takes precedence over this machine's."""
        return self._keeper.stop_reason or (StopReason.PREEMPTED if self._is_stopping() else None)

    def _require_place(self) -> None:
        if self._keeper.is_lost:
            raise Forgotten

    def _check(self) -> None:
        self._require_place()
        if self._stop_reason() is not None:
            raise StopAsked

    def _kill_child(self) -> None:
        if self._child is not None and self._child.poll() is None:
            self._child.kill()


def explain(error: Exception) -> tuple[FailureCode, str]:
    """Return the code and the customer's line for one of PREPARATION_ERRORS."""
    match error:
        case Refused():
            return error.code, error.message
        case NotInstalled():
            return FailureCode.BASE_MODEL_UNAVAILABLE, str(error)
        case StoreUnavailable():
            return FailureCode.OBJECT_STORE_UNAVAILABLE, f"A file could not be transferred: {error}."
        case CheckpointBroken():
            return FailureCode.CHECKPOINT_INVALID, f"The checkpoint cannot be used: {error}"
        case OSError():
            log.error("The attempt failed on this machine", exc_info=error)
            code = FailureCode.DISK_FULL if error.errno in (28, 122) else FailureCode.INTERNAL_ERROR
            return code, f"The worker could not continue ({error.strerror})."
    raise error


def accompany(
    child: Child,
    keeper: LeaseKeeper,
    *,
    stop_reason: Callable[[], StopReason | None],
    look: Callable[[], None],
    is_stalled: Callable[[], bool],
) -> bool:
    """Watch the child until it ends, and stop it on request; return False if it stalls. Raises Forgotten.

    `look` is called several times a second.
    """
    asked_at: float | None = None
    while child.poll() is None:
        look()
        if keeper.is_lost:  # end the child before the lease can be given to another worker
            if not keeper.is_refused:
                child.terminate()
                child.wait(_KILL_AFTER_FENCE_SECONDS)
            child.kill()
            raise Forgotten
        if asked_at is None and is_stalled():
            return False
        if asked_at is None and stop_reason() is not None:
            log.info("Stopping the child: %s", stop_reason())
            asked_at = time.monotonic()
            child.terminate()
        if asked_at is not None and time.monotonic() - asked_at > _CHILD_STOP_SECONDS:
            child.kill()
        child.wait(_POLL_SECONDS)
    look()
    return True
