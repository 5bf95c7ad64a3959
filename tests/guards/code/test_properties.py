"""Properties of the code that no linter checks: names, types and sizes."""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator

import pytest

STATUS_NAMES = ("status", "outcome")
MAX_LINES = 60
MAX_ANY_SHARE = 0.03
# Names that Django and argparse look for, one in each module.
EXPECTED_NAMES = {"Meta", "Command", "Migration"}


def find_status_literals(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield line and code of each status that is compared with, or filtered by, a bare string."""
    for node in nodes:
        match node:
            case ast.Compare(left=left, comparators=comparators):
                sides = [left, *comparators]
                if any(_names_status(side) for side in sides) and any(_has_text(side) for side in sides):
                    yield node.lineno, ast.unparse(node)
            case ast.Call(keywords=keywords):
                for keyword in keywords:
                    if (keyword.arg or "").removesuffix("__in") in STATUS_NAMES and _has_text(keyword.value):
                        yield node.lineno, f"{keyword.arg}={ast.unparse(keyword.value)}"


def _names_status(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name in STATUS_NAMES


def _has_text(node: ast.expr) -> bool:
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return any(map(_has_text, node.elts))
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier()


def test_statuses_are_compared_as_members_of_an_enum(modules: dict[str, list[ast.AST]]) -> None:
    found = [f"{path}:{line}: {code}" for path, nodes in modules.items() for line, code in find_status_literals(nodes)]

    assert found == []


@pytest.mark.parametrize(
    "code", ['job.status == "queued"', 'status in ("a", "b")', 'f(status="open")', 'f(status__in=["a"])']
)
def test_such_a_literal_is_found(code: str) -> None:
    assert list(find_status_literals(ast.walk(ast.parse(code))))


def test_each_class_of_apps_has_a_name_of_its_own(modules: dict[str, list[ast.AST]]) -> None:
    places = defaultdict(set)
    for path, nodes in modules.items():
        if path.startswith("apps/"):
            for node in nodes:
                if isinstance(node, ast.ClassDef) and node.name not in EXPECTED_NAMES:
                    places[node.name].add(path)

    assert {name: sorted(paths) for name, paths in places.items() if len(paths) > 1} == {}


def test_functions_stay_short_and_few_signatures_say_any(modules: dict[str, list[ast.AST]]) -> None:
    functions = [
        (path, node)
        for path, nodes in modules.items()
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    long = [f"{path}:{node.lineno}" for path, node in functions if node.end_lineno - node.lineno >= MAX_LINES]
    untyped = [f"{path}:{node.lineno}" for path, node in functions if _says_any(node)]

    assert long == []
    assert len(untyped) <= MAX_ANY_SHARE * len(functions), untyped


def _says_any(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    taken = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
    annotations = [node.returns, *(each.annotation for each in taken if each)]
    return any(
        isinstance(part, ast.Name) and part.id == "Any"
        for annotation in annotations
        if annotation
        for part in ast.walk(annotation)
    )
