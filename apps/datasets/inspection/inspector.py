"""One pass over a version's rows that collects findings to review before training. Nothing is changed."""

import heapq
from array import array
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from itertools import count
from typing import Any

import msgspec

from apps.contracts.chat import ChatRow, Row
from apps.contracts.splits.split import RowGroups, row_contents, row_identity
from apps.datasets.inspection.personal_data import Hint, find_hints

# Increased when a pass could find something else. A version inspected under older rules is inspected again.
INSPECTION_VERSION = 4
KEPT_ROWS = 200
_PROGRESS_ROWS = 1_000
_ROWS_COMPARED_AT_ONCE = 200_000


class FindingCode(StrEnum):
    """Codes of findings; hints at personal data are `personal_` and the kind."""

    NOT_INSPECTED = "not_inspected"
    EXACT_COPY = "exact_copy"
    NEAR_COPY = "near_copy"
    CONFLICTING_ANSWERS = "conflicting_answers"
    EMPTY_TARGET = "empty_target"
    EMAIL = "personal_email"
    PHONE = "personal_phone"
    CARD = "personal_card"
    IBAN = "personal_iban"
    KEY = "personal_key"


class FoundRow(msgspec.Struct, frozen=True):
    """A row with a finding; `other` is the row it copies, or 0."""

    line: int
    other: int = 0


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The number of rows with a finding, and the first of them."""

    code: str
    rows: int
    first: tuple[FoundRow, ...]


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """The findings of a pass and, in file order, of each row: its identity, its key for a split, and its line."""

    findings: tuple[Finding, ...]
    identities: array
    keys: array
    lines: array


class _Found:
    """The rows with each finding: their number, and the first of them."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        self._first: dict[str, list[FoundRow]] = {}

    def add(self, code: str, line: int, other: int = 0) -> None:
        self._rows[code] = self._rows.get(code, 0) + 1
        first = self._first.setdefault(code, [])
        if len(first) < KEPT_ROWS:
            first.append(FoundRow(line, other))

    def add_all(self, code: str, found: Iterable[tuple[int, int]]) -> None:
        """Add (line, other) in any order."""
        counter = count()
        first = heapq.nsmallest(KEPT_ROWS, (row for row, _ in zip(found, counter, strict=False)))
        if first:
            self._rows[code] = next(counter)
            self._first[code] = [FoundRow(*row) for row in first]

    def listed(self) -> tuple[Finding, ...]:
        order = [code.value for code in FindingCode]
        codes = sorted(self._rows, key=order.index)
        return tuple(Finding(code=code, rows=self._rows[code], first=tuple(self._first[code])) for code in codes)


class _Pass:
    """The state of a pass: a few numbers for each row in arrays, compared once all rows are in."""

    def __init__(self) -> None:
        self.found = _Found()
        self.groups, self.lines = RowGroups(), array("I")
        self._prompts = array("Q")  # 0: the row has no prompt
        self._near_rows: list[array[int]] = [array("I"), array("I")]  # (row, the row it nearly copies)

    def take(self, row: Row) -> None:
        """Add one row."""
        index, line = len(self.lines), row.line_number
        alike = self.groups.take(row)
        self.lines.append(line)
        prompt = 0
        if isinstance(row, ChatRow) and len(row.messages) > 1:
            prompt = row_identity(ChatRow(row.messages[:-1], tools=row.tools))
        self._prompts.append(prompt)
        if alike is not None:
            for column, value in zip(self._near_rows, (index, alike), strict=True):
                column.append(value)
        for code in _own(row):
            self.found.add(code, line)

    def finish(self) -> Inspection:
        """Compare the rows with each other and return the inspection."""
        copies, identities = self._copies(), self.groups.identities
        for index, other in zip(*self._near_rows, strict=True):
            if not copies[index]:
                self.found.add(FindingCode.NEAR_COPY, self.lines[index], self.lines[other])
        conflicts = (
            (self.lines[index], self.lines[first])
            for index, first in repeats(self._prompts)
            if not copies[index] and identities[first] != identities[index]
        )
        self.found.add_all(FindingCode.CONFLICTING_ANSWERS, conflicts)
        return Inspection(
            findings=self.found.listed(), identities=identities, keys=self.groups.keys(), lines=self.lines
        )

    def _copies(self) -> bytearray:
        """Record the rows that repeat an earlier one; return a 1 for each of them."""
        copies = bytearray(len(self.lines))

        def found() -> Iterator[tuple[int, int]]:
            for index, first in repeats(self.groups.identities):
                copies[index] = 1
                yield self.lines[index], self.lines[first]

        self.found.add_all(FindingCode.EXACT_COPY, found())
        return copies


def repeats(numbers: "array[int]") -> Iterator[tuple[int, int]]:
    """Yield (index, first index) for each number that occurred before, except 0, in no order.

    Many numbers are compared in parts, by remainder: Python's integers take ten times the space of an array's.
    """
    parts = 1 + len(numbers) // _ROWS_COMPARED_AT_ONCE
    for part in range(parts):
        firsts: dict[int, int] = {}
        for index, number in enumerate(numbers):
            if number and number % parts == part:
                first = firsts.setdefault(number, index)
                if first != index:
                    yield index, first


def inspect_rows(rows: Iterable[Row], *, on_progress: Callable[[], None] = lambda: None) -> Inspection:
    """Return the findings of rows in file order. Memory is about 36 bytes a row, and bounded for near copies."""
    taken = _Pass()
    for number, row in enumerate(rows, 1):
        taken.take(row)
        if number % _PROGRESS_ROWS == 0:
            on_progress()
    return taken.finish()


def not_inspected(*, rows: int) -> Inspection:
    """Return the inspection of a file that takes longer than its size allows."""
    finding = Finding(code=FindingCode.NOT_INSPECTED, rows=rows, first=())
    return Inspection(findings=(finding,), identities=array("Q"), keys=array("Q"), lines=array("I"))


def hints_of(row: Row, *, most_characters: int | None = None) -> set[Hint]:
    """Return the kinds of personal data that a row, or its first characters, seems to contain."""
    return find_hints("\n".join(row_contents(row))[:most_characters])


def _own(row: Row) -> list[str]:
    codes = [f"personal_{hint.value}" for hint in hints_of(row)]
    if isinstance(row, ChatRow) and not any(m.is_trained and (m.content.strip() or m.tool_calls) for m in row.messages):
        codes.append(FindingCode.EMPTY_TARGET)
    return codes


def as_json(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    return [msgspec.to_builtins(finding) for finding in findings]
