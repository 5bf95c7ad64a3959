"""Many seeds of the simulation, on every core: `make simulate SEEDS=10000`.

    python -m tests.fuzz.simulation [--seeds 10000] [--first 0]

Each process has a database of its own. A broken rule is printed with its seed. The last line is one JSON object. The
exit code is 1 if a rule broke, or a job that was submitted is missing among those that ended or wait.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from tests.fuzz.simulation.seeds import prepare, run_seeds
from tests.services.plugin import start_services

_CHUNK = 10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args()
    start_services()
    began, broken, submitted, ends = time.monotonic(), 0, 0, Counter[str]()
    seeds = range(given.first, given.first + given.seeds)
    chunks = [seeds[at : at + _CHUNK] for at in range(0, len(seeds), _CHUNK)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context, initializer=prepare) as pool:
        for number, (problems, jobs, counted) in enumerate(pool.map(run_seeds, chunks), start=1):
            submitted += jobs
            ends.update(counted)
            broken += len(problems)
            for problem in problems:
                sys.stdout.write(f"{problem}\n")
            if number % 10 == 0:
                sys.stdout.write(f"{number * _CHUNK} seeds, {broken} broken, {time.monotonic() - began:.0f} s\n")
                sys.stdout.flush()
    summary = {
        "seeds": given.seeds, "first": given.first, "broken": broken, "submitted": submitted,
        "jobs": dict(sorted(ends.items())), "seconds": round(time.monotonic() - began),
    }  # fmt: skip
    sys.stdout.write(json.dumps(summary) + "\n")
    return int(broken > 0 or ends.total() != submitted)


if __name__ == "__main__":
    sys.exit(main())
