"""Workers that read files run below what people wait for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
_SCRIPT = """
import os
from apps.config.celery import app
app.WorkController(queues={queues!r}, pool="solo", without_heartbeat=True)
print(os.nice(0))
"""


@pytest.mark.parametrize(
    ("queues", "added"), [("data", 10), ("data-middle", 10), ("data-small", 5), ("control,hub", 0)]
)
def test_a_worker_of_files_lowers_its_priority(queues: str, added: int) -> None:
    shown = subprocess.run(
        [sys.executable, "-c", _SCRIPT.format(queues=queues)], cwd=ROOT, env=os.environ, capture_output=True, text=True
    )

    assert shown.stdout.split()[-1:] == [str(min(os.nice(0) + added, 19))], shown.stderr
