"""docs/security/threat-model.md promises limits, each with the test that holds it: those tests exist."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
PAGE = (TESTS.parent / "docs/security/threat-model.md").read_text()
NAMED = sorted(set(re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE)))
PARTIES = ("Tenant", "Member", "Trainer", "Replica", "Gateway", "Web", "Webhook, batch and hub processes", "Operator",
           "Sender of Stripe webhooks", "Publisher of a model", "Publisher of a package")  # fmt: skip


def functions_of(path: Path) -> set[str]:
    nodes = ast.walk(ast.parse(path.read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize(("file", "function"), NAMED)
def test_a_test_that_the_page_names_exists(file: str, function: str) -> None:
    assert function.startswith("test_")
    assert function in functions_of(TESTS / file), f"docs/security/threat-model.md names {file}::{function}"


@pytest.mark.parametrize("party", PARTIES)
def test_every_limit_of_every_party_names_a_test(party: str) -> None:
    section = PAGE.split(f"\n## {party}\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]

    assert rows
    assert [row for row in rows if not re.search(r"`[\w/]+\.py::test_\w+` *", row.split("|")[3])] == []
