"""A training row as a page shows it: the text that the model sees, its trained part, and where it is cut. Pure."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

from django.utils.translation import gettext

from apps.contracts.chat import ChatRenderer, ChatRow, PreferenceRow, RenderedRow, Row, TextRow, TrainOn
from apps.contracts.templating.process import PAGE_SECONDS, renders_within

SHOWN_TOKENS = 2_000
Span = tuple[int, int]


@dataclass(frozen=True)
class Piece:
    """A piece of text: one control token, or text without any."""

    text: str
    is_control: bool = False


@dataclass(frozen=True)
class TextPart:
    """Consecutive pieces that are all trained, all untrained, or all beyond the limit."""

    is_trained: bool
    pieces: tuple[Piece, ...]
    is_cut: bool = False
    is_first_cut: bool = False


@dataclass(frozen=True)
class Turn:
    """One message with the template's text around it."""

    role: str
    tokens: int
    trained_tokens: int
    parts: tuple[TextPart, ...]


@dataclass(frozen=True)
class Token:
    text: str
    is_trained: bool
    is_cut: bool = False
    is_control: bool = False


@dataclass(frozen=True)
class RowView:
    turns: tuple[Turn, ...]
    tokens: tuple[Token, ...]  # the first SHOWN_TOKENS
    token_count: int
    trained_count: int
    limit: int | None = None
    longest: int = 0  # of the row's sequences: a preference has two
    is_text: bool = False  # plain text is split at the limit, not cut

    @property
    def hidden_token_count(self) -> int:
        return self.token_count - len(self.tokens)

    @property
    def is_cut(self) -> bool:
        return self.limit is not None and self.longest > self.limit and not self.is_text

    @property
    def piece_count(self) -> int:
        return -(-self.longest // self.limit) if self.is_text and self.limit else 1


def view_row(
    row: Row, renderer: ChatRenderer, *, limit: int | None = None, train_on: TrainOn = TrainOn.ASSISTANT
) -> RowView:
    """Return a row of any kind as the model sees it. Raises RowError. `train_on` applies to conversations."""
    if isinstance(row, PreferenceRow):
        with renders_within(PAGE_SECONDS):
            pair = renderer.render_pair(row)
        sides = (row_view(row.chosen, pair.chosen, renderer, limit=limit),
                 row_view(row.rejected, pair.rejected, renderer, limit=limit))  # fmt: skip
        return _both(*sides)
    with renders_within(PAGE_SECONDS):
        rendered = renderer.render(row, train_on=train_on)
    return row_view(row, rendered, renderer, limit=limit)


def row_view(
    row: ChatRow | TextRow, rendered: RenderedRow, renderer: ChatRenderer, *, limit: int | None = None
) -> RowView:
    """Split a rendered row into turns and tokens, and cut it at the limit."""
    is_text = isinstance(row, TextRow)
    text, kept = rendered.text, rendered if limit is None or is_text else rendered.truncate(limit)
    spans = renderer.token_spans(text, is_plain=is_text)
    controls = renderer.control_spans(text)
    cut = spans[kept.n_tokens][0] if kept.is_truncated else len(text)
    trained = [(start, min(end, cut)) for start, end in rendered.spans if start < cut]
    mask = kept.trained_mask + (False,) * (rendered.n_tokens - kept.n_tokens)
    turns = []
    for role, span in _turn_spans(row, text, controls):
        first, last = (bisect_left(spans, (edge, 0)) for edge in span)
        parts = _parts(text, span, controls, trained, cut)
        turns.append(Turn(role, last - first, sum(mask[first:last]), parts))
    tokens = tuple(
        Token(text[start:end], is_trained, at >= kept.n_tokens, _covers(controls, start))
        for at, ((start, end), is_trained) in enumerate(zip(spans[:SHOWN_TOKENS], mask, strict=False))
    )
    return RowView(tuple(turns), tokens, rendered.n_tokens, kept.n_trained, limit, rendered.n_tokens, is_text)


def _both(chosen: RowView, rejected: RowView) -> RowView:
    """Join both sides of a preference: the shared turns once, then both answers, labelled."""
    last, other = chosen.turns[-1], rejected.turns[-1]
    answers = (replace(last, role=gettext("preferred")), replace(other, role=gettext("not preferred")))
    return RowView(
        turns=(*chosen.turns[:-1], *answers),
        tokens=(chosen.tokens + rejected.tokens)[:SHOWN_TOKENS],
        token_count=chosen.token_count + rejected.token_count,
        trained_count=chosen.trained_count + rejected.trained_count,
        limit=chosen.limit,
        longest=max(chosen.longest, rejected.longest),
    )


def _turn_spans(row: ChatRow | TextRow, text: str, controls: Sequence[Span]) -> list[tuple[str, Span]]:
    """Split the text after each message's end of turn; the template's text before a message belongs to that message."""
    if isinstance(row, TextRow):
        return [(gettext("text"), (0, len(text)))]
    cuts, position = [], 0
    for message in row.messages[:-1]:
        content = message.content.strip()
        found = text.find(content, position)
        if found < 0:  # the template rewrites the text: show the row in one piece
            return [("conversation", (0, len(text)))]
        # The turn ends with the next control token and the line break that some templates add.
        written = found + len(content)
        index = bisect_left(controls, (written, 0))
        end = controls[index][1] if index < len(controls) else written
        position = end + len(text[end:]) - len(text[end:].lstrip("\r\n"))
        cuts.append(position)
    edges = [0, *cuts, len(text)]
    return [(m.role.value, span) for m, span in zip(row.messages, pairwise(edges), strict=True)]


def _parts(text: str, span: Span, controls: Sequence[Span], trained: Sequence[Span], cut: int) -> tuple[TextPart, ...]:
    start, end = span
    inside = {edge for edges in (*controls, *trained, (cut, cut)) for edge in edges if start < edge < end}
    edges = [start, *sorted(inside), end]
    pieces = [
        ((_covers(trained, low), low >= cut), Piece(text[low:high], _covers(controls, low)))
        for low, high in pairwise(edges)
        if high > low
    ]
    parts, position = [], start
    for (is_trained, is_cut), group in groupby(pieces, key=lambda piece: piece[0]):
        inside_part = tuple(piece for _, piece in group)
        parts.append(TextPart(is_trained, inside_part, is_cut, is_first_cut=is_cut and position == cut))
        position += sum(len(piece.text) for piece in inside_part)
    return tuple(parts)


def _covers(spans: Sequence[Span], position: int) -> bool:
    index = bisect_right(spans, (position, float("inf"))) - 1
    return index >= 0 and spans[index][0] <= position < spans[index][1]
