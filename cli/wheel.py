"""Build the wheel of the command line into dist/: `anneal`, with copies of the server's own row checks and estimates.

    python -m cli.wheel

The copies are made anew each time: every module of `apps` that the command line imports, directly or not, as
`anneal.apps`, with its imports renamed. The wheel has neither Django nor the rest of the server.
"""

from __future__ import annotations

import argparse
import ast
import re
import shutil
import sys
import tempfile
from pathlib import Path

from scripts.installation import installer
from scripts.installation.commands import REPOSITORY, run

SOURCE = REPOSITORY / "cli"
# The tables that estimates without a server read.
TABLES = ("gpus.json", "measured_models.json", "measurements.jsonl", "models.json")
_IMPORT = re.compile(r"^(\s*(?:from|import) )apps\b", re.MULTILINE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "dist", help="the folder of the wheel")
    build(parser.parse_args().out)
    return 0


def build(out: Path) -> None:
    """Write the wheel into a folder. Raises SetupFailed."""
    installer.prepare()
    with tempfile.TemporaryDirectory() as temporary:
        stage = Path(temporary)
        shutil.copy(SOURCE / "pyproject.toml", stage)
        shutil.copy(REPOSITORY / "LICENSE", stage)
        write_package(stage / "src/anneal")
        command = [str(installer.UV), "build", "--quiet", "--wheel", f"--out-dir={out.resolve()}", str(stage)]
        run([*command, "--offline", "--no-config"], environment=installer.variables())


def write_package(target: Path) -> None:
    """Write the package with the modules that it shares with the server."""
    shutil.copytree(SOURCE / "src/anneal", target, ignore=shutil.ignore_patterns("__pycache__"))
    for module in shared_modules():
        copy = target / module.relative_to(REPOSITORY)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(module, copy)
    (target / "apps/catalog/data").mkdir(parents=True)
    for name in TABLES:
        shutil.copy(REPOSITORY / "apps/catalog/data" / name, target / "apps/catalog/data")
    for folder in (target / "apps", *(target / "apps").rglob("*/")):
        (folder / "__init__.py").touch()
    for path in target.rglob("*.py"):
        path.write_text(_IMPORT.sub(r"\1anneal.apps", path.read_text()))


def shared_modules() -> list[Path]:
    """Return the modules of `apps` that the command line imports, and those that they import."""
    found: dict[Path, None] = {}
    waiting = sorted((SOURCE / "src").rglob("*.py"))
    while waiting:
        new = [path for path in _imports_of(waiting.pop()) if path not in found]
        found |= dict.fromkeys(new)
        waiting += new
    return sorted(found)


def _imports_of(path: Path) -> list[Path]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("apps."):
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    places = [REPOSITORY / name.replace(".", "/") for name in names]
    files = [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py")]
    return sorted(file for file in files if file.is_file())


if __name__ == "__main__":
    sys.exit(main())
