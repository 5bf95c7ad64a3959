"""The files that git tracks."""

import subprocess
from pathlib import Path

import pytest


def list_tracked(folder: Path, *paths: str) -> list[str]:
    """Return the tracked files of a repository; skip the test with git's message if it lists none."""
    done = subprocess.run(["git", "ls-files", "-z", *paths], cwd=folder, capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"git: {done.stderr.decode(errors='replace').strip()}")
    return [name for name in done.stdout.decode().split("\0") if name]
