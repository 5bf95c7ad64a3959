"""The row viewer of a dataset: a list of rows, and one of them as the model sees it. Its state is in the address."""

import json
from dataclasses import dataclass
from urllib.parse import urlencode

import msgspec
from django.http import HttpRequest
from django.urls import reverse

from apps.catalog.models import BaseModel
from apps.catalog.queries import chat_renderer, list_base_models
from apps.contracts.chat import (
    ChatMessage,
    ChatRow,
    PreferenceRow,
    RenderedRow,
    Row,
    RowError,
    RowKind,
    TextRow,
    TrainOn,
)
from apps.contracts.held_rows import Repeats
from apps.contracts.split import Split
from apps.datasets import queries
from apps.datasets.inspection import comparisons, inspections
from apps.datasets.inspection.inspector import hints_of
from apps.datasets.lifecycle import DatasetVersionStatus
from apps.datasets.models import DatasetVersion, TokenCount, VersionInspection
from apps.datasets.queries import RowPreview
from apps.datasets.rows import kind_of
from apps.datasets.token_counts import LIMITS, Cut
from apps.finetuning.recipes.completion import choose_longest_row, choose_validation_share
from apps.interfaces.web.datasets.row_view import RowView, view_row

ROWS_SHOWN = 20
ROWS_BEFORE = 2  # shown above the row that a link points at; a phone's list shows three rows
VIEWS = (("chat", "Chat"), ("tokens", "Tokens"), ("json", "JSON"))
SHARES = (
    (0, "None held out"),
    (1, "1 % held out"),
    (5, "5 % held out"),
    (10, "10 % held out"),
    (20, "20 % held out"),
)
DEFAULT_SEED = 42
TRAINED = (
    (TrainOn.ASSISTANT, "Answers trained"),
    (TrainOn.ALL, "Answers and inputs trained"),
)  # `train_on` of a recipe
LOST, HELD_OUT, OVER, SHARED, NEARLY_SHARED = "untrained", "held_out", "over", "shared", "nearly_shared"
_REPEATS = {SHARED: Repeats.A_ROW, NEARLY_SHARED: Repeats.NEARLY_A_ROW}
_REPEAT_FLAGS = {Repeats.A_ROW: "in both", Repeats.NEARLY_A_ROW: "nearly in both"}
_FINDING_ROWS = 20


@dataclass(frozen=True)
class Address:
    """The state of the page, all of it in its URL. `find` lists the rows of one finding instead of all rows."""

    version: DatasetVersion
    model: str
    limit: int
    usual_limit: int  # the limit that training uses by default
    share: int
    usual_share: int  # the default of training
    seed: int
    first: int
    line: int
    view: str
    find: str
    against: str  # the validation file to compare with, "" for none
    train_on: TrainOn

    def url(self, **changes: object) -> str:
        names = ("model", "limit", "share", "seed", "against", "first", "line", "view", "find")
        query = {name: getattr(self, name) for name in names} | changes
        query |= {"train_on": self.train_on.value if self.train_on is not TrainOn.ASSISTANT else ""}
        shown = {name: value for name, value in query.items() if value not in ("", None, 0)}
        if query["share"] != self.usual_share:
            shown["share"] = query["share"]
        return f"{reverse('web:dataset_detail', args=[self.version.pk])}?{urlencode(shown)}"

    def at(self, line: int) -> str:
        """Return the address of the list around one row."""
        return self.url(line=line, first=max(1, line - ROWS_BEFORE), find="")

    @property
    def split(self) -> Split:
        return Split(self.share / 100, self.seed)


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

    def lines_of(self, address: Address) -> list[int]:
        """Return the lines of the first rows that the address asks to find."""
        if address.find == HELD_OUT:
            return [at for at, is_held in enumerate(self.held or [], 1) if is_held]
        if address.find in _REPEATS:
            return [at for at, repeats in enumerate(self.repeats or b"", 1) if repeats == _REPEATS[address.find]]
        if address.find in (OVER, LOST):
            cut = cut_at(self.count, address.limit) or Cut(limit=address.limit)
            return cut.over_lines if address.find == OVER else cut.untrained_lines
        findings = self.inspection.findings if self.inspection else []
        return [row["line"] for found in findings if found["code"] == address.find for row in found["first"]]


