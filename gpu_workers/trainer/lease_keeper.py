"""The heartbeat that keeps a lease, and the detection of its loss: a refusal, or too long a silence."""

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable

from apps.contracts.runs import StopReason
from apps.contracts.worker_api import ClaimResponse, HeartbeatRequest
from gpu_workers.common.api_client import ApiClient, ApiError, Lease, StaleLease, Unauthorized, Unavailable

log = logging.getLogger(__name__)

# A machine that lost another one waits so long before it says so: the other one may report its own failure, which is
# the cause. It is longer than the time between two heartbeats, which then find the lease gone.
_CAUSE_SECONDS = 15.0
_STUCK_SECONDS = 600.0  # longer than any step that must end after a lost lease


def leave() -> None:
    """End this worker at once; its supervisor starts another, which cleans up."""
    faulthandler.dump_traceback(all_threads=True)
    os._exit(1)


class LeaseKeeper:
    """A thread that sends heartbeats and detects the loss of the lease.

    `is_lost` never waits for the network. It compares the monotonic clock with the last accepted heartbeat. So the
    child is dead before the control plane gives the run to another worker.
    """

    def __init__(
        self,
        api: ApiClient,
        claim: ClaimResponse,
        *,
        status: Callable[[], HeartbeatRequest],
        on_stuck: Callable[[], None] = leave,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._send = api.keep_place if claim.spec.is_led_elsewhere else api.heartbeat
        self._lease = Lease.of(claim)
        self._status = status
        self._on_stuck = on_stuck
        self._clock = clock
        self._heartbeat_seconds = claim.heartbeat_seconds
        self._self_fence_seconds = claim.self_fence_seconds
        self._accepted_at = clock()
        self._is_refused = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease-keeper", daemon=True)
        self.stop_reason: StopReason | None = None  # the control plane's request

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=15)

    @property
    def is_refused(self) -> bool:
        """Return whether the run now belongs to another worker. If so, stop at once."""
        return self._is_refused.is_set()

    @property
    def is_lost(self) -> bool:
        """Return whether the lease was refused, or had no accepted heartbeat for too long."""
        return self.is_refused or self._clock() - self._accepted_at >= self._self_fence_seconds

    def refuse(self) -> None:
        """Record that another call under this lease was refused."""
        self._is_refused.set()

    def wait_for_refusal(self) -> None:
        """Wait until the lease is refused, at most 15 seconds."""
        self._is_refused.wait(_CAUSE_SECONDS)

    def beat(self) -> None:
        """Send one heartbeat and process the answer."""
        sent_at = self._clock()
        try:
            answer = self._send(self._lease, self._status())
        except (StaleLease, Unauthorized) as error:
            log.warning("The lease is gone: %s", error)
            self.refuse()
        except (Unavailable, ApiError) as error:
            log.warning("Heartbeat not accepted: %s", error)
        else:
            self._accepted_at = sent_at
            if answer.is_cancel_requested:
                self.stop_reason = StopReason.CANCELLED
            elif answer.is_pause_requested:
                self.stop_reason = StopReason.PAUSED
            elif answer.is_drain_requested:
                self.stop_reason = StopReason.PREEMPTED

    def _run(self) -> None:
        while not self._ended.wait(self._heartbeat_seconds) and not self.is_refused:
            self.beat()
        if not self._ended.wait(_STUCK_SECONDS):
            log.critical("The lease is gone, and the work under it does not end: this process hangs")
            self._on_stuck()
