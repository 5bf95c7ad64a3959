"""The contract that keeps engines out of a worker's own processes names every module beside train and bench."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_module_of_the_workers_is_kept_from_importing_engines() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    [contract] = [each for each in settings["contracts"] if each["name"] == "Only train and bench import torch"]
    modules = {f"gpu_workers.{file.stem}" for file in (ROOT / "gpu_workers").glob("*.py")} - {"gpu_workers.__init__"}
    folders = {f"gpu_workers.{init.parent.name}" for init in (ROOT / "gpu_workers").glob("*/__init__.py")}

    assert set(contract["source_modules"]) == modules
    assert folders == {"gpu_workers.train", "gpu_workers.bench"} < set(contract["forbidden_modules"])
