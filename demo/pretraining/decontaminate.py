"""Detection of benchmark text (Banking77 rows and label names) in corpus passages."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

NGRAM = 6
_WORD = re.compile(r"[a-z0-9]+(?:'[a-z]+)?")
_QUOTES = str.maketrans({"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "_": " "})


def words(text: str) -> list[str]:
    """Split text into lower-case words; underscores and punctuation separate words."""
    return _WORD.findall(text.lower().translate(_QUOTES))


def read_rows(path: Path) -> list[tuple[str, str]]:
    """Return the (text, category) pairs of a `text,category` CSV file."""
    with path.open(newline="", encoding="utf-8") as handle:
        return [(row["text"], row["category"]) for row in csv.DictReader(handle)]


class Checker:
    """Returns why a passage overlaps with the benchmark, or None if it is clean.

    A passage is flagged when it contains a label (with underscores or with spaces, in any case), shares a 6-word
    sequence with a benchmark row, or contains a whole row that is shorter than 6 words.
    """

    def __init__(self, rows: Iterable[tuple[str, str]]) -> None:
        self._grams: dict[tuple[str, ...], str] = {}
        self._sizes: dict[tuple[str, str], set[int]] = {}
        for text, label in rows:
            self._add(tuple(words(label)), "label")
            tokens = words(text)
            for start in range(max(1, len(tokens) - NGRAM + 1)):
                self._add(tuple(tokens[start : start + NGRAM]), "row")

    def _add(self, gram: tuple[str, ...], kind: str) -> None:
        if len(gram) < 2:
            raise ValueError(f"cannot index a text of one word: {gram}")
        self._grams.setdefault(gram, kind)
        self._sizes.setdefault((gram[0], gram[1]), set()).add(len(gram))

    def reason(self, passage: str) -> str | None:
        """Return the overlap of the passage with the benchmark, or None."""
        tokens = words(passage)
        for start, pair in enumerate(pairwise(tokens)):
            for size in self._sizes.get(pair, ()):
                gram = tuple(tokens[start : start + size])
                if gram in self._grams:
                    return f"{self._grams[gram]}: {' '.join(gram)}"
        return None


def load_checker(*paths: Path) -> Checker:
    """Build a checker from one or more benchmark CSV files."""
    return Checker(row for path in paths for row in read_rows(path))
