"""Machines as the control plane sees them: they claim, beat, train and report, and fail in every way they can."""

import functools
import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from apps.contracts import runs as wire
from apps.contracts.failures import FailureCode
from apps.contracts.worker_api import ClaimRequest, ClaimResponse, HeartbeatRequest, LeaveRequest
from apps.core.objects.store import store
from apps.finetuning.lifecycle import HEARTBEAT_SECONDS, SELF_FENCE_SECONDS
from apps.finetuning.models import RunUpload, Worker
from apps.finetuning.runs import endings, leases, members, reports, uploads
from apps.finetuning.runs.leases import Lease, StaleLease
from tests.factories.finetuning import adapter_files, checkpoint_files, manifest_of

TOTAL_STEPS, SAVED_EVERY = 40, 10
_STEPS_A_SECOND = (0.2, 0.6, 2.0)
_LOADING_SECONDS = 5.0
_FAILURES = (
    FailureCode.GPU_FAULT, FailureCode.OUT_OF_MEMORY, FailureCode.LOSS_NOT_FINITE, FailureCode.CHECKPOINT_INVALID,
    FailureCode.INTERNAL_ERROR,
)  # fmt: skip


Answer = TypeVar("Answer")


class MessageLost(Exception):
    """A call did not arrive, or its answer did not: the machine cannot know which."""


@dataclass(eq=False)
class LocalRun:
    """What a machine knows of a run that it works on. `at` are seconds of its own clock."""

    claimed: ClaimResponse
    claimed_at: float
    heard_at: float  # the last answer of the control plane
    steps_a_second: float
    beat_at: float = -1e9
    started_at: float | None = None
    step: int = 0
    saved_step: int = 0
    sequence: int = 0
    unsent: list[wire.RunEvent] = field(default_factory=list)
    asked: str = ""  # a StopReason
    outcome: wire.RunOutcome | None = None

    @property
    def spec(self) -> wire.RunSpec:
        return self.claimed.spec

    @property
    def lease(self) -> Lease:
        return Lease(id=self.claimed.lease_id, token=self.claimed.lease_token)

    @property
    def rank(self) -> int:
        return self.spec.group.rank if self.spec.group else 0

    @property
    def start_step(self) -> int:
        return self.spec.resume_from.step if self.spec.resume_from else 0

    def note(self, kind: type[wire.RunEvent], **fields: object) -> None:
        """Keep an event until the control plane confirms it."""
        self.sequence += 1
        self.unsent.append(kind(sequence=self.sequence, **fields))