def chosen_model(request: HttpRequest) -> BaseModel | None:
    models = list_base_models(only_installed=True)
    return models.filter(name=request.GET.get("model", "")).first() or models.first()


def model_options() -> list[tuple[str, str]]:
    return [(model.name, model.display_name) for model in list_base_models(only_installed=True)]


def limit_options(model: BaseModel | None) -> list[tuple[int, str]]:
    """Return the limits to choose from in ascending order, up to the model's context length."""
    longest = model.context_length if model else LIMITS[-1]
    own = {min(model.default_recipe.get("max_length", longest), longest)} if model else set()
    limits = {longest, *own, *(each for each in LIMITS if each < longest)}
    return [(limit, f"{limit:,} tokens") for limit in sorted(limits)]


def _usual_limit(version: DatasetVersion, model: BaseModel | None, count: TokenCount | None) -> int:
    """Return the limit that training uses by default."""
    if model is None:
        return LIMITS[-1]
    longest = count.longest_row_tokens if count else None
    return choose_longest_row(model, longest, is_text=kind_of(version) is RowKind.TEXT)[0]


def read_address(
    request: HttpRequest, version: DatasetVersion, model: BaseModel | None, count: TokenCount | None
) -> Address:
    view, line = request.GET.get("view", ""), _number(request, "line", 1)
    limits = [limit for limit, _ in limit_options(model)]
    usual = _usual_limit(version, model, count)
    limit = _number(request, "limit", usual)
    usual_share = round(100 * choose_validation_share(version.rows, is_text=kind_of(version) is RowKind.TEXT)[0])
    shares = {str(share): share for share, _ in SHARES}
    trains_inputs = request.GET.get("train_on") == TrainOn.ALL and kind_of(version) is RowKind.CHAT
    return Address(
        version=version,
        model=model.name if model else "",
        limit=limit if limit in limits else usual,
        usual_limit=usual,
        share=shares.get(request.GET.get("share", ""), usual_share),
        usual_share=usual_share,
        seed=_number(request, "seed", DEFAULT_SEED),
        first=_number(request, "first", max(1, line - ROWS_BEFORE)),
        line=line,
        view=view if view in dict(VIEWS) else "chat",
        find=request.GET.get("find", "")[:40],
        against=request.GET.get("against", "")[:80],
        train_on=TrainOn.ALL if trains_inputs else TrainOn.ASSISTANT,
    )


def _number(request: HttpRequest, name: str, default: int) -> int:
    text = request.GET.get(name, "")
    return max(1, int(text)) if text.isascii() and text.isdigit() and len(text) < 10 else default


def look(version: DatasetVersion, model: BaseModel | None, address: Address, count: TokenCount | None) -> RowContext:
    """Collect the version's counts and findings."""
    inspection = inspections.find_inspection(version=version) if version.status == DatasetVersionStatus.READY else None
    held = None
    if inspection and address.share and (version.rows or 0) <= inspections.KEYS_READ_NOW:
        held = inspections.held_out_rows(inspection=inspection, split=address.split)
    other = find_compared(address)
    found = comparisons.find_comparison(version=version, other=other) if other else None
    return RowContext(model, count, inspection, held, other, comparisons.marks_of(found) if found else None)


def find_compared(address: Address) -> DatasetVersion | None:
    """Return the validation file to compare with, if the address names one. Raises UnknownFile."""
    if not address.against:
        return None
    return queries.get_version(organization=address.version.organization_id, id=address.against)


def cut_at(count: TokenCount | None, limit: int) -> Cut | None:
    """Return what this limit cuts; return None if that was not counted."""
    found = next((cut for cut in count.cuts if cut["limit"] == limit), None) if count else None
    return msgspec.convert(found, Cut) if found else None


