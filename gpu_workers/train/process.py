"""One training process: an attempt from its start to its outcome."""

import logging
from pathlib import Path

import torch

from apps.contracts.runs import Failed, RunSpec, Stopped
from gpu_workers.common.events import ChildOutcome, write_outcome
from gpu_workers.common.pulse import open_pulse
from gpu_workers.train.attempt import Attempt
from gpu_workers.train.failure_codes import classify
from gpu_workers.train.failures import StopRequested
from gpu_workers.train.loop.callbacks import StopFlag
from gpu_workers.train.loop.launch import Rank
from gpu_workers.train.model.memory import peak_memory_bytes

EXIT_DONE = 0
EXIT_FAILED = 3

log = logging.getLogger("gpu_workers.train")


def train(spec: RunSpec, work_dir: Path, *, hub_token: str | None, rank: Rank) -> int:
    """Train until the end or SIGTERM, and return the exit code.

    The first process of a machine writes its outcome; any process writes its failure.
    """
    stop = StopFlag()
    stop.install()
    torch.set_num_interop_threads(1)  # the number of intra-op threads is OMP_NUM_THREADS, from the executor
    if rank.is_first_here:
        open_pulse(work_dir)
    outcome = _outcome(Attempt(spec, work_dir, stop, hub_token=hub_token, rank=rank), spec)
    is_failed = isinstance(outcome, Failed)
    if is_failed or rank.is_first_here:
        write_outcome(work_dir, outcome)
    return EXIT_FAILED if is_failed else EXIT_DONE


def _outcome(attempt: Attempt, spec: RunSpec) -> ChildOutcome:
    try:
        return attempt.run()
    except StopRequested:
        return Stopped(reason="stopped", step=attempt.start_step)
    except Exception as error:  # process edge: every end must be reported
        log.exception("The attempt failed")
        failure = classify(error, is_group=spec.group is not None)
        return Failed(code=failure.code, message=failure.message, peak_memory_bytes=peak_memory_bytes())
    finally:
        attempt.close()
