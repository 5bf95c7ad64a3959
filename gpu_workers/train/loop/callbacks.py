"""The work around a step: progress for the agent, checkpoints by the clock, an orderly stop on SIGTERM."""

import math
import signal
import time
from collections import deque
from types import FrameType

import torch
import torch.distributed
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from apps.contracts.failures import FailureCode
from apps.contracts.runs import StepCompleted
from gpu_workers.common.events import UNNUMBERED, EventWriter
from gpu_workers.train.failures import TrainingFailed
from gpu_workers.train.loop.checkpoint import Progress
from gpu_workers.train.loop.process_group import is_distributed
from gpu_workers.train.model.memory import memory_bytes, read_gpu
from gpu_workers.train.model.sharding import whole

REPORT_INTERVAL_SECONDS = 0.25
LOSS_WINDOW_STEPS = 50
_SPEED_SECONDS = 10.0  # of training over which the reported speed is averaged


class StopFlag:
    """A flag that SIGTERM sets. It is read between steps, so that a checkpoint at a step's end resumes exactly."""

    def __init__(self) -> None:
        self.is_set = False

    def install(self) -> None:
        signal.signal(signal.SIGTERM, self._set)

    def _set(self, number: int, frame: FrameType | None) -> None:
        self.is_set = True

    def agree(self, *flags: bool) -> list[bool]:
        """Return whether any process must stop, and the first process's `flags`. If one must, this flag is set too.

        Clocks differ, and a signal reaches only one machine, but all must save or stop at the same step.
        """
        if not is_distributed():
            return [self.is_set, *flags]
        is_first = torch.distributed.get_rank() == 0
        device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
        values = [self.is_set, *(flag and is_first for flag in flags)]
        tensor = torch.tensor(values, dtype=torch.uint8, device=device)
        torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MAX)
        self.is_set, *agreed = (bool(value) for value in tensor.tolist())
        return [self.is_set, *agreed]


