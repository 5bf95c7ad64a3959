"""What keeps the suite in order: tests stand alone, and what they share stands where all may take it from."""

import ast
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_no_test_module_or_conftest_is_imported() -> None:
    """Shared helpers stand in tests/support, builders in tests/factories, services that are not ours in tests/twins."""
    files = [path for folder in ("tests", "scripts") for path in (ROOT / folder).rglob("*.py")]

    found = [f"{path.relative_to(ROOT)} imports {name}" for path in files for name in _imports_of_tests(path)]

    assert found == []


def _imports_of_tests(path: Path) -> Iterator[str]:
    """Yield the test modules that a module imports, in the programs it holds as text too."""
    yield from _imports_in(ast.parse(path.read_text()))


def _imports_in(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        modules: list[str] = []
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str) and "import " in node.value:
                with suppress(SyntaxError):
                    yield from _imports_in(ast.parse(textwrap.dedent(node.value)))
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            yield "a module by a relative path"  # nothing says where that leads: tests and scripts use none
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for module in modules:
            if module.startswith("tests.") and _is_test(module.rpartition(".")[2]) and _is_file(module):
                yield module


def _is_test(name: str) -> bool:
    return name == "conftest" or name.startswith("test_")


def _is_file(module: str) -> bool:
    return (ROOT / module.replace(".", "/")).with_suffix(".py").is_file()
