"""The child that measures a speed, for a moment instead of seconds: `python -m tests.support.engines.short_probe
SPEC.json WORK_DIR`."""

import sys
from pathlib import Path

from gpu_workers.bench import probe

probe.MEASURED_SECONDS = 0.5
sys.exit(probe.main(Path(sys.argv[1]), Path(sys.argv[2])))
