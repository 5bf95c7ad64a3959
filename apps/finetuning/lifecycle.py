"""Legal transitions of jobs and runs, and the limits of leases and attempts."""

from apps.core.database.transitions import Transitions, terminal_states

JOB_TRANSITIONS: Transitions = {
    "validating_files": frozenset({"queued", "failed", "cancelled"}),
    "queued": frozenset({"running", "failed", "cancelled"}),
    "running": frozenset({"queued", "pausing", "succeeded", "failed", "cancelled"}),
    "pausing": frozenset({"paused", "running", "succeeded", "failed", "cancelled"}),
    "paused": frozenset({"queued", "failed", "cancelled"}),
    "succeeded": frozenset(),
    "failed": frozenset(),
    "cancelled": frozenset(),
}
JOB_TERMINAL = terminal_states(JOB_TRANSITIONS)

RUN_TRANSITIONS: Transitions = {
    "queued": frozenset({"leased", "cancelled"}),
    "leased": frozenset({"running", "failed", "cancelled", "paused", "lost"}),
    "running": frozenset({"succeeded", "failed", "cancelled", "paused", "lost"}),
    "succeeded": frozenset(),
    "failed": frozenset(),
    "cancelled": frozenset(),
    "paused": frozenset(),
    "lost": frozenset(),
}
RUN_TERMINAL = terminal_states(RUN_TRANSITIONS)
RUN_HOLDING_LEASE = ("leased", "running")
RUN_ACTIVE = ("queued", "leased", "running")
NO_LEASE = {"lease_id": None, "lease_token_sha256": None, "lease_expires_at": None}

LEASE_SECONDS = 60
HEARTBEAT_SECONDS = 10
SELF_FENCE_SECONDS = 45
REAPER_SECONDS = 15
MAX_CHECKPOINT_SECONDS = 300.0
MAX_LOST_ATTEMPTS = 20
MAX_ATTEMPTS_WITHOUT_PROGRESS = 3
MAX_STALLED_ATTEMPTS = 2
