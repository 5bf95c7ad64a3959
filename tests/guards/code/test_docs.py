"""Paths that the pages for contributors name exist, and so does what any page of the documentation links to."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = (
    *(ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "docs/ARCHITECTURE.md", "docs/HOW_TO_CHANGE.md")),
    *sorted((ROOT / "docs/adr").glob("*.md")),
)
LINKED = sorted({*PAGES, *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")})
_CODE = re.compile(r"`([^`\s]+)`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def named_paths(text: str) -> Iterator[str]:
    """Yield what stands in backticks and is a path from the repository's root: it has a slash.

    Not paths: addresses (`/v1/files`), hidden folders that set-up makes (`.venv/bin/python`) and URLs.
    """
    for code in _CODE.findall(text):
        path = code.partition("::")[0]
        if "/" in path and not path.startswith(("/", ".")) and "://" not in path:
            yield path


def anchors_of(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", PAGES, ids=lambda document: document.name)
def test_every_path_that_a_page_names_exists(document: Path) -> None:
    assert [path for path in named_paths(document.read_text()) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("document", LINKED, ids=lambda document: document.name)
def test_every_link_of_a_page_leads_somewhere(document: Path) -> None:
    links = [link.partition("#") for link in _LINK.findall(document.read_text()) if "://" not in link]
    found = [((document.parent / path) if path else document, anchor) for path, _, anchor in links]

    assert [str(target) for target, _ in found if not target.exists()] == []
    assert [(target.name, anchor) for target, anchor in found if anchor and anchor not in anchors_of(target)] == []


def test_decisions_are_numbered_without_a_gap_and_by_their_heading() -> None:
    decisions = sorted((ROOT / "docs/adr").glob("*.md"))

    assert [page.name[:4] for page in decisions] == [f"{number:04}" for number in range(1, len(decisions) + 1)]
    assert [page.name for page in decisions if not page.read_text().startswith(f"# {int(page.name[:4])}. ")] == []