def viewer_context(address: Address, looked: RowContext, *, is_pending: bool) -> dict[str, object]:
    """Return the context of the viewer's template."""
    lines = looked.lines_of(address) if address.find else []
    previews = [] if is_pending else _previews(address, lines)
    rows = [_listed(preview, looked, address) for preview in previews]
    chosen = next((preview for preview in previews if preview.line >= address.line), previews[0] if previews else None)
    shown, error = _rendered(chosen, looked.model, address)
    return {
        "version": address.version,
        "model": looked.model,
        "models": model_options(),
        "limits": limit_options(looked.model),
        "shares": SHARES,
        "trained": [(key.value, label) for key, label in TRAINED],
        "address": address,
        "rows": rows,
        "found_count": len(lines),
        "all_url": address.url(find="", first=1, line=1),
        "chosen": chosen,
        "shown": shown,
        "row_error": error,
        "json": _pretty(chosen.raw) if chosen and address.view == "json" else "",
        "views": [
            {"label": label, "url": address.url(view=key), "current": key == address.view} for key, label in VIEWS
        ],
        **_pages(address, rows, lines),
    }


def _pages(address: Address, rows: list[ListedRow], lines: list[int]) -> dict[str, str]:
    if address.find:
        earlier = [line for line in lines if line < rows[0].line] if rows else []
        later = [line for line in lines if line > rows[-1].line] if rows else []
        before = earlier[-_FINDING_ROWS:][:1]
        return {
            "previous_url": address.url(first=before[0], line=before[0]) if before else "",
            "next_url": address.url(first=later[0], line=later[0]) if later else "",
        }
    previous = max(1, address.first - ROWS_SHOWN)
    return {
        "previous_url": address.url(first=previous, line=previous) if address.first > 1 else "",
        "next_url": address.url(first=rows[-1].line + 1, line=rows[-1].line + 1) if len(rows) == ROWS_SHOWN else "",
    }


def _previews(address: Address, lines: list[int]) -> list[RowPreview]:
    """Return the rows from the first one shown; if the chosen line lies outside them, start the list at that line."""
    version = address.version
    if address.find:
        wanted = [line for line in lines if line >= address.first][:_FINDING_ROWS]
        return [row for line in wanted for row in queries.read_rows(version=version, first_line=line, limit=1)]
    previews = queries.read_rows(version=version, first_line=address.first, limit=ROWS_SHOWN)
    if address.line < address.first or (previews and address.line > previews[-1].line):
        return queries.read_rows(version=version, first_line=address.line, limit=ROWS_SHOWN)
    return previews


def _listed(preview: RowPreview, looked: RowContext, address: Address) -> ListedRow:
    row, sides = preview.row, _sides(preview, looked.model, address.train_on)
    flags = _flags(row, sides, looked, address) if row is not None else (("bad", "error"),)
    text = _title(row) if row is not None else preview.raw
    return ListedRow(
        line=preview.line,
        text=" ".join(text[:200].split()) or "(empty)",
        tokens=sum(side.n_tokens for side in sides) if sides else None,
        turns=None if row is None or isinstance(row, TextRow) else len(_messages(row)),
        flags=flags,
        url=address.url(line=preview.line),
    )


def _flags(
    row: Row, sides: tuple[RenderedRow, ...] | None, looked: RowContext, address: Address
) -> tuple[tuple[str, str], ...]:
    flags = []
    if sides is None and looked.model is not None:
        flags.append(("bad", "error"))
    if sides and max(side.n_tokens for side in sides) > address.limit and not isinstance(row, TextRow):
        nothing = not any(side.truncate(address.limit).n_trained for side in sides)
        flags.append(("warn", "nothing trained" if nothing else "cut"))
    flags += [("warn", "e-mail" if hint == "email" else hint.value) for hint in sorted(hints_of(row))]
    copy = _copy_of(row.line_number, looked)
    if copy:
        flags.append(("warn", copy))
    if looked.held is not None and row.line_number <= len(looked.held) and looked.held[row.line_number - 1]:
        flags.append(("accent", "held out"))
    repeats = (looked.repeats or b"")[row.line_number - 1 : row.line_number]
    flags += [("warn", _REPEAT_FLAGS[Repeats(mark)]) for mark in repeats if mark]
    return tuple(flags)


def _copy_of(line: int, looked: RowContext) -> str:
    words = {"exact_copy": "copy", "near_copy": "near copy"}
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


def _pretty(raw: str) -> str:
    try:
        return json.dumps(json.loads(raw), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        return raw
