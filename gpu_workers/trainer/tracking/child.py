"""Start and end of the process that reports to the customer's trackers. Without trackers, there is no process."""

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

import msgspec

from apps.contracts.runs import LogLine, RunSpec
from gpu_workers.common.config import REPOSITORY, child_environment
from gpu_workers.common.events import LOG_FILE, UNNUMBERED, EventTail
from gpu_workers.trainer.children.confinement import confined
from gpu_workers.trainer.tracking.points import FinalStatus

MODULE = "gpu_workers.trainer.tracking.process"
TRACKING_FILE = "tracking.jsonl"

log = logging.getLogger(__name__)


class TrackingChild:
    """Follows one attempt. Nothing here raises: a tracker must never stop a run."""

    def __init__(self, spec: RunSpec, work_dir: Path) -> None:
        self._tail = EventTail(work_dir / TRACKING_FILE)
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = _start(spec, work_dir) if spec.trackers else None
        except OSError as error:
            log.error("No process for the trackers: %s", error)

    def warnings(self) -> list[LogLine]:
        """Return the process's warnings since the last call."""
        found = [event for event in self._tail.read() if isinstance(event, LogLine)]
        if self._process is not None and self._process.poll():
            self._process = None
            message = "The trackers get no more of this run, which goes on without them: their process ended."
            found.append(LogLine(sequence=UNNUMBERED, level="warn", message=message))
        return found

    def finish(self, status: FinalStatus, *, timeout_seconds: float) -> None:
        """Let the process send the rest and the attempt's outcome, within the timeout."""
        if self._process is None:
            return
        _say(self._process.stdin, {"status": status})
        try:
            self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self._process.wait()


def _start(spec: RunSpec, work_dir: Path) -> subprocess.Popen[bytes]:
    with (work_dir / LOG_FILE).open("ab") as log:
        process = subprocess.Popen(
            confined([sys.executable, "-m", MODULE, str(work_dir)], has_network=True),
            cwd=REPOSITORY,
            env=child_environment(threads=1, has_network=True),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    recipe = msgspec.to_builtins(spec.hyperparameters)
    parameters = {name: str(value) for name, value in recipe.items()} | {"base_model": spec.base_model.name}
    trackers = msgspec.to_builtins(spec.trackers)
    _say(process.stdin, {"trackers": trackers, "job_id": spec.job_id, "parameters": parameters}, is_last=False)
    return process


def _say(stdin: IO[bytes] | None, message: dict[str, object], *, is_last: bool = True) -> None:
    assert stdin is not None
    try:
        stdin.write(msgspec.json.encode(message) + b"\n")
        stdin.flush()
        if is_last:
            stdin.close()
    except (BrokenPipeError, ValueError):
        pass  # it is dead already
