"""One pass over a version's rows: what a person should look at before training. Nothing is changed."""

from array import array
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any

import msgspec

from apps.contracts.chat import ChatMessage, ChatRow, PreferenceRow, Row, TextRow
from apps.contracts.split import row_identity
from apps.datasets.near_copies import NearCopies
from apps.datasets.personal_data import Hint, find_hints

# Bumped when a pass could find something else; a version inspected by an older one is inspected again.
INSPECTION_VERSION = 1
KEPT_ROWS = 200
_PROGRESS_ROWS = 1_000


class FindingCode(StrEnum):
    """What can be found; hints at personal data have `personal_` and their kind."""

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
    """How many rows have it, and the first of them."""

    code: str
    rows: int
    first: tuple[FoundRow, ...]


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """What a pass found, and each row's identity in file order (for splits and overlaps)."""

    findings: tuple[Finding, ...]
    identities: array  # type: ignore[type-arg]


class _Findings:
    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._first: dict[str, list[FoundRow]] = {}

    def add(self, code: str, line: int, other: int = 0) -> None:
        self._counts[code] = self._counts.get(code, 0) + 1
        first = self._first.setdefault(code, [])
        if len(first) < KEPT_ROWS:
            first.append(FoundRow(line, other))

    def listed(self) -> tuple[Finding, ...]:
        order = [code.value for code in FindingCode]
        codes = sorted(self._counts, key=order.index)
        return tuple(Finding(code=code, rows=self._counts[code], first=tuple(self._first[code])) for code in codes)


def inspect_rows(rows: Iterable[Row], *, on_progress: Callable[[], None] = lambda: None) -> Inspection:
    """Return the findings of rows in file order.

    Memory grows by a few dozen bytes a row for exact copies, and has a bound for near ones.
    """
    findings, identities = _Findings(), array("Q")
    copies, near, answers = _Copies(), NearCopies(), _Copies()
    for count, row in enumerate(rows, 1):
        identity, line = row_identity(row), row.line_number
        identities.append(identity)
        first = copies.find(identity, line)
        if first:
            findings.add(FindingCode.EXACT_COPY, line, first)
        else:
            _compare(row, line, findings, near, answers)
        for code in _own(row):
            findings.add(code, line)
        if count % _PROGRESS_ROWS == 0:
            on_progress()
    return Inspection(findings=findings.listed(), identities=identities)


def hints_of(row: Row) -> set[Hint]:
    """Return what personal data a row seems to hold."""
    return find_hints("\n".join(_contents(row)))


class _Copies:
    """The first line of each number."""

    def __init__(self) -> None:
        self._lines: dict[int, int] = {}

    def find(self, number: int, line: int) -> int:
        """Return the line that had this number before, or 0."""
        first = self._lines.setdefault(number, line)
        return 0 if first == line else first


def _compare(row: Row, line: int, findings: _Findings, near: NearCopies, answers: _Copies) -> None:
    alike = near.find(_own_words(row), line)
    if alike:
        findings.add(FindingCode.NEAR_COPY, line, alike)
    if isinstance(row, ChatRow) and len(row.messages) > 1:
        prompt = ChatRow(row.messages[:-1], tools=row.tools)
        other = answers.find(row_identity(prompt), line)
        if other:
            findings.add(FindingCode.CONFLICTING_ANSWERS, line, other)


def _own(row: Row) -> list[str]:
    codes = [f"personal_{hint.value}" for hint in hints_of(row)]
    if isinstance(row, ChatRow) and not any(m.is_trained and (m.content.strip() or m.tool_calls) for m in row.messages):
        codes.append(FindingCode.EMPTY_TARGET)
    return codes


def _own_words(row: Row) -> str:
    """Return what sets a row apart: system messages are often the same in every row."""
    if isinstance(row, ChatRow):
        return "\n".join(message.content for message in row.messages if message.role not in ("system", "developer"))
    return "\n".join(_contents(row))


def _contents(row: Row) -> list[str]:
    if isinstance(row, TextRow):
        return [row.text]
    messages: tuple[ChatMessage, ...]
    messages = (*row.prompt, *row.preferred, *row.non_preferred) if isinstance(row, PreferenceRow) else row.messages
    return [message.content for message in messages] + [
        call.arguments for message in messages for call in message.tool_calls
    ]


def as_json(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    return [msgspec.to_builtins(finding) for finding in findings]
