"""One platform for all end-to-end tests of a run."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.platform import Platform


@pytest.fixture(scope="session")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    home = Path(tmp_path_factory.mktemp("anneal"))
    running = Platform(home)
    yield running
    assert running.stop() == 0, (home / "launch.log").read_text()[-3000:]


@pytest.fixture(scope="session")
def file_id(platform: Platform) -> str:
    uploaded = platform.upload(rows=1200)
    platform.wait_until_quotable(uploaded)
    return uploaded
