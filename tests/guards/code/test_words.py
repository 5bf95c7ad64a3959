"""Plain English in what people read: templates, documentation, docstrings and comments."""

import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# Each word, and what a native engineer writes in its place.
WORDS = {
    r"mend(s|ed|ing)?": "fix",
    r"whoever": "the caller, the worker, the customer",
    r"whatever": "any",
    r"somebody": "a member, another process",
    r"nobody": "no user, no process",
    r"hence|thereby|wherein|hitherto": "so",
    r"is to be had|are to be had": "exists, is available",
    r"tells? of|told of": "report, describe",
    r"this (function|method) will": "an imperative",
}
_FOUND = re.compile(rf"\b({'|'.join(WORDS)})\b", re.IGNORECASE)


def texts() -> Iterator[tuple[str, str]]:
    """Yield each text with the place where it stands."""
    for page in sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("templates/**/*.html")}):
        for number, line in enumerate(page.read_text().splitlines(), 1):
            yield f"{page.relative_to(ROOT)}:{number}", line
    for folder in ("apps", "cli", "gpu_workers", "demo", "scripts", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "migrations" not in path.parts and _FOUND.search(path.read_text()):  # reading its tokens takes long
                yield from _comments(path)


def _comments(path: Path) -> Iterator[tuple[str, str]]:
    """Yield comments and docstrings: strings that are statements of their own."""
    begins_line = True
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and begins_line):
                yield f"{path.relative_to(ROOT)}:{token.start[0]}", token.string
            if token.type not in (tokenize.COMMENT, tokenize.NL):
                begins_line = token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING)


def test_no_text_has_a_word_that_has_a_plainer_one() -> None:
    found = [f"{place}: {match[0]}" for place, text in texts() for match in _FOUND.finditer(text)]

    assert found == [], f"{len(found)} words to replace; tests/guards/code/test_words.py names plainer ones"


@pytest.mark.parametrize("text", ["Mend the marked fields", "This function will return it", "it tells of a run"])
def test_such_a_word_is_found(text: str) -> None:
    assert _FOUND.search(text)
