"""The files that git tracks."""

import subprocess
from pathlib import Path

import pytest


def list_tracked(folder: Path, *paths: str) -> list[str]:
    """Return the tracked files of a repository; skip the test in a folder without one. Raises RuntimeError."""
    if not (folder / ".git").exists():  # an archive of the files
        pytest.skip(f"{folder} is no git repository")
    done = subprocess.run(["git", "ls-files", "-z", *paths], cwd=folder, capture_output=True, check=False)
    if done.returncode:
        raise RuntimeError(f"git: {done.stderr.decode(errors='replace').strip()}")
    return [name for name in done.stdout.decode().split("\0") if name]
