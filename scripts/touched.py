"""The choice of the test files that are nearest to the current change: `make test-quick`.

The change is the difference from the commit where this branch left the main one, with uncommitted and untracked files.
The distance from a changed file to a test file is

    0   it is the changed file
    1   it imports the changed module, or has its name: apps/interfaces/web/jobs/views.py and test_jobs.py
    2   it is in the folder of the changed module's app: apps/billing and tests/unit/billing
    n   it imports the module through n - 1 others

A template or static file counts as the modules and templates that name it. The nearest files are chosen as long as
their recorded times fit the limit; the command prints what is left out.
"""

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

CODE = ("apps", "gpu_workers", "scripts", "demo", "tests")
TEXTS = ("templates", "static")
# These start the platform or are long on purpose.
NEVER = ("tests/e2e/", "tests/bench/")
UNKNOWN_SECONDS = 5.0  # of a test file that was never recorded


def pick_tests(root: Path, durations: dict[str, float], *, seconds: float) -> list[str]:
    """Return the test files nearest to the change that together take at most `seconds`."""
    changed = find_changed(root)
    distances = measure_distances(root, changed)
    picked, left = [], seconds
    for file in sorted(distances, key=lambda file: (distances[file], durations.get(file, UNKNOWN_SECONDS), file)):
        taken = durations.get(file, UNKNOWN_SECONDS)
        if taken <= left:
            picked.append(file)
            left -= taken
    print(f"{len(changed)} changed files, {len(picked)} files of tests", end="")
    print(f"; {len(distances) - len(picked)} more are within reach: make test" if len(picked) < len(distances) else "")
    return picked


def find_changed(root: Path) -> set[str]:
    """Return the files that this branch and its working tree change, deleted ones included.

    Exits with git's message if git cannot read the folder, because an unknown change is not the same as no change.
    """

    def lines(*arguments: str) -> list[str]:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
        return done.stdout.splitlines() if not done.returncode else []

    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    if git.returncode:
        sys.exit(f"make test-quick needs a git checkout, to see what you changed: {git.stderr.strip()}")
    main = next((name for name in ("origin/main", "main", "origin/master", "master") if lines("rev-parse", name)), "")
    base = lines("merge-base", main, "HEAD") if main else []
    changed = lines("diff", "--name-only", base[0] if base else "HEAD")
    return {*changed, *lines("ls-files", "--others", "--exclude-standard")}


def measure_distances(root: Path, changed: Collection[str]) -> dict[str, int]:
    """Return the distance of each test file that the change reaches; the shortest path counts."""
    code = [path.relative_to(root).as_posix() for folder in CODE for path in (root / folder).rglob("*.py")]
    importers = _find_importers(root, code)
    distances: dict[str, int] = {}
    modules = ring = _with_readers(root, code, changed)
    distance = 0
    while ring:
        for file in ring:
            distances.setdefault(file, distance)
        distance += 1
        ring = {importer for file in ring for importer in importers[file]} - distances.keys()
    tests = [file for file in code if _is_test(file)]
    for file in tests:
        for module in modules:
            if (near := _kinship(module, file)) is not None:
                distances[file] = min(near, distances.get(file, near))
    return {file: distances[file] for file in tests if file in distances}


def _is_test(file: str) -> bool:
    return Path(file).name.startswith("test_") and not file.startswith(NEVER)


def _kinship(module: str, test: str) -> int | None:
    """Return the distance by the names of a module and a test file: 1, 2 or none."""
    parts = Path(module).parts
    if module == test or parts[0] == "tests" or len(parts) < 2:
        return None
    if Path(test).stem == f"test_{Path(module).stem}":
        return 1
    app = parts[1] if parts[0] == "apps" else parts[0]
    return 2 if app in Path(test).parent.parts else None


def _find_importers(root: Path, code: Collection[str]) -> dict[str, set[str]]:
    """Return, for each module, the modules that import it, at the top or inside a function."""
    known = set(code)
    importers: dict[str, set[str]] = defaultdict(set)
    for file in code:
        for name in _imported(ast.parse((root / file).read_text())):
            path = name.replace(".", "/")
            for candidate in (f"{path}.py", f"{path}/__init__.py"):
                if candidate in known and candidate != file:
                    importers[candidate].add(file)
    for file in code:  # conftest.py: pytest provides it to the tests below its folder without an import
        if Path(file).name == "conftest.py":
            folder = f"{Path(file).parent}/"
            importers[file] |= {test for test in code if test.startswith(folder) and _is_test(test)}
    return importers


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _with_readers(root: Path, code: Iterable[str], changed: Collection[str]) -> set[str]:
    """Add the files that name a changed template or static file, through any number of templates."""
    readers = {path.relative_to(root).as_posix() for path in (root / "templates").rglob("*.html")}
    readers |= {file for file in code if not file.startswith("tests/")}
    texts = {file: (root / file).read_text() for file in readers if (root / file).exists()}
    found, new = set(changed), {file for file in changed if file.startswith(TEXTS)}
    while new:
        words = [_name_in_text(file) for file in new]
        named_by = {file for file, text in texts.items() if any(word in text for word in words)} - found
        found |= named_by
        new = {file for file in named_by if file.startswith("templates/")}
    return found


def _name_in_text(file: str) -> str:
    """Return the name by which templates and modules refer to a template, a component or a static file."""
    name = file.partition("/")[2]
    if file.startswith("templates/cotton/"):
        return "<c-" + name.removeprefix("cotton/").removesuffix(".html").replace("/", ".").replace("_", "-")
    return name
