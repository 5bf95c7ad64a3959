"""`python -m gpu_workers.train SPEC.json WORK_DIR`: train one attempt and write its outcome to outcome.json.

Reads one JSON line from standard input: {"hub_token": …}, so that a token appears in no file, argument or environment.
On several GPUs, or with shards in the host's memory, this process starts one process of the same kind for each GPU of
this machine and waits. Exit codes: 0 outcome.json holds an adapter or an orderly stop · 3 outcome.json holds a failure
· any other code or a signal: the process died without an outcome, and the agent decides what that means.
"""

import logging
import os
import signal
import sys
from pathlib import Path

import msgspec

from apps.contracts.runs import RunSpec
from gpu_workers.common.events import forget_failure
from gpu_workers.train.loop.launch import Rank, read_rank, run_ranks


def main(spec_path: Path, work_dir: Path) -> int:
    """Run the attempt; return the exit code."""
    spec = msgspec.json.decode(spec_path.read_bytes(), type=RunSpec)
    secret_line = sys.stdin.buffer.readline() or b"{}"
    rank = read_rank()
    if (spec.gpu_count > 1 or spec.parallelism == "fsdp") and rank is None:
        code = run_ranks(sys.argv, count=spec.gpus_here, secret_line=secret_line, group=spec.group)
        if code == -signal.SIGKILL:
            forget_failure(work_dir)  # the others' failure is only that they lost the process that was killed
        return code
    from gpu_workers.train.process import train  # noqa: PLC0415 - torch: seconds that must not delay `run_ranks`

    secrets = msgspec.json.decode(secret_line, type=dict[str, str | None])
    return train(spec, work_dir, hub_token=secrets.get("hub_token"), rank=rank or Rank())


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    code = main(Path(sys.argv[1]), Path(sys.argv[2]))
    if code == -signal.SIGKILL:  # the agent recognizes the kernel's end of a process for its memory by the signal
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(code)
