"""The modules of the product, parsed once for all tests of the code."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="package")
def modules() -> dict[str, list[ast.AST]]:
    """Return all nodes of each module of apps and gpu_workers by its path, without migrations."""
    paths = sorted([*ROOT.glob("apps/**/*.py"), *ROOT.glob("gpu_workers/**/*.py")])
    return {
        path.relative_to(ROOT).as_posix(): list(ast.walk(ast.parse(path.read_text())))
        for path in paths
        if "migrations" not in path.parts
    }
