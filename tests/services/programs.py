"""Programs of the platform, started as they are deployed, for a benchmark."""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

from scripts.processes import PROGRAMS, REPOSITORY

_START_SECONDS = 120
_STOP_SECONDS = 20


class NotStarted(Exception):
    """A process did not come up; the end of each log is in the message."""


@contextmanager
def running_program(name: str, home: Path, values: Mapping[str, str], environ: Mapping[str, str]) -> Iterator[None]:
    """Run the program until the block ends. `values` replace the ${names} of its command; its log is in `home`."""
    program = next(program for program in PROGRAMS if program.name == name)
    words = program.command
    for key, value in values.items():
        words = words.replace(f"${{{key}}}", value)
    with (home / f"{name}.log").open("wb") as log:
        started = subprocess.Popen(
            [sys.executable, "-m", *shlex.split(words)],
            cwd=REPOSITORY,
            env=os.environ | environ,
            stdout=log,
            stderr=log,
        )
    try:
        yield
    finally:
        started.terminate()
        try:
            started.wait(timeout=_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


def wait_until_up(url: str, home: Path) -> None:
    """Return when the address answers. Raises NotStarted."""
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        try:
            urlopen(url, timeout=5).close()
            return
        except HTTPError:
            return  # it answers
        except OSError:
            time.sleep(0.2)
    logs = sorted(home.glob("*.log"))
    raise NotStarted("\n".join(f"{log.name}: {log.read_text(errors='replace')[-1500:]}" for log in logs))
