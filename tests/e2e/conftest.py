"""One platform for all end-to-end tests of a run."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.platform import Platform
from tests.services.slurm import slurm  # noqa: F401 - fixture


@pytest.fixture(scope="session")
def platform() -> Iterator[Platform]:
    # Not below pytest's own folder: every start of pytest closes that to others, the database's user among them.
    home = Path(tempfile.mkdtemp(prefix="anneal-"))
    running = Platform(home)
    yield running
    assert running.stop() == 0, (home / "launch.log").read_text()[-3000:]
    shutil.rmtree(home)


@pytest.fixture(scope="session")
def file_id(platform: Platform) -> str:
    uploaded = platform.upload(rows=400)
    platform.wait_until_quotable(uploaded)
    return uploaded
