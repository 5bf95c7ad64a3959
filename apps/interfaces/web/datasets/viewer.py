"""The row viewer of a dataset: a list of rows, and one of them as the model sees it. Its state is in the address."""

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from django.utils.translation import gettext

from apps.catalog.models import BaseModel
from apps.catalog.queries import chat_renderer
from apps.contracts.chat import ChatMessage, ChatRow, PreferenceRow, RenderedRow, Row, RowError, TextRow, TrainOn
from apps.contracts.splits.held_rows import Repeats
from apps.contracts.splits.split import row_contents
from apps.contracts.templating.process import PAGE_SECONDS, renders_within
from apps.core.messages.translation import later
from apps.datasets import queries
from apps.datasets.inspection import comparisons, inspections
from apps.datasets.inspection.inspector import FindingCode, hints_of
from apps.datasets.inspection.personal_data import Hint
from apps.datasets.inspection.search import SearchResult, search_rows
from apps.datasets.lifecycle import DatasetVersionStatus
from apps.datasets.models import DatasetVersion, TokenCount, VersionInspection
from apps.datasets.problems import OF_THE_FILE
from apps.datasets.queries import RowPreview
from apps.datasets.rows import kind_of
from apps.datasets.token_counts import Cut
from apps.interfaces.web.datasets.address import (
    SHARES,
    TRAINED,
    VIEWS,
    Address,
    find_compared,
    limit_options,
    model_options,
)
from apps.interfaces.web.datasets.row_view import RowView, view_row

ROWS_SHOWN = 20
RENDERED_CHARACTERS = 200_000  # of the rows of a list
LOST, HELD_OUT, OVER, SHARED, NEARLY_SHARED = "untrained", "held_out", "over", "shared", "nearly_shared"
ERRORS = "errors"
FILTERS = {
    ERRORS: later("With errors"),
    FindingCode.EXACT_COPY: later("Copies"),
    FindingCode.NEAR_COPY: later("Near copies"),
    FindingCode.CONFLICTING_ANSWERS: later("Different answers"),
    FindingCode.EMPTY_TARGET: later("Nothing to train"),
    OVER: later("Over the limit"),
    LOST: later("Nothing trained within the limit"),
    FindingCode.EMAIL: later("Email addresses"),
    FindingCode.PHONE: later("Phone numbers"),
    FindingCode.CARD: later("Card numbers"),
    FindingCode.IBAN: "IBANs",
    FindingCode.KEY: later("Secret keys"),
    SHARED: later("In the validation file too"),
    NEARLY_SHARED: later("Nearly in the validation file"),
    HELD_OUT: later("Held out"),
}
_HINT_WORDS = {
    Hint.EMAIL: later("e-mail"),
    Hint.PHONE: later("phone"),
    Hint.CARD: later("card"),
    Hint.IBAN: later("iban"),
    Hint.KEY: later("key"),
}
_REPEATS = {SHARED: Repeats.A_ROW, NEARLY_SHARED: Repeats.NEARLY_A_ROW}
_REPEAT_FLAGS = {Repeats.A_ROW: later("in both"), Repeats.NEARLY_A_ROW: later("nearly in both")}


@dataclass(frozen=True)
class ListedRow:
    """One row of the list beside the chat."""

    line: int
    text: str
    tokens: int | None
    turns: int | None
    flags: tuple[tuple[str, str], ...]  # (tone, word)
    url: str


@dataclass(frozen=True)
class RowContext:
    """The version's counts and findings, shown with its rows."""

    model: BaseModel | None
    count: TokenCount | None
    inspection: VersionInspection | None
    held: list[bool] | None  # whether each row is held out; None if unknown or too slow to find
    compared: DatasetVersion | None = None
    repeats: bytes | None = None  # for each row, what it `Repeats` of the compared file
    row_lines: Sequence[int] = ()  # the line of each row

    def lines_of(self, address: Address) -> list[int]:
        """Return the lines of the first rows that match the address's search, in ascending order."""
        if address.find == ERRORS:
            errors = address.version.errors
            return sorted({error["line"] for error in errors if error["code"] not in OF_THE_FILE})
        if address.find == HELD_OUT:
            return [line for line, is_held in zip(self.row_lines, self.held or [], strict=False) if is_held]
        if address.find in _REPEATS:
            marks = zip(self.row_lines, self.repeats or b"", strict=False)
            return [line for line, repeats in marks if repeats == _REPEATS[address.find]]
        if address.find in (OVER, LOST):
            cut = cut_at(self.count, address.limit) or Cut(limit=address.limit)
            return cut.over_lines if address.find == OVER else cut.untrained_lines
        findings = self.inspection.findings if self.inspection else []
        return [row["line"] for found in findings if found["code"] == address.find for row in found["first"]]

    def index_of(self, line: int) -> int:
        """Return the number of rows before this line."""
        return bisect_left(self.row_lines, line)

    def counts(self, address: Address) -> dict[str, int]:
        """Return the number of rows that each of the FILTERS finds, without those that find none."""
        cut = cut_at(self.count, address.limit) or Cut(limit=address.limit)
        counts = {found["code"]: found["rows"] for found in (self.inspection.findings if self.inspection else [])}
        counts |= {OVER: cut.over, LOST: cut.untrained, HELD_OUT: sum(self.held or [])}
        counts |= {find: (self.repeats or b"").count(mark) for find, mark in _REPEATS.items()}
        counts[ERRORS] = address.version.bad_row_count
        return {find: counts[find] for find in FILTERS if counts.get(find)}


