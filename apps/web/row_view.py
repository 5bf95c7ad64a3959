"""A training row as a page shows it: what the model sees, which part is trained, where its tokens are cut. Pure."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from apps.contracts.chat import ChatRenderer, ChatRow, RenderedRow

SHOWN_TOKENS = 2_000
Span = tuple[int, int]


@dataclass(frozen=True)
class Piece:
    """A stretch of text that is one control token, or none."""

    text: str
    is_control: bool = False


@dataclass(frozen=True)
class Part:
    """Pieces in a row that are all trained, or all not."""

    is_trained: bool
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Turn:
    """One message with the template's text around it."""

    role: str
    tokens: int
    trained_tokens: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Token:
    text: str
    is_trained: bool


@dataclass(frozen=True)
class RowView:
    turns: tuple[Turn, ...]
    tokens: tuple[Token, ...]  # the first SHOWN_TOKENS
    token_count: int
    trained_count: int

    @property
    def hidden_token_count(self) -> int:
        return self.token_count - len(self.tokens)


def row_view(row: ChatRow, rendered: RenderedRow, renderer: ChatRenderer) -> RowView:
    """Divide a rendered row into turns and tokens."""
    text = rendered.text
    spans, controls = renderer.token_spans(text), renderer.control_spans(text)
    trained = _trained_spans(rendered)
    turns = tuple(
        _turn(role, span, text, spans, rendered.trained_mask, controls, trained)
        for role, span in _turn_spans(row, text, controls)
    )
    tokens = tuple(
        Token(text[start:end], is_trained)
        for (start, end), is_trained in zip(spans[:SHOWN_TOKENS], rendered.trained_mask, strict=False)
    )
    return RowView(turns, tokens, rendered.n_tokens, rendered.n_trained)


def _turn_spans(row: ChatRow, text: str, controls: Sequence[Span]) -> list[tuple[str, Span]]:
    """Cut the text after each message's end of turn; what a template puts before a message goes with it."""
    cuts, position = [], 0
    for message in row.messages[:-1]:
        content = message.content.strip()
        found = text.find(content, position)
        if found < 0:  # the template rewrites the text: show the row in one piece
            return [("conversation", (0, len(text)))]
        position = _end_of_turn(text, found + len(content), controls)
        cuts.append(position)
    edges = [0, *cuts, len(text)]
    return [(m.role.value, span) for m, span in zip(row.messages, pairwise(edges), strict=True)]


def _end_of_turn(text: str, written: int, controls: Sequence[Span]) -> int:
    """Return where the control token after `written` ends, with the line break some templates put behind it."""
    index = bisect_left(controls, (written, 0))
    end = controls[index][1] if index < len(controls) else written
    return end + len(text[end:]) - len(text[end:].lstrip("\r\n"))


def _turn(
    role: str,
    span: Span,
    text: str,
    spans: Sequence[Span],
    mask: Sequence[bool],
    controls: Sequence[Span],
    trained: Sequence[Span],
) -> Turn:
    start, end = span
    first, last = bisect_left(spans, (start, 0)), bisect_left(spans, (end, 0))
    return Turn(role, last - first, sum(mask[first:last]), _parts(text, span, controls, trained))


def _parts(text: str, span: Span, controls: Sequence[Span], trained: Sequence[Span]) -> tuple[Part, ...]:
    start, end = span
    inside = {edge for edges in (*controls, *trained) for edge in edges if start < edge < end}
    edges = [start, *sorted(inside), end]
    pieces = [
        (_covers(trained, low), Piece(text[low:high], _covers(controls, low)))
        for low, high in pairwise(edges)
        if high > low
    ]
    grouped = groupby(pieces, key=lambda piece: piece[0])
    return tuple(Part(is_trained, tuple(piece for _, piece in group)) for is_trained, group in grouped)


def _covers(spans: Sequence[Span], position: int) -> bool:
    index = bisect_right(spans, (position, float("inf"))) - 1
    return index >= 0 and spans[index][0] <= position < spans[index][1]


def _trained_spans(rendered: RenderedRow) -> list[Span]:
    spans, position = [], 0
    for segment in rendered.segments:
        end = position + len(segment.text)
        if segment.is_trained:
            spans.append((position, end))
        position = end
    return spans
