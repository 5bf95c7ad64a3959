"""The tree shows where a line belongs: few entries in each folder, and contracts that name packages."""

import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MAX_ENTRIES = 15


@pytest.mark.parametrize("top", ["apps", "gpu_workers", "demo", "scripts", "tests", "requirements", "deploy"])
def test_a_folder_has_few_entries(top: str) -> None:
    listed = subprocess.run(["git", "ls-files", top], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    entries = defaultdict(set)
    for line in listed.splitlines():
        path = Path(line)
        for part in (path, *path.parents):
            if part.name != "__init__.py" and Path(top) in part.parents:
                entries[str(part.parent)].add(part.name)

    assert entries
    assert {folder: len(names) for folder, names in entries.items() if len(names) > MAX_ENTRIES} == {}
