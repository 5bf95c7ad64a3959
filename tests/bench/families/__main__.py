"""Every family in miniature through the whole product, on the engines of this machine: `make family-matrix`.

    .venv-engines/bin/python -m tests.bench.families [--only qwen3,llama3]

Results go into `matrix.json` beside this file, family by family, and from there into the table of `docs/models.md`. The
last line is one JSON object. A family takes about a minute of CPU. vLLM starts as a replica with
adapters; the merged model is scored in a second vLLM, forked from this process.
"""

import argparse
import json
import logging
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch reads it when it is imported

import msgspec

from gpu_workers.train.loop import callbacks
from tests.bench.families.path import walk
from tests.bench.families.table import MATRIX, read_matrix, write_docs
from tests.support.engines.miniatures import MINIATURES


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--only", default=",".join(MINIATURES), help="names of families, separated by commas")
    names = options.parse_args().only.split(",")
    logging.disable(logging.WARNING)
    callbacks.REPORT_INTERVAL_SECONDS = 0.0  # the loss of every step
    known = {row.family: row for row in read_matrix()}
    for name in names:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="family-") as folder:
            known[name] = found = walk(name, Path(folder))
        rows = [known[each] for each in MINIATURES if each in known]
        MATRIX.write_bytes(msgspec.json.format(msgspec.json.encode(rows)) + b"\n")
        sys.stdout.write(f"{msgspec.json.encode(found).decode()} {time.monotonic() - began:.0f} s\n")
        sys.stdout.flush()
    write_docs()
    failed = [row.family for row in rows if row.error]
    counts = {
        "families": len(rows),
        "trained": sum(row.is_trained for row in rows),
        "served_as_adapter": sum(bool(row.served) for row in rows),
        "failed": failed,
    }
    sys.stdout.write(json.dumps(counts) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