def look(version: DatasetVersion, model: BaseModel | None, address: Address, count: TokenCount | None) -> RowContext:
    """Collect the version's counts and findings."""
    inspection = inspections.find_inspection(version=version) if version.status == DatasetVersionStatus.READY else None
    held = None
    if inspection and address.share and (version.rows or 0) <= inspections.KEYS_READ_NOW:
        held = inspections.held_out_rows(inspection=inspection, split=address.split)
    other = find_compared(address)
    found = comparisons.find_comparison(version=version, other=other) if other else None
    repeats = comparisons.marks_of(found) if found else None
    lines = inspections.lines_of_rows(version=version, inspection=inspection) if held or repeats else ()
    return RowContext(model, count, inspection, held, other, repeats, lines)


def cut_at(count: TokenCount | None, limit: int) -> Cut | None:
    """Return the rows and tokens that this limit cuts; return None if they were not counted."""
    found = next((cut for cut in count.cuts if cut["limit"] == limit), None) if count else None
    return msgspec.convert(found, Cut) if found else None


def viewer_context(address: Address, looked: RowContext, *, is_pending: bool) -> dict[str, object]:
    """Return the context of the viewer's template."""
    lines, counts = looked.lines_of(address) if address.find else None, looked.counts(address)
    found = None
    if address.q and not is_pending:
        found = search_rows(
            version=address.version, text=address.q, first_line=address.first, among=lines, limit=ROWS_SHOWN
        )
    previews = found.rows if found else [] if is_pending else _previews(address, lines)
    previews, has_more = previews[:ROWS_SHOWN], len(previews) > ROWS_SHOWN
    with renders_within(PAGE_SECONDS):
        rows = _list(previews, looked, address)
    chosen = next((preview for preview in previews if preview.line >= address.line), previews[0] if previews else None)
    shown, error = _rendered(chosen, looked.model, address)
    return {
        "version": address.version,
        "model": looked.model,
        "models": model_options(),
        "limits": limit_options(looked.model),
        "shares": SHARES,
        "trained": [(key.value, label) for key, label in TRAINED],
        "filters": [(find, f"{FILTERS[find]} ({count:,})") for find, count in counts.items()],
        "kept_fields": {name: v for name, v in address.fields.items() if name not in ("find", "q", "first", "line")},
        "address": address,
        "rows": rows,
        "found": found,
        "listed_count": len(lines or []),
        "found_count": counts.get(address.find, 0),
        "all_url": address.url(find="", q="", first=1, line=1),
        "chosen": chosen,
        "edit_url": address.editor_url(chosen.line) if chosen else "",
        "is_editable": address.version.status == DatasetVersionStatus.READY or address.version.has_bad_rows,
        "shown": shown,
        "row_error": error,
        "json": pretty(chosen.raw) if chosen and address.view == "json" else "",
        "views": [
            {"label": label, "url": address.url(view=key), "current": key == address.view} for key, label in VIEWS
        ],
        **(_search_pages(address, found) if found else _pages(address, rows, lines, has_more=has_more)),
    }


def _search_pages(address: Address, found: SearchResult) -> dict[str, str]:
    """Return the address of the next page, or of the next part of the file to search."""
    after = address.url(first=found.last_line + 1, line=found.last_line + 1)
    is_full = len(found.rows) == ROWS_SHOWN
    return {
        "previous_url": address.url(first=1, line=1) if address.first > 1 else "",
        "next_url": after if is_full and not found.is_whole else "",
        "further_url": "" if is_full or found.is_whole else after,
    }


def _pages(address: Address, rows: list[ListedRow], lines: list[int] | None, *, has_more: bool) -> dict[str, str]:
    if lines is not None:
        earlier = [line for line in lines if line < rows[0].line] if rows else []
        later = [line for line in lines if line > rows[-1].line] if rows else []
        before = earlier[-ROWS_SHOWN:][:1]
        return {
            "previous_url": address.url(first=before[0], line=before[0]) if before else "",
            "next_url": address.url(first=later[0], line=later[0]) if later else "",
        }
    previous = max(1, address.first - ROWS_SHOWN)
    return {
        "previous_url": address.url(first=previous, line=previous) if address.first > 1 else "",
        "next_url": address.url(first=rows[-1].line + 1, line=rows[-1].line + 1) if has_more else "",
    }


