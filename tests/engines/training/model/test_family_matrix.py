"""The matrix of families runs in the environment of the engines, and installs its models in that of the web."""

from pathlib import Path

import pytest

from tests.bench.families.install import NotInstalled, install
from tests.support.engines.miniatures import write_miniature


@pytest.mark.slow
def test_a_miniature_is_installed(tmp_path: Path):
    folder = write_miniature("llama3", tmp_path / "base")

    assert install(folder).parameter_count > 1_000_000

    (folder / "code.py").touch()
    with pytest.raises(NotInstalled, match="may hold code"):
        install(folder)
