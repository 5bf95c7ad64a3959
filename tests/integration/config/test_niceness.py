"""Workers that read files run below what people wait for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# One process reads the settings, and a fork of it becomes the worker of each line of queues.
_SCRIPT = """
import os, sys
from apps.config.celery import app
for queues in sys.stdin.read().split():
    child = os.fork()
    if not child:
        app.WorkController(queues=queues, pool="solo", without_heartbeat=True)
        print(queues, os.nice(0), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
ADDED = {"data": 10, "data-middle": 10, "data-small": 5, "control,hub": 0}


@pytest.mark.slow
def test_a_worker_of_files_lowers_its_priority() -> None:
    shown = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        input="\n".join(ADDED),
        cwd=ROOT,
        env=os.environ,
        capture_output=True,
        text=True,
    )

    expected = [f"{queues} {min(os.nice(0) + added, 19)}" for queues, added in ADDED.items()]
    assert [line for line in shown.stdout.splitlines() if line.split()[0] in ADDED] == expected, shown.stderr