class StopWatch:
    """Seconds of training since the first ready step, without evaluation and checkpoint writing."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since: float | None = None

    def start(self) -> None:
        if self._since is None:
            self._since = time.monotonic()

    def pause(self) -> None:
        self._seconds = self.seconds
        self._since = None

    def go_on_from(self, seconds: float) -> None:
        """Forget the time of steps that are repeated."""
        self._seconds = seconds
        self._since = None

    @property
    def seconds(self) -> float:
        return self._seconds + (0.0 if self._since is None else time.monotonic() - self._since)


class Window:
    """Sums over the steps since the last report. Tensors stay on their device, so a report needs one transfer."""

    def __init__(self) -> None:
        self.steps = 0
        self.loss: torch.Tensor | float = 0.0
        self.n_correct: torch.Tensor | int = 0
        self.n_scored: torch.Tensor | int = 0  # the total of which `n_correct` is a share: trained tokens, or pairs
        self.n_trained: torch.Tensor | int = 0
        self.n_tokens: torch.Tensor | int = 0
        self.grad_norm: torch.Tensor | None = None

    def totals(self) -> list[float]:
        """Return loss, correct, scored, trained and tokens, summed over all processes."""
        parts = (self.loss, self.n_correct, self.n_scored, self.n_trained, self.n_tokens)
        values = [float(part) for part in parts]
        if not is_distributed():
            return values
        device = self.loss.device if isinstance(self.loss, torch.Tensor) else "cpu"
        tensor = torch.tensor(values, dtype=torch.float64, device=device)
        torch.distributed.all_reduce(tensor)
        return tensor.tolist()


class ProgressCallback(TrainerCallback):
    """Reports, saves checkpoints and stops; the trainer adds to `window`."""

    def __init__(
        self, events: EventWriter, stop: StopFlag, *, checkpoint_interval_seconds: float, steps_per_epoch: int
    ) -> None:
        self.window = Window()
        self.watch = StopWatch()
        self.trained_tokens = 0
        self.tokens: int | None = 0
        self.recent_losses: deque[float] = deque(maxlen=LOSS_WINDOW_STEPS)
        self.saved_step = -1
        self.saved_seconds = 0.0
        self.interval_seconds = checkpoint_interval_seconds
        self.saves_last_step = False
        self._events = events
        self._stop = stop
        self.steps_per_epoch = steps_per_epoch
        self._start_step = 0
        self._start_seconds = 0.0
        self._reported_at = 0.0
        self._counted: deque[tuple[float, float]] = deque()  # (seconds, tokens) of the last reports
        self._tokens_here = 0.0  # in this attempt
        self._saved_at = 0.0

    @property
    def mean_recent_loss(self) -> float | None:
        return sum(self.recent_losses) / len(self.recent_losses) if self.recent_losses else None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._start_step = state.global_step
        self._start_seconds = self.watch.seconds
        self._counted.append((self._start_seconds, self._tokens_here))
        self._saved_at = self._reported_at = time.monotonic()
        self.watch.start()

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        lr_scheduler: torch.optim.lr_scheduler.LRScheduler,
        **kwargs: object,
    ) -> None:
        is_last = state.global_step >= state.max_steps
        now = time.monotonic()
        is_stopping, is_save_due, is_report_due = self._stop.agree(
            self.is_save_due(now, state), now - self._reported_at >= REPORT_INTERVAL_SECONDS
        )
        should_save = self.saves_last_step if is_last else is_save_due
        if is_stopping and not is_last:
            should_save = control.should_training_stop = True
        if should_save or is_last or is_report_due or self.is_evaluation_due(state):
            self.report(state, learning_rate=lr_scheduler.get_last_lr()[0])
        control.should_save = should_save

    def is_save_due(self, now: float, state: TrainerState) -> bool:
        """Return whether a checkpoint is due by the clock."""
        return now - self._saved_at >= self.interval_seconds

    def is_evaluation_due(self, state: TrainerState) -> bool:
        return False

    def restore(self, progress: Progress) -> None:
        """Continue the counts of a checkpoint."""
        self.trained_tokens = progress.trained_tokens
        self.tokens = progress.tokens
        self.recent_losses.extend(progress.recent_losses)
        self.saved_step = progress.step

    def record_saved(self, step: int) -> None:
        self.saved_step = step
        self.saved_seconds = self.watch.seconds
        self._saved_at = time.monotonic()

    def report(self, state: TrainerState, *, learning_rate: float) -> None:
        """Add the window to the totals and write StepCompleted; raises TrainingFailed if the loss is unusable."""
        window, self.window = self.window, Window()
        total_loss, n_correct, n_scored, n_trained, n_tokens = window.totals()
        loss = total_loss / window.steps
        _require_usable(loss, state.global_step)
        self.trained_tokens += int(n_trained)
        self.tokens = None if self.tokens is None else self.tokens + int(n_tokens)
        self.recent_losses.append(loss)
        seconds, gpu = self.watch.seconds, read_gpu()
        self._reported_at = time.monotonic()
        norm = None if window.grad_norm is None else float(whole(window.grad_norm))
        done, left = state.global_step - self._start_step, state.max_steps - state.global_step
        self._events.write(
            StepCompleted(
                sequence=UNNUMBERED,
                step=state.global_step,
                total_steps=state.max_steps,
                epoch=state.global_step / self.steps_per_epoch,
                train_loss=loss,
                learning_rate=learning_rate,
                grad_norm=norm if norm is not None and math.isfinite(norm) else None,
                trained_tokens=self.trained_tokens,
                tokens_per_second=self._tokens_per_second(seconds, n_tokens),
                training_seconds=seconds,
                train_mean_token_accuracy=n_correct / n_scored if n_scored else None,
                memory_bytes=memory_bytes(),
                gpu_utilization=gpu.utilization,
                gpu_celsius=gpu.celsius,
                gpu_watts=gpu.watts,
                eta_seconds=(seconds - self._start_seconds) / done * left if done > 0 else None,
            )
        )

    def _tokens_per_second(self, seconds: float, n_tokens: float) -> float:
        """Return the speed over the last ten seconds of training, without evaluations and checkpoints.

        A single step may share its core with the upload of a checkpoint, so it is not representative.
        """
        self._tokens_here += n_tokens
        self._counted.append((seconds, self._tokens_here))
        while len(self._counted) > 2 and self._counted[1][0] <= seconds - _SPEED_SECONDS:
            self._counted.popleft()
        since, tokens = self._counted[0]
        return (self._tokens_here - tokens) / max(seconds - since, 1e-6)


def _require_usable(loss: float, step: int) -> None:
    if not math.isfinite(loss):
        message = f"The loss is not a finite number at step {step}; lower the learning rate."
        raise TrainingFailed(FailureCode.LOSS_NOT_FINITE, message)
    if loss == 0.0:
        message = f"The loss is exactly zero at step {step}: nothing is left to learn from these rows."
        raise TrainingFailed(FailureCode.LOSS_IS_ZERO, message)