class Machine:
    """One worker process. Each message is lost with the probability `loss`.

    `holders` is shared by all machines: the lease that was granted last, by job.
    """

    def __init__(
        self, worker: Worker, number: int, seeded: random.Random, holders: dict[str, str], *, born_at: float = 0.0
    ) -> None:
        self.worker, self.number, self.random, self.holders = worker, number, seeded, holders
        self.runs: list[LocalRun] = []
        self.busy_at = born_at
        self.is_refused = False
        self.loss = 0.0
        self.silent_until = self.gone_until = 0.0
        self.has_fence = True  # one without works on under a lease that it lost
        self._claimed_at = -1e9
        self._delivered: tuple[LocalRun, tuple[wire.RunEvent, ...]] | None = None

    def live(self, now: float) -> None:
        """Do what is due."""
        if now < self.silent_until:
            return
        self.is_refused = Worker.objects.get(pk=self.worker.pk).revoked_at is not None
        if now < self.gone_until or self.is_refused:
            self.runs.clear()
            return
        if self.runs:
            self.busy_at = now
        for run in list(self.runs):
            self._serve(run, now)
        if now - self._claimed_at >= HEARTBEAT_SECONDS:
            self._claimed_at = now
            self._claim(now)

    def restart(self, now: float, seconds: float) -> None:
        """Lose every process and its memory."""
        self.runs.clear()
        self.gone_until = now + seconds

    def fail(self) -> None:
        """Have the training of one run end with an error."""
        training = [run for run in self.runs if run.rank == 0 and run.started_at is not None and run.outcome is None]
        if training:
            code = self.random.choice(_FAILURES)
            self.random.choice(training).outcome = wire.Failed(code=code, message="It failed.", training_seconds=1e6)

    def repeat(self) -> None:
        """Deliver events again that were delivered long ago."""
        if self._delivered is not None:
            run, reported = self._delivered
            try:
                reports.record_events(lease=run.lease, reported=reported)
            except StaleLease:
                return
            self._require_holder(run)

    def _serve(self, run: LocalRun, now: float) -> None:
        try:
            if run.rank:
                self._follow(run, now)
            else:
                self._lead(run, now)
        except MessageLost:
            if self.has_fence and now - run.heard_at > SELF_FENCE_SECONDS:
                self.runs.remove(run)
        except StaleLease:
            self.runs.remove(run)

    def _call(self, run: LocalRun, now: float, operation: Callable[[], Answer]) -> Answer:
        if self.random.random() < self.loss:
            raise MessageLost
        answer = operation()
        self._require_holder(run)
        if self.random.random() < self.loss:
            raise MessageLost
        run.heard_at = now
        return answer

    def _require_holder(self, run: LocalRun) -> None:
        holder = self.holders[run.spec.job_id]
        assert holder == run.lease.id, f"{run.lease.id} was believed, but {holder} has {run.spec.job_id}"

    def _claim(self, now: float) -> None:
        request = ClaimRequest(
            address=f"10.0.0.{self.number}",
            port=29_500 + self.number,
            leases=tuple(run.lease.id for run in self.runs),
            free_gpus=self.worker.gpu_count - sum(run.spec.gpus_here for run in self.runs),
        )
        if self.random.random() < self.loss:
            return
        claimed = members.claim(worker=Worker.objects.select_related("pool").get(pk=self.worker.pk), request=request)
        if claimed is None:
            return
        self.holders[claimed.spec.job_id] = claimed.lease_id
        if self.random.random() >= self.loss:
            run = LocalRun(claimed, now, now, self.random.choice(_STEPS_A_SECOND))
            run.step = run.saved_step = run.start_step
            self.runs.append(run)

    def _follow(self, run: LocalRun, now: float) -> None:
        """Work as a machine of a group beside the first."""
        if now - run.beat_at >= HEARTBEAT_SECONDS:
            run.beat_at = now
            answer = self._call(run, now, lambda: members.heartbeat(lease=run.lease))
            if answer.is_drain_requested:
                stopped = LeaveRequest(outcome=wire.Stopped(reason=wire.StopReason.PREEMPTED))
                self._call(run, now, lambda: members.leave(lease=run.lease, outcome=stopped))
                self.runs.remove(run)

    def _lead(self, run: LocalRun, now: float) -> None:
        """Work as the machine that reports."""
        if now - run.beat_at >= HEARTBEAT_SECONDS:
            run.beat_at = now
            self._beat(run, now)
        if run.outcome is None:
            self._train(run, now)
        if run.unsent:
            reported = tuple(run.unsent)
            self._call(run, now, lambda: reports.record_events(lease=run.lease, reported=reported))
            self._delivered = (run, reported)
            run.unsent = []
        if (outcome := run.outcome) is not None:
            self._call(run, now, lambda: endings.finish_run(lease=run.lease, outcome=outcome))
            self.runs.remove(run)

    def _beat(self, run: LocalRun, now: float) -> None:
        seconds = now - run.started_at if run.started_at is not None else 0.0
        beat = HeartbeatRequest(step=run.step, training_seconds=seconds, work=int(now - run.claimed_at))
        answer = self._call(run, now, lambda: leases.heartbeat(lease=run.lease, beat=beat))
        if answer.is_cancel_requested:
            run.asked = wire.StopReason.CANCELLED
        elif answer.is_pause_requested:
            run.asked = wire.StopReason.PAUSED
        elif answer.is_drain_requested:
            run.asked = wire.StopReason.PREEMPTED

    def _train(self, run: LocalRun, now: float) -> None:
        """Go on to the step that is reached by now; save, and note what there is to report."""
        if run.started_at is None:
            if run.asked:
                run.outcome = wire.Stopped(reason=run.asked, step=run.step)
            elif now - run.claimed_at >= _LOADING_SECONDS:
                run.started_at = now
                start = {
                    "total_steps": TOTAL_STEPS,
                    "start_step": run.step,
                    "rows": 100,
                    "trained_tokens_per_epoch": 500,
                }
                run.note(wire.TrainingStarted, **start)
            return
        seconds = now - run.started_at
        step = min(run.start_step + int(seconds * run.steps_a_second), TOTAL_STEPS)
        if step > run.step:
            run.step = step
            run.note(
                wire.StepCompleted, step=step, total_steps=TOTAL_STEPS, epoch=step / TOTAL_STEPS, train_loss=1.0,
                learning_rate=1e-3, grad_norm=1.0, trained_tokens=step, tokens_per_second=1.0, training_seconds=seconds,
            )  # fmt: skip
        is_over = run.step == TOTAL_STEPS
        if not is_over and (run.asked or run.step - run.saved_step >= SAVED_EVERY):
            self._save(run, now, seconds)
        if is_over:
            upload = self._upload(run, now, "adapter", _adapter(run.spec.hyperparameters.lora_rank))
            run.outcome = wire.Succeeded(
                upload_id=upload.pk, manifest_sha256=upload.manifest_sha256, step=run.step, training_seconds=seconds,
                trained_tokens=run.step,
            )  # fmt: skip
        elif run.asked:
            run.outcome = wire.Stopped(reason=run.asked, step=run.step, training_seconds=seconds)

    def _save(self, run: LocalRun, now: float, seconds: float) -> None:
        if run.step > run.saved_step:
            upload = self._upload(run, now, "checkpoint", checkpoint_files())
            run.saved_step = run.step
            run.note(
                wire.CheckpointSaved, step=run.step, upload_id=upload.pk, manifest_sha256=upload.manifest_sha256,
                bytes=12, trained_tokens=run.step, training_seconds=seconds,
            )  # fmt: skip

    def _upload(self, run: LocalRun, now: float, kind: str, files: dict[str, bytes]) -> RunUpload:
        manifest = manifest_of(kind, run.spec.run_id, run.spec.attempt, run.step, files)
        body = msgspec.json.encode(manifest)
        sealed = hashlib.sha256(body).hexdigest()
        answer = self._call(
            run, now, lambda: uploads.create_upload(lease=run.lease, manifest=manifest, manifest_sha256=sealed)
        )
        upload = RunUpload.objects.get(pk=answer.upload_id)
        for name, content in [*files.items(), (uploads.MANIFEST_NAME, body)]:
            store().put_stream(f"{upload.object_prefix}/{name}", [content])
        return upload


@functools.cache
def _adapter(rank: int) -> dict[str, bytes]:
    from apps.catalog.models import BaseModel

    return adapter_files(BaseModel.objects.get(), rank=rank)