def _previews(address: Address, lines: list[int] | None) -> list[RowPreview]:
    """Return the rows from the first one shown; if the chosen line lies outside them, start the list at that line.

    One more than is shown tells whether there are more.
    """
    version = address.version
    if lines is not None:
        wanted = [line for line in lines if line >= address.first][:ROWS_SHOWN]
        kind = kind_of(version)
        return [queries.preview_of(line, kind) for line in queries.lines_at(version=version, numbers=wanted)]
    previews = queries.read_rows(version=version, first_line=address.first, limit=ROWS_SHOWN + 1)
    if address.line < address.first or (previews and address.line > previews[:ROWS_SHOWN][-1].line):
        return queries.read_rows(version=version, first_line=address.line, limit=ROWS_SHOWN + 1)
    return previews


def _list(previews: Sequence[RowPreview], looked: RowContext, address: Address) -> list[ListedRow]:
    """Return the rows of the list. Those after the first RENDERED_CHARACTERS have no tokens."""
    listed, characters = [], 0
    for preview in previews:
        characters += sum(map(len, row_contents(preview.row))) if preview.row is not None else 0
        listed.append(
            _listed(preview, looked, address, model=looked.model if characters <= RENDERED_CHARACTERS else None)
        )
    return listed


def _listed(preview: RowPreview, looked: RowContext, address: Address, *, model: BaseModel | None) -> ListedRow:
    row, sides = preview.row, _sides(preview, model, address.train_on)
    is_bad = row is None or (sides is None and model is not None)
    flags = [("bad", gettext("error"))] if is_bad else []
    flags += _flags(row, sides, looked, address) if row is not None else []
    text = _title(row) if row is not None else preview.raw
    return ListedRow(
        line=preview.line,
        text=" ".join(text[:200].split()) or gettext("(empty)"),
        tokens=sum(side.n_tokens for side in sides) if sides else None,
        turns=None if row is None or isinstance(row, TextRow) else len(_messages(row)),
        flags=tuple(flags),
        url=address.url(line=preview.line),
    )


def _flags(
    row: Row, sides: tuple[RenderedRow, ...] | None, looked: RowContext, address: Address
) -> list[tuple[str, str]]:
    flags = []
    if sides and max(side.n_tokens for side in sides) > address.limit and not isinstance(row, TextRow):
        nothing = not any(side.truncate(address.limit).n_trained for side in sides)
        flags.append(("warn", gettext("nothing trained") if nothing else gettext("cut")))
    flags += [("warn", _HINT_WORDS[hint]) for hint in sorted(hints_of(row, most_characters=RENDERED_CHARACTERS))]
    copy = _copy_of(row.line_number, looked)
    if copy:
        flags.append(("warn", copy))
    at = looked.index_of(row.line_number)
    if any((looked.held or [])[at : at + 1]):
        flags.append(("accent", gettext("held out")))
    flags += [("warn", _REPEAT_FLAGS[Repeats(mark)]) for mark in (looked.repeats or b"")[at : at + 1] if mark]
    return flags


def _copy_of(line: int, looked: RowContext) -> str:
    words = {"exact_copy": gettext("copy"), "near_copy": gettext("near copy")}
    for found in looked.inspection.findings if looked.inspection else []:
        if found["code"] in words and any(row["line"] == line for row in found["first"]):
            return words[found["code"]]
    return ""


def _messages(row: ChatRow | PreferenceRow) -> tuple[ChatMessage, ...]:
    return (*row.prompt, *row.preferred) if isinstance(row, PreferenceRow) else row.messages


def _title(row: Row) -> str:
    if isinstance(row, TextRow):
        return row.text
    return next((message.content for message in _messages(row) if message.role == "user"), "")


def _sides(preview: RowPreview, model: BaseModel | None, train_on: TrainOn) -> tuple[RenderedRow, ...] | None:
    if preview.row is None or model is None:
        return None
    renderer = chat_renderer(base_model=model)
    try:
        if isinstance(preview.row, PreferenceRow):
            pair = renderer.render_pair(preview.row)
            return pair.chosen, pair.rejected
        return (renderer.render(preview.row, train_on=train_on),)
    except RowError:
        return None


def _rendered(
    preview: RowPreview | None, model: BaseModel | None, address: Address
) -> tuple[RowView | None, dict[str, object] | None]:
    """Return the row as the model sees it, or its error."""
    if preview is None:
        return None, None
    if preview.error:
        return None, {"message": preview.error.message, "fix": preview.error.fix, "param": preview.error.param}
    if preview.row is None or model is None:
        return None, None
    try:
        renderer = chat_renderer(base_model=model)
        return view_row(preview.row, renderer, limit=address.limit, train_on=address.train_on), None
    except RowError as error:
        return None, {"message": error.message, "fix": error.fix, "param": error.param}


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("A key is repeated.")
    return found


def _as_written(number: str) -> msgspec.Raw:
    return msgspec.Raw(number.encode())


_EXACT = json.JSONDecoder(
    object_pairs_hook=_without_repeats, parse_int=_as_written, parse_float=_as_written, parse_constant=_as_written
)


def pretty(raw: str) -> str:
    """Return a row's JSON on several lines, with its numbers as they are written.

    Text that is not strict JSON, or repeats a key, stays unchanged.
    """
    try:
        return msgspec.json.format(msgspec.json.encode(_EXACT.decode(raw)), indent=2).decode()
    except (ValueError, RecursionError):
        return raw
