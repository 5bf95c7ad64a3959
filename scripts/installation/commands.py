"""Commands that set-up runs in silence, and how it fails. Standard library only, as all of this package."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
REQUIREMENTS = REPOSITORY / "requirements"
DATA = REPOSITORY / ".anneal"


class SetupFailed(Exception):
    """A stage that could not be done; the message ends with what the tool said and what to do."""


class NoWheel(SetupFailed):
    """No index has a wheel of a locked version for this Python."""


def run(command: Sequence[str], *, environment: dict[str, str] | None = None) -> None:
    """This function will run a command in silence. Raises SetupFailed with the end of its output."""
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    # The second is what pip says where a constraints file names the package too.
    if match := re.search(r"ERROR: (?:No matching distribution found for|Cannot install) (\S+)", done.stdout):
        raise NoWheel(f"The package indexes have no wheel of {match[1]} for this Python. See `pip config list`.")
    if done.returncode:
        last_lines = "\n".join(done.stdout.strip().splitlines()[-12:])
        raise SetupFailed(f"{' '.join(map(str, command[:6]))} … failed:\n{last_lines}")


def version_of(python: Path | str) -> str:
    """Major and minor version of an interpreter, or nothing where it does not start."""
    try:
        asked = "import sys; print(*sys.version_info[:2], sep='.')"
        return subprocess.run(
            [python, "-I", "-S", "-c", asked], capture_output=True, text=True, check=False
        ).stdout.strip()
    except OSError:
        return ""
