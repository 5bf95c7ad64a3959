"""The GPU lock installs on a machine without CUDA: complete, with its hashes, and from wheels alone.

Marked nightly: it asks the package index. A dry run reads the packages' metadata and downloads none of their 5 GB.
"""

import subprocess
from pathlib import Path

import pytest

from scripts.dependencies.lock import ENGINES, GLIBC_MINOR
from scripts.installation import installer

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("python", ["3.11", "3.14"])
def test_the_gpu_lock_resolves_to_itself_without_cuda(tmp_path: Path, python: str) -> None:
    installer.prepare()
    lock = ENGINES / "engines-gpu.lock"
    command = [
        str(installer.UV), "pip", "install", "--dry-run", "--require-hashes", "--only-binary=:all:",
        f"--python-version={python}", f"--python-platform=x86_64-manylinux_2_{GLIBC_MINOR}",
        f"--target={tmp_path}", f"--requirements={lock}",
    ]  # fmt: skip

    # The lock's versions are PyPI's: another index or a folder may have a CPU build of torch, which would be preferred.
    others = ("UV_INDEX", "UV_FIND_LINKS")
    environment = {name: value for name, value in installer.variables().items() if name not in others}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

    assert done.returncode == 0, done.stderr
    chosen = {line.removeprefix(" + ") for line in done.stderr.splitlines() if line.startswith(" + ")}
    assert "torch==2.13.0" in chosen and len(chosen) > 200
