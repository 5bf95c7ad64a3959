"""A machine of a group that another machine leads. It keeps its place, trains, and leaves. It reports no progress."""

import logging
from typing import Any

from apps.contracts.failures import FailureCode
from apps.contracts.runs import Failed, Stopped, StopReason
from apps.contracts.worker_api import LeaveRequest
from gpu_workers.common.api_client import ApiError, StaleLease, Unauthorized, Unavailable
from gpu_workers.common.events import AdapterReady, read_outcome
from gpu_workers.common.redaction import tail_of_log
from gpu_workers.common.transfers import Interrupted, Transfers
from gpu_workers.trainer.children.executor import Child
from gpu_workers.trainer.preparation import prepare
from gpu_workers.trainer.run_checks import check_run
from gpu_workers.trainer.supervision.escort import (
    PREPARATION_ERRORS,
    Attempt,
    Forgotten,
    StopAsked,
    accompany,
    explain,
)

log = logging.getLogger(__name__)

_DONE = LeaveRequest()
_GIVEN_UP = LeaveRequest(outcome=Stopped(reason=StopReason.PREEMPTED))


class GroupMember(Attempt):
    """Trains one claimed place."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._transfers = Transfers(should_stop=lambda: self._keeper.is_lost or self._stop_reason() is not None)

    def run(self) -> None:
        """Train until the group's end, and leave. It returns without a report only if the place was lost."""
        self._keeper.start()
        self._keeper.beat()  # the group has begun when each machine has beaten once
        try:
            self._api.leave(self._lease, self._part())
        except (Forgotten, StaleLease, Unauthorized):
            log.warning("The group of %s attempt %d has ended", self._spec.run_id, self._spec.attempt)
        except (ApiError, Unavailable) as error:
            log.error("Could not leave the group of %s: %s", self._spec.run_id, error)
        finally:
            self._kill_child()
            self._keeper.refuse()
            self._keeper.close()
            self._transfers.close()

    def _part(self) -> LeaveRequest:
        """Return how this machine's part ended; raises Forgotten."""
        try:
            self._work_dir.mkdir(parents=True, exist_ok=True)
            check_run(self._spec, self._work_dir, self._devices)
            prepare(self._spec, self._work_dir, self._config, self._transfers, before_each=self._check)
            self._check()
            child = self._child = self._executor.start(
                self._work_dir, hub_token=self._spec.base_model.hub_token, devices=self._devices
            )
            # The first machine alone reports events and ends a run without progress: this one waits in every step.
            accompany(child, self._keeper, stop_reason=self._stop_reason, look=lambda: None, is_stalled=lambda: False)
            return self._conclude(child)
        except StopAsked:
            return _GIVEN_UP
        except Interrupted:
            self._require_place()
            return _GIVEN_UP
        except PREPARATION_ERRORS as error:
            return self._failed(*explain(error))

    def _conclude(self, child: Child) -> LeaveRequest:
        """Report the end.

        All processes of a group end training together, so one that ended before it began ends the attempt.
        """
        outcome = read_outcome(self._work_dir)
        match outcome:
            case AdapterReady():
                return _DONE
            case Stopped():
                return _DONE if outcome.training_seconds > 0 else _GIVEN_UP
            case Failed():
                if outcome.code is FailureCode.WORKER_LOST:
                    self._keeper.wait_for_refusal()
                self._require_place()
                return self._failed(outcome.code, outcome.message, peak_memory_bytes=outcome.peak_memory_bytes)
        self._require_place()
        if self._stop_reason() is not None:
            return _GIVEN_UP
        if child.was_killed_for_memory():
            return self._failed(FailureCode.OUT_OF_MEMORY, "The job did not fit into the memory of the machine.")
        return self._failed(FailureCode.INTERNAL_ERROR, f"The training process ended unexpectedly ({child.poll()}).")

    def _failed(self, code: FailureCode, message: str, *, peak_memory_bytes: int | None = None) -> LeaveRequest:
        known = [self._spec.base_model.hub_token, self._lease.token]
        log_tail = tail_of_log(self._work_dir, known=known)
        failed = Failed(code=code, message=message, log_tail=log_tail, peak_memory_bytes=peak_memory_bytes)
        return LeaveRequest(outcome=failed)
