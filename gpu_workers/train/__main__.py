"""`python -m gpu_workers.train SPEC.json WORK_DIR`: train one attempt and write its outcome to outcome.json.

Reads one JSON line from standard input: {"hub_token": …}, so that a token appears in no file, argument or environment.
On several GPUs, or with shards in the host's memory, this process starts one process of the same kind for each GPU and
waits. Exit codes: 0 outcome.json holds an adapter or an orderly stop · 3 outcome.json holds a failure · any other code
or a signal: the process died without an outcome, and the agent decides what that means.
"""

import logging
import sys
from pathlib import Path

import msgspec
import torch

from apps.contracts.runs import Failed, RunSpec, Stopped
from gpu_workers.common.events import ChildOutcome, write_outcome
from gpu_workers.common.pulse import open_pulse
from gpu_workers.train.attempt import Attempt
from gpu_workers.train.failures import StopRequested, classify
from gpu_workers.train.loop.callbacks import StopFlag
from gpu_workers.train.loop.launch import Rank, read_rank, run_ranks
from gpu_workers.train.model.memory import peak_memory_bytes

EXIT_DONE = 0
EXIT_FAILED = 3

log = logging.getLogger("gpu_workers.train")


def main(spec_path: Path, work_dir: Path) -> int:
    """Run the attempt; return the exit code."""
    spec = msgspec.json.decode(spec_path.read_bytes(), type=RunSpec)
    secret_line = sys.stdin.buffer.readline() or b"{}"
    rank = read_rank()
    if (spec.gpu_count > 1 or spec.parallelism == "fsdp") and rank is None:
        return run_ranks(sys.argv, count=spec.gpu_count, secret_line=secret_line)
    stop = StopFlag()
    stop.install()
    torch.set_num_interop_threads(1)  # the number of intra-op threads is OMP_NUM_THREADS, from the executor
    secrets = msgspec.json.decode(secret_line, type=dict[str, str | None])
    rank = rank or Rank()
    if rank.is_first:
        open_pulse(work_dir)
    outcome = _outcome(Attempt(spec, work_dir, stop, hub_token=secrets.get("hub_token"), rank=rank))
    if rank.is_first:
        write_outcome(work_dir, outcome)
    return EXIT_FAILED if isinstance(outcome, Failed) else EXIT_DONE


def _outcome(attempt: Attempt) -> ChildOutcome:
    try:
        return attempt.run()
    except StopRequested:
        return Stopped(reason="stopped", step=attempt.start_step)
    except Exception as error:  # process edge: every end must be reported
        log.exception("The attempt failed")
        failure = classify(error)
        return Failed(code=failure.code, message=failure.message, peak_memory_bytes=peak_memory_bytes())
    finally:
        attempt.close()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
