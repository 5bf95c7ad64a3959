"""Encoding of texts as token ids, and of trained characters as ranges of tokens.

The exact way asks the tokenizer for each token's offset in the text, which costs a third of its speed. The fast way
counts control tokens instead: a row cannot contain any, so the n-th one in the text is the n-th one among the ids.
Between it and the answer are a few constant tokens, which are compared one by one. If they differ (a merge across the
edge), the row is encoded the exact way.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from operator import itemgetter

import msgspec
from tokenizers import Encoding, Tokenizer

from apps.contracts.chat.rendered import Span
from apps.contracts.templating.layout import Layout


class Edge(msgspec.Struct, frozen=True):
    """An edge of a trained span: right before control token `control`, or after it and these tokens."""

    control: int  # -1: the end of the text
    is_after: bool = False
    tokens: tuple[int, ...] = ()


class EdgePlan(msgspec.Struct, frozen=True):
    """The control tokens of a layout in order, and each span's edges relative to them."""

    controls: tuple[int, ...]
    spans: tuple[tuple[Edge, Edge], ...]

    def ranges(self, ids: list[int]) -> tuple[Span, ...] | None:
        """Return the trained ranges of the ids, None if an edge is not between tokens."""
        try:
            places, position = [], 0
            for control in self.controls:
                position = ids.index(control, position) + 1
                places.append(position - 1)
        except ValueError:
            return None
        found = []
        for first, last in self.spans:
            start, end = _place(first, places, ids), _place(last, places, ids)
            if start is None or end is None:
                return None
            found.append((start, end))
        return tuple(found)


def _place(edge: Edge, places: list[int], ids: list[int]) -> int | None:
    if edge.control < 0:
        return len(ids)
    place = places[edge.control]
    if not edge.is_after:
        return place
    end = place + 1 + len(edge.tokens)
    return end if tuple(ids[place + 1 : end]) == edge.tokens else None


class Planner:
    """Builder of a layout's edge plan under one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, control: re.Pattern[str]) -> None:
        self._tokenizer, self._control = tokenizer, control
        added = tokenizer.get_added_tokens_decoder()
        self._ids = {token.content: number for number, token in added.items() if token.special}
        self._swallowing = {
            token.content
            for token in added.values()
            if token.special and (token.lstrip or token.rstrip or token.single_word)
        }

    def plan(self, layout: Layout) -> EdgePlan | None:
        """Return how to find the layout's spans among ids, None if only the exact way works."""
        controls = [
            (index, found.start(), found.end(), found.group())
            for index, literal in enumerate(layout.literals)
            for found in self._control.finditer(literal)
        ]
        if any(token in self._swallowing for *_, token in controls) or self._may_straddle(layout):
            return None
        spans = []
        for start, end in layout.spans:
            first, last = self._edge(layout, start, controls), self._edge(layout, end, controls)
            if first is None or last is None:
                return None
            spans.append((first, last))
        return EdgePlan(tuple(self._ids[token] for *_, token in controls), tuple(spans))

    def _edge(
        self, layout: Layout, edge: tuple[int, int], controls: Sequence[tuple[int, int, int, str]]
    ) -> Edge | None:
        index, offset = edge
        literal = layout.literals[index]
        if index == len(layout.literals) - 1 and offset == len(literal):
            return Edge(-1)
        following = bisect_left(controls, (index, offset))
        if following < len(controls) and controls[following][:2] == (index, offset):
            return Edge(following)
        if following == 0 or controls[following - 1][0] != index:
            return None
        _, _, end, token = controls[following - 1]
        constant = self._tokenizer.encode(token + literal[end:offset], add_special_tokens=False).ids
        return Edge(following - 1, True, tuple(constant[1:]))

    def _may_straddle(self, layout: Layout) -> bool:
        """Return whether a text and an adjacent literal could together form a control token."""
        for before, after in zip(layout.literals, layout.literals[1:], strict=False):
            for token in self._ids:
                for at in range(1, len(token)):
                    rest = token[at:]
                    if after and (after.startswith(rest) or rest.startswith(after)):
                        return True
                    if before and before.endswith(token[:at]):
                        return True
        return False


def ranges_by_offsets(encoding: Encoding, spans: Sequence[Span]) -> tuple[Span, ...]:
    """Return the ranges of tokens that contain a character of each span: the exact way."""
    tokens = [(low, high, at) for at, (low, high) in enumerate(encoding.offsets) if high > low]  # in the text's order
    found = []
    for start, end in spans:
        first = bisect_right(tokens, start, key=itemgetter(1))
        after = bisect_left(tokens, end, key=itemgetter(0))
        if first < after:
            found.append((tokens[first][2], tokens[after - 1][2] + 1))
    return _joined(found)


def _joined(ranges: Sequence[Span]) -> tuple[Span, ...]:
    """Return ascending ranges without overlap: a token on an edge belongs to one span only."""
    joined: list[Span] = []
    for start, end in ranges:
        if joined and start < joined[-1][1]:
            start = joined[-1][1]
        if start < end:
            joined.append((start, end))
    return tuple(joined)
