"""A job as one run of Weights & Biases, through its own library, which is the only documented way."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from apps.contracts.runs import Tracker
from gpu_workers.trainer.tracking.points import FinalStatus, MetricPoint

try:
    import wandb
except ImportError:  # an option of the operator: requirements/engines/engines.in
    wandb = None

_START_SECONDS = 60.0
_FAILED = 1


class WandbRun:
    """The run with the job's id. A resumed job continues it. Only metrics and the recipe are sent."""

    def __init__(self, tracker: Tracker, *, job_id: str, parameters: Mapping[str, str], folder: Path) -> None:
        if wandb is None:
            raise RuntimeError("the wandb package is not installed on this worker")
        settings = wandb.Settings(
            api_key=tracker.secret,
            console="off",
            silent=True,
            disable_code=True,
            disable_git=True,
            disable_job_creation=True,
            x_disable_machine_info=True,
            x_disable_meta=True,
            x_disable_stats=True,
            init_timeout=_START_SECONDS,
        )
        with _told():
            self._run: Any = wandb.init(
                project=tracker.project,
                entity=tracker.entity,
                name=tracker.name or job_id,
                tags=list(tracker.tags),
                id=job_id,
                resume="allow",
                config=dict(parameters),
                dir=str(folder),
                settings=settings,
            )

    def log(self, points: Sequence[MetricPoint]) -> None:
        with _told():
            for point in points:
                self._run.log(point.values, step=point.step)

    def finish(self, status: FinalStatus) -> None:
        with _told():
            self._run.finish(exit_code=_FAILED if status is FinalStatus.FAILED else 0)
            wandb.teardown()  # only then has its service written and sent everything


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Raise the library's own errors as RuntimeError."""
    try:
        yield
    except wandb.Error as error:
        raise RuntimeError(str(error)) from error
    except SystemExit as error:  # raised when its service failed: other trackers continue
        raise RuntimeError(f"its service ended with {error.code}") from error
