"""Commands that set-up runs silently, and its errors. Standard library only, like the whole package."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
REQUIREMENTS = REPOSITORY / "requirements"
DATA = REPOSITORY / ".anneal"


class SetupFailed(Exception):
    """A stage failed; the message ends with the tool's output and the fix."""


class NoWheel(SetupFailed):
    """No index has a wheel of a locked version for this Python."""


def run(command: Sequence[str], *, environment: dict[str, str] | None = None) -> None:
    """Run a command silently. Raises SetupFailed with the end of its output, KeyboardInterrupt if Ctrl-C ended it."""
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    if done.returncode in (-signal.SIGINT, 128 + signal.SIGINT):
        raise KeyboardInterrupt  # a terminal sends it to all: in another thread, nothing may be tried instead
    # The first two are pip's, the second if a constraints file names the package too; the last is uv's.
    lacking = r"(?:ERROR: No matching distribution found for|ERROR: Cannot install|Because .*you require) ([^\s,]+)"
    if done.returncode and (match := re.search(lacking, done.stdout)):
        raise NoWheel(f"The package indexes have no wheel of {match[1]} for this Python. See `pip config list`.")
    if done.returncode:
        last_lines = "\n".join(done.stdout.strip().splitlines()[-12:])
        raise SetupFailed(f"{' '.join(map(str, command[:6]))} … failed:\n{last_lines}")


def version_of(python: Path | str) -> str:
    """Return the major and minor version of an interpreter, or "" if it does not start."""
    try:
        asked = "import sys; print(*sys.version_info[:2], sep='.')"
        return subprocess.run(
            [python, "-I", "-S", "-c", asked], capture_output=True, text=True, check=False
        ).stdout.strip()
    except OSError:
        return ""
