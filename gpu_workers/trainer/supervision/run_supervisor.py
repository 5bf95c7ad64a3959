"""One claimed run, from its files to its report: prepare, execute in a child, publish, and report the outcome.

Nothing is reported once the lease is lost. Billing counts only what the control plane confirmed as durable.
"""

import logging
from typing import Any

import msgspec

from apps.contracts.evaluation import GraderKind
from apps.contracts.failures import FailureCode
from apps.contracts.runs import (
    Failed,
    LogLine,
    Phase,
    PhaseChanged,
    RunEvent,
    RunOutcome,
    StepCompleted,
    Stopped,
    StopReason,
    Succeeded,
    TrainingStarted,
)
from apps.contracts.worker_api import HeartbeatRequest
from gpu_workers.common.api_client import ApiError, StaleLease, Unauthorized, Unavailable
from gpu_workers.common.events import (
    EVENTS_FILE,
    LOG_FILE,
    UNNUMBERED,
    AdapterReady,
    CheckpointReady,
    ChildEvent,
    EventTail,
    read_outcome,
)
from gpu_workers.common.redaction import tail_of_log
from gpu_workers.common.transfers import Interrupted, Transfers
from gpu_workers.trainer.children.executor import Child
from gpu_workers.trainer.idle.rehearsals import with_rehearsal
from gpu_workers.trainer.preparation import prepare
from gpu_workers.trainer.progress_watch import ChildActivity, ProgressWatch
from gpu_workers.trainer.publication import EVALUATION, Publisher, PublishSecrets, alone
from gpu_workers.trainer.reporter import CheckpointUploader, Reporter, Uploader, deliver
from gpu_workers.trainer.run_checks import check_run
from gpu_workers.trainer.supervision.escort import (
    PREPARATION_ERRORS,
    Attempt,
    Forgotten,
    Haste,
    StopAsked,
    accompany,
    explain,
)
from gpu_workers.trainer.tracking.child import TrackingChild
from gpu_workers.trainer.tracking.points import FinalStatus

log = logging.getLogger(__name__)

# From SIGTERM to our return at most 110 s: 60 for the child, as `escort.py` says, then the upload and the reports.
_IN_HASTE_SECONDS = 40.0  # for the last checkpoint's upload and its report together
_EVENTS_SECONDS = 20.0
_EVENTS_IN_HASTE_SECONDS = 5.0
_TRACKING_IN_HASTE_SECONDS = 5.0
_TRACKING_SECONDS = 30.0
_REFUSED = "The result of the attempt was refused."
_PATIENT_SECONDS = 600.0  # for the last checkpoint's upload, and at a pause for its report, without haste
_TRANSFER_SECONDS = 120.0  # limit for one read or write of a transfer, with its retries


