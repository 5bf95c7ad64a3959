"""The tree shows where a line belongs: few entries in each folder, and contracts that name packages."""

from collections import defaultdict
from pathlib import Path

import grimp
import pytest

from tests.guards.code.tracked import list_tracked

ROOT = Path(__file__).resolve().parents[3]
MAX_ENTRIES = 15


@pytest.mark.parametrize(
    "top", ["apps", "gpu_workers", "demo", "scripts", "templates", "tests", "requirements", "deploy"]
)
def test_a_folder_has_few_entries(top: str) -> None:
    listed = list_tracked(ROOT, top)
    entries = defaultdict(set)
    for line in listed:
        path = Path(line)
        for part in (path, *path.parents):
            if part.name != "__init__.py" and Path(top) in part.parents:
                entries[str(part.parent)].add(part.name)

    assert entries
    assert {folder: len(names) for folder, names in entries.items() if len(names) > MAX_ENTRIES} == {}


def test_a_folder_that_is_no_repository_is_skipped(tmp_path: Path) -> None:
    with pytest.raises(pytest.skip.Exception, match="is no git repository"):
        list_tracked(tmp_path)


def test_the_matrix_of_families_runs_without_the_packages_of_the_web() -> None:
    graph = grimp.build_graph("apps", "gpu_workers", "tests", include_external_packages=True, cache_dir=None)
    installer = "tests.bench.families.install"  # its program runs in the web's environment
    for imported in ("django", "apps.catalog.model_files"):
        graph.remove_import(importer=installer, imported=imported)

    assert graph.find_shortest_chain("tests.bench.families.__main__", "torch")
    assert graph.find_shortest_chain("tests.bench.families.__main__", "django") is None
