"""Delivery of events to the customer's own trackers: `python -m gpu_workers.trainer.tracking.process WORK_DIR`.

Standard input is JSON lines. The first line is the `Assignment` with the customer's keys, so that they appear in no
file, argument or environment. The last line, after the run, is a `Farewell`. Each failure is one warning in
tracking.jsonl. The run neither waits for this process nor fails because of it.
"""

import logging
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import httpx
import msgspec

from apps.contracts.runs import LogLine, Struct, Tracker
from gpu_workers.common.events import EVENTS_FILE, UNNUMBERED, EventTail, EventWriter
from gpu_workers.common.redaction import redact
from gpu_workers.trainer.tracking.mlflow import MlflowRun
from gpu_workers.trainer.tracking.points import FinalStatus, MetricPoint, points_of
from gpu_workers.trainer.tracking.wandb import WandbRun

MODULE = "gpu_workers.trainer.tracking.process"
TRACKING_FILE = "tracking.jsonl"
NAMES = {"wandb": "Weights & Biases", "mlflow": "MLflow"}
_POLL_SECONDS = 1.0
# All errors that these libraries raise for a faulty server, network or key.
_FAULTS = (OSError, RuntimeError, ValueError, KeyError, TypeError, httpx.HTTPError, msgspec.MsgspecError)

log = logging.getLogger(MODULE)


class Assignment(Struct, frozen=True, kw_only=True):
    """The trackers and the run to report. `parameters` are the recipe's, as text."""

    trackers: tuple[Tracker, ...]
    job_id: str
    parameters: dict[str, str]


class Farewell(Struct, frozen=True, kw_only=True):
    """The outcome of the attempt."""

    status: FinalStatus


class Sink(Protocol):
    """One tracker's run."""

    def log(self, points: Sequence[MetricPoint]) -> None: ...

    def finish(self, status: FinalStatus) -> None: ...


def open_sink(tracker: Tracker, assignment: Assignment, work_dir: Path) -> Sink:
    """Begin or continue the tracker's run of this job."""
    match tracker.kind:
        case "wandb":
            return WandbRun(tracker, job_id=assignment.job_id, parameters=assignment.parameters, folder=work_dir)
        case "mlflow":
            return MlflowRun(tracker, job_id=assignment.job_id, parameters=assignment.parameters)
        case _:
            raise ValueError(f"no tracker of the kind {tracker.kind!r} is known here")


class Tracking:
    """All trackers of a run. A tracker that fails gets no further calls."""

    def __init__(self, assignment: Assignment, work_dir: Path, *, open_one: Callable[..., Sink] = open_sink) -> None:
        self._assignment = assignment
        self._work_dir = work_dir
        self._open_one = open_one
        self._warnings = EventWriter(work_dir / TRACKING_FILE)
        self._sinks: dict[str, Sink] = {}

    def begin(self) -> None:
        for tracker in self._assignment.trackers:
            self._try(tracker.kind, partial(self._open, tracker))

    def log(self, points: Sequence[MetricPoint]) -> None:
        for kind, sink in list(self._sinks.items()) if points else ():
            self._try(kind, partial(sink.log, points))

    def finish(self, status: FinalStatus) -> None:
        for kind, sink in list(self._sinks.items()):
            self._try(kind, partial(sink.finish, status))
        self._warnings.close()

    def _open(self, tracker: Tracker) -> None:
        self._sinks[tracker.kind] = self._open_one(tracker, self._assignment, self._work_dir)

    def _try(self, kind: str, act: Callable[[], None]) -> None:
        try:
            act()
        except _FAULTS as error:
            self._sinks.pop(kind, None)
            log.warning("%s failed: %s", kind, type(error).__name__)
            secrets = [tracker.secret for tracker in self._assignment.trackers]
            cause = " ".join(redact(str(error), known=secrets).split())[:200] or type(error).__name__
            message = f"{NAMES.get(kind, kind)} gets no more of this run, which goes on without it: {cause}"
            self._warnings.write(LogLine(sequence=UNNUMBERED, level="warn", message=message))


def main(work_dir: Path) -> int:
    """Follow the trainer's events until standard input reports the outcome, or ends."""
    assignment = msgspec.json.decode(sys.stdin.buffer.readline(), type=Assignment)
    farewell: list[Farewell] = []
    is_over = threading.Event()

    def listen() -> None:
        if line := sys.stdin.buffer.readline():
            farewell.append(msgspec.json.decode(line, type=Farewell))
        is_over.set()

    threading.Thread(target=listen, daemon=True).start()
    tracking, tail = Tracking(assignment, work_dir), EventTail(work_dir / EVENTS_FILE)
    tracking.begin()
    while not is_over.wait(_POLL_SECONDS):
        tracking.log(points_of(tail.read()))
    tracking.log(points_of(tail.read()))
    tracking.finish(farewell[0].status if farewell else FinalStatus.FAILED)
    return 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    sys.exit(main(Path(sys.argv[1])))
