"""Rehearsals of memory, in a limited process without GPU and network, for the control plane or before a run."""

import logging
import resource
import subprocess
import sys
import time
from collections.abc import Callable

import msgspec

from apps.contracts.runs import MemoryReport, MemoryRequest, RunSpec
from apps.contracts.worker_api import RehearsalReport
from gpu_workers.common.api_client import ApiClient, ApiError, Unavailable
from gpu_workers.common.config import REPOSITORY, child_environment
from gpu_workers.common.preflight import list_gpus
from gpu_workers.trainer.children.confinement import confined

log = logging.getLogger(__name__)

_SECONDS = 300.0
_LEASED_SECONDS = 60.0  # while a run holds its GPUs
_LIMITS = (
    (resource.RLIMIT_CPU, 240),
    (resource.RLIMIT_DATA, 8 * 1024**3),  # of the process's own data; a rehearsal takes less than one
)


class NotRehearsed(Exception):
    """The memory could not be traced."""


class Interrupted(NotRehearsed):
    """Something else had to be done first. The memory can be traced later."""


class Rehearser:
    """Answers the control plane's requests for rehearsed memory, one at a time."""

    def __init__(self, api: ApiClient) -> None:
        self._api = api

    def run_one(self, *, should_stop: Callable[[], bool]) -> bool:
        """Take and report one request; return whether there was one.

        If `should_stop` returns true, return the request.
        """
        try:
            taken = self._api.take_rehearsal()
            if taken is None:
                return False
            try:
                report = RehearsalReport(digest=taken.digest, memory=rehearse(taken.memory, should_stop=should_stop))
            except Interrupted:
                report = RehearsalReport(digest=taken.digest)
            except NotRehearsed as error:
                report = RehearsalReport(digest=taken.digest, error=str(error)[:300])
            self._api.report_rehearsal(report)
        except (ApiError, Unavailable) as error:
            log.warning("No rehearsal: %s", error)
            return False
        return True


def rehearse(
    request: MemoryRequest, *, should_stop: Callable[[], bool] = lambda: False, seconds: float = _SECONDS
) -> MemoryReport:
    """Return the job's memory, traced by a separate process that lasts at most `seconds`.

    Raises NotRehearsed, and Interrupted once `should_stop` returns true.
    """
    ends_at, sent = time.monotonic() + seconds, msgspec.json.encode(request)
    with subprocess.Popen(
        confined([sys.executable, "-m", "gpu_workers.rehearsal"], has_network=False, limits=_LIMITS),
        cwd=REPOSITORY,
        env=child_environment(threads=1, devices=()),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as child:
        try:
            while True:
                try:
                    answer, _ = child.communicate(sent, timeout=0.5)
                    break
                except subprocess.TimeoutExpired:
                    sent = b""
                    if should_stop():
                        raise Interrupted("something else goes first") from None
                    if time.monotonic() > ends_at:
                        raise NotRehearsed(f"it took more than {seconds:.0f} s") from None
        finally:
            child.kill()
    if child.returncode and should_stop():  # a service manager ends all processes of a worker at once
        raise Interrupted("this worker ends")
    try:
        return msgspec.json.decode(answer, type=MemoryReport)
    except msgspec.DecodeError as error:
        raise NotRehearsed(answer.decode(errors="replace").strip() or f"it ended by {child.returncode}") from error


def with_rehearsal(spec: RunSpec, *, should_stop: Callable[[], bool]) -> RunSpec:
    """Return the run with its rehearsed memory: the one that the control plane knows, or else, for a GPU, a new one."""
    if spec.rehearsed_bytes is not None or spec.rehearsal is None or not list_gpus():
        return spec
    try:
        found = rehearse(spec.rehearsal, should_stop=should_stop, seconds=_LEASED_SECONDS)
    except NotRehearsed as error:
        log.warning("%s was not rehearsed: %s", spec.run_id, error)
        return spec
    return msgspec.structs.replace(spec, rehearsed_bytes=found.peak_bytes)