class RunSupervisor(Attempt):
    """Executes one claimed run. `run` does everything. The rest of the agent knows none of its phases."""

    def __init__(self, *args: Any, publisher: Publisher | None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._publisher = publisher
        self._status = HeartbeatRequest()
        self._reporter = Reporter(self._api, self._lease, self._keeper)
        self._is_delivering = False
        self._watch = ProgressWatch(least_seconds=self._claim.stall_seconds)
        self._transfers = Transfers(should_stop=self._must_end_transfers, note_bytes=self._watch.count_bytes)
        self._uploader = Uploader(self._api, self._lease, self._transfers)
        self._side_transfers = Transfers(should_stop=lambda: self._keeper.is_lost)
        side_uploader = Uploader(self._api, self._lease, self._side_transfers)
        self._checkpoints = CheckpointUploader(side_uploader, self._reporter, self._keeper, self._work_dir)
        self._tail = EventTail(self._work_dir / EVENTS_FILE)
        self._tracking: TrackingChild | None = None

    def run(self) -> None:
        """Execute the run and report it. It returns without a report only if the lease was lost."""
        for part in (self._keeper, self._reporter, self._checkpoints):
            part.start()
        try:
            outcome = self._outcome()
            if self._tracking is not None:
                patience = _TRACKING_IN_HASTE_SECONDS if self._stop_reason() else _TRACKING_SECONDS
                self._tracking.finish(_status_of(outcome), timeout_seconds=patience)
                self._pump()
            self._finish(outcome)
        except (Forgotten, StaleLease, Unauthorized):
            log.warning("Lost the lease of %s attempt %d", self._spec.run_id, self._spec.attempt)
        except Unavailable as error:
            log.error("Could not report the end of %s: %s", self._spec.run_id, error)
        finally:
            self._kill_child()
            if self._tracking is not None:
                self._tracking.kill()
            self._keeper.refuse()  # wakes all code that still waits for this lease
            self._checkpoints.finish(timeout_seconds=5)
            self._reporter.close()
            self._keeper.close()
            self._transfers.close()
            self._side_transfers.close()

    # --- phases --------------------------------------------------------------------------------------------------

    def _outcome(self) -> RunOutcome:
        """Return how the attempt ended; raises Forgotten, StaleLease, Unauthorized or Unavailable."""
        try:
            self._prepare()
            child = self._start_child()
            has_ended = accompany(
                child, self._keeper, stop_reason=self._stop_reason, look=self._pump, is_stalled=self._watch.check
            )
            return self._conclude(child) if has_ended else self._end_stalled(child)
        except StopAsked:
            return self._stopped()
        except Interrupted:
            self._require_place()
            return self._stalled(self._still()) if self._watch.is_stalled else self._stopped()
        except PREPARATION_ERRORS as error:
            return self._failed(*explain(error))
        except (StaleLease, Unauthorized):
            raise
        except ApiError as error:
            log.error("The files were refused: %s", error)
            return self._failed(FailureCode.INTERNAL_ERROR, _REFUSED)

    def _prepare(self) -> None:
        """Refuse a run that would certainly fail here, and fetch its files; raises the errors of `prepare`."""
        self._report(PhaseChanged(sequence=UNNUMBERED, phase=Phase.DOWNLOADING))
        self._work_dir.mkdir(parents=True, exist_ok=True)
        self._spec = with_rehearsal(self._spec, should_stop=lambda: self._keeper.is_lost or bool(self._stop_reason()))
        for line in check_run(self._spec, self._work_dir, self._devices):
            self._report(line)
        prepare(self._spec, self._work_dir, self._config, self._transfers, before_each=self._check)

    def _start_child(self) -> Child:
        self._check()
        self._tracking = TrackingChild(self._spec, self._work_dir)
        child = self._child = self._executor.start(
            self._work_dir,
            hub_token=self._spec.base_model.hub_token,
            devices=self._devices,
            # The child fetches a base model of a repository, and meets the other machines of a group.
            has_network=self._spec.base_model.path is None or self._spec.group is not None,
        )
        self._watch.follow(ChildActivity(child.leader, self._work_dir))
        return child

    def _conclude(self, child: Child) -> RunOutcome:
        self._watch.follow(None)
        outcome = read_outcome(self._work_dir)
        self._require_place()
        haste = Haste(self._is_hurried, seconds=_IN_HASTE_SECONDS)
        self._checkpoints.finish(timeout_seconds=_PATIENT_SECONDS, must_end=haste.is_over)
        is_pausing = self._stop_reason() is StopReason.PAUSED
        self._reporter.flush(
            timeout_seconds=_PATIENT_SECONDS if is_pausing else _EVENTS_SECONDS, must_end=haste.is_over
        )
        match outcome:
            case AdapterReady() if self._stop_reason() is not StopReason.CANCELLED:
                return self._store_adapter(outcome)
            case Failed():
                if outcome.code is FailureCode.WORKER_LOST:  # of another machine of the group
                    self._keeper.wait_for_refusal()
                return self._failed(outcome.code, outcome.message, peak_memory_bytes=outcome.peak_memory_bytes)
            case None if self._stop_reason() is None:
                message = f"The training process ended unexpectedly ({child.poll()})."
                if child.was_killed_for_memory():
                    message = "The job did not fit into the memory of the machine."
                    return self._failed(FailureCode.OUT_OF_MEMORY, message)
                return self._failed(FailureCode.INTERNAL_ERROR, message)
            case _:
                return self._stopped()

    def _store_adapter(self, ready: AdapterReady) -> RunOutcome:
        """Make all other promised parts and upload everything. A failed part is reported and stops nothing."""
        if self._publisher is None:
            published = alone(ready)
        else:
            self._report(PhaseChanged(sequence=UNNUMBERED, phase=Phase.EVALUATING))
            published = self._publisher.publish(
                self._spec,
                ready,
                self._work_dir,
                devices=self._devices,
                secrets=self._publish_secrets,
                should_stop=self._must_leave,
                begun=self._watch_over,
                watch=self._watch,
            )
            self._require_place()
        lacks_exports = any(part.kind in self._spec.exports for part in published.missing)
        if self._stop_reason() is StopReason.CANCELLED or (
            self._stop_reason() is StopReason.PREEMPTED and lacks_exports
        ):
            return self._stopped()  # the next attempt begins at the last step and makes them
        self._report(PhaseChanged(sequence=UNNUMBERED, phase=Phase.UPLOADING))
        self._is_delivering = True
        return deliver(ready, published, self._work_dir, self._uploader)

    def _watch_over(self, child: Child) -> None:
        self._child = child

    def _publish_secrets(self, part: str) -> PublishSecrets:
        """Return the secrets for a part's child, with the reason if its judge has no key. Raises StaleLease."""
        plan, hub_token = self._spec.evaluation, self._spec.base_model.hub_token
        if part != EVALUATION or plan is None or plan.grader.kind is not GraderKind.JUDGE:
            return PublishSecrets(part=part, hub_token=hub_token)
        try:
            return PublishSecrets(part=part, hub_token=hub_token, judge=self._api.open_judge(self._lease))
        except StaleLease:
            raise
        except (ApiError, Unavailable) as error:
            log.warning("No key for the judge of %s: %s", self._spec.run_id, error)
            words = error.message if isinstance(error, ApiError) else "the platform could not be reached"
            return PublishSecrets(part=part, hub_token=hub_token, judge_refusal=words)

    def _must_leave(self) -> bool:
        """Return whether to abandon the parts after training. A pause comes too late to stop anything."""
        return self._keeper.is_lost or self._stop_reason() in (StopReason.CANCELLED, StopReason.PREEMPTED)

    def _end_stalled(self, child: Child) -> RunOutcome:
        """End a child without progress, with its stacks in the log. Its stored checkpoints stay durable."""
        message = self._still()
        with (self._work_dir / LOG_FILE).open("a") as file:
            file.write(f"{message}\n{ChildActivity(child.leader, self._work_dir).describe()}\n")
        child.end_with_stacks()
        self._pump()
        self._checkpoints.finish(timeout_seconds=_IN_HASTE_SECONDS)
        self._reporter.flush(timeout_seconds=_EVENTS_SECONDS)
        return self._stalled(message)

    def _stalled(self, message: str) -> RunOutcome:
        self._require_place()
        return self._stopped() if self._stop_reason() else self._failed(FailureCode.STALLED, message)

    def _still(self) -> str:
        phase = self._status.phase or "preparing"
        return f"No progress for {self._watch.still_seconds:.0f} s while {phase}, after step {self._status.step}."

    def _must_end_transfers(self) -> bool:
        """Return whether to end transfers. An unwanted result is not delivered, but earlier checkpoints are."""
        is_unwanted = self._is_delivering and self._stop_reason() is StopReason.CANCELLED
        return self._keeper.is_lost or is_unwanted or self._watch.check(most_seconds=_TRANSFER_SECONDS)

    def _finish(self, outcome: RunOutcome) -> None:
        """Report the end; raises StaleLease, Unauthorized, Unavailable or Forgotten."""
        self._reporter.flush(timeout_seconds=_EVENTS_IN_HASTE_SECONDS if self._is_hurried() else 30)
        self._require_place()
        log.info("%s attempt %d: %s", self._spec.run_id, self._spec.attempt, type(outcome).__name__)
        try:
            self._api.finish(self._lease, outcome)
        except (StaleLease, Unauthorized):
            raise
        except ApiError as error:
            log.error("The outcome was refused: %s", error)
            code = FailureCode.OBJECT_STORE_UNAVAILABLE if error.code == "upload_incomplete" else None
            refused = self._failed(code or FailureCode.INTERNAL_ERROR, _REFUSED)
            self._api.finish(self._lease, refused)

    # --- reporting -------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        for event in self._tail.read():
            self._follow(event)
            if isinstance(event, CheckpointReady):
                self._checkpoints.add(event)
            else:
                self._reporter.add(event)
        for warning in self._tracking.warnings() if self._tracking is not None else ():
            self._report(warning)

    def _report(self, event: RunEvent) -> None:
        self._follow(event)
        self._reporter.add(event)

    def _follow(self, event: ChildEvent) -> None:
        replace = msgspec.structs.replace
        if not isinstance(event, LogLine):  # log lines alone are no progress
            self._watch.record_progress()
        match event:
            case PhaseChanged():
                self._status = replace(self._status, phase=event.phase.value)
            case TrainingStarted():
                self._status = replace(self._status, step=event.start_step)
                self._watch.expect((self._spec.expected_training_seconds or 0.0) / max(event.total_steps, 1))
            case StepCompleted():
                self._status = replace(self._status, step=event.step, training_seconds=event.training_seconds)
            case LogLine():
                log.info("%s: %s", self._spec.run_id, event.message)

    def _current_status(self) -> HeartbeatRequest:
        memory = self._child.memory_bytes() if self._child is not None else None
        return msgspec.structs.replace(self._status, memory_bytes=memory, work=self._watch.work)

    def _is_hurried(self) -> bool:
        """Return whether the machine is wanted at once. A pause alone can wait until its checkpoint is stored."""
        return self._is_stopping() or self._stop_reason() in (StopReason.CANCELLED, StopReason.PREEMPTED)

    def _stopped(self) -> Stopped:
        durable = self._reporter.durable
        return Stopped(
            reason=self._stop_reason() or StopReason.PREEMPTED,
            step=durable.step,
            training_seconds=durable.training_seconds,
            trained_tokens=durable.trained_tokens,
        )

    def _failed(self, code: FailureCode, message: str, *, peak_memory_bytes: int | None = None) -> Failed:
        durable = self._reporter.durable
        keys = [tracker.secret for tracker in self._spec.trackers]
        return Failed(
            code=code,
            message=message,
            log_tail=tail_of_log(self._work_dir, known=[self._spec.base_model.hub_token, self._lease.token, *keys]),
            training_seconds=durable.training_seconds,
            trained_tokens=durable.trained_tokens,
            peak_memory_bytes=peak_memory_bytes,
        )


def _status_of(outcome: RunOutcome) -> FinalStatus:
    match outcome:
        case Succeeded():
            return FinalStatus.SUCCEEDED
        case Stopped():
            return FinalStatus(outcome.reason)
        case _:
            return FinalStatus.FAILED
