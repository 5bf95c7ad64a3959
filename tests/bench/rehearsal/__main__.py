"""`make bench-rehearsal`: fake tensors against real ones, shallow depths against whole models, formula against both.

Runs in the engines' environment, without a GPU and without weights. The last line is one JSON object: errors of the
peak of allocated bytes as shares, processor seconds of a rehearsal in a warm process, and that process's memory.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def main() -> int:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [str(ROOT / ".venv-engines/bin/python"), "-m", "tests.bench.rehearsal.child", *sys.argv[1:]]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
