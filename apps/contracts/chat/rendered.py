"""A rendered row: its text and tokens, and the part that the loss counts."""

from enum import StrEnum

import msgspec

Span = tuple[int, int]


class TrainOn(StrEnum):
    """The tokens of a conversation that the loss counts."""

    ASSISTANT = "assistant"  # every assistant message of weight 1, with the token that ends its turn
    COMPLETION = "completion"  # everything after the generation prompt of the last message
    ALL = "all"  # the whole conversation, inputs included


class Segment(msgspec.Struct, frozen=True):
    """A piece of rendered text that is trained as a whole, or not at all."""

    text: str
    is_trained: bool


class RenderedRow(msgspec.Struct, frozen=True, gc=False):
    """A row as text and tokens.

    `spans` are the trained characters, `trained` the ranges of token_ids the loss counts.
    """

    text: str
    spans: tuple[Span, ...]
    token_ids: list[int]
    trained: tuple[Span, ...]
    is_truncated: bool = False

    @property
    def n_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def n_trained(self) -> int:
        return sum(end - start for start, end in self.trained)

    @property
    def trained_mask(self) -> tuple[bool, ...]:
        """Whether the loss counts token i."""
        mask = [False] * len(self.token_ids)
        for start, end in self.trained:
            mask[start:end] = [True] * (end - start)
        return tuple(mask)

    @property
    def segments(self) -> tuple[Segment, ...]:
        parts, position = [], 0
        for start, end in self.spans:
            parts += [Segment(self.text[position:start], False), Segment(self.text[start:end], True)]
            position = end
        parts.append(Segment(self.text[position:], False))
        return tuple(part for part in parts if part.text)

    def labels(self, ignored: int) -> list[int]:
        """Return the token ids, with `ignored` in place of tokens that the loss does not count."""
        labels = [ignored] * len(self.token_ids)
        for start, end in self.trained:
            labels[start:end] = self.token_ids[start:end]
        return labels

    def truncate(self, max_length: int) -> "RenderedRow":
        """Return the row cut to its first `max_length` tokens; text and spans are unchanged."""
        if len(self.token_ids) <= max_length:
            return self
        kept = tuple((start, min(end, max_length)) for start, end in self.trained if start < max_length)
        return RenderedRow(self.text, self.spans, self.token_ids[:max_length], kept, is_truncated=True)


class RenderedPair(msgspec.Struct, frozen=True):
    """Both conversations of a preference; only their answers are trained."""

    chosen: RenderedRow
    rejected: RenderedRow
