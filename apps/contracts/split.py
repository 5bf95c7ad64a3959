"""Which rows are held out for validation: the same answer on the page that previews it and in the run that uses it.

A row's side depends on its own text and the seed alone, so equal rows are always on the same side. Texts count as
equal whatever their case and spacing.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence

import msgspec

from apps.contracts.chat.rows import ChatMessage, PreferenceRow, Row, TextRow

IDENTITY_BYTES = 8
MAX_SHARE = 0.5
_RANGE = 1 << 64


def row_identity(row: Row) -> int:
    """Return a 64-bit number that equal rows share."""
    content = "\0".join([" ".join(text.casefold().split()) for text in row_texts(row)])
    digest = hashlib.blake2b(content.encode("utf-8", "replace"), digest_size=IDENTITY_BYTES)
    return int.from_bytes(digest.digest(), "big")


def row_texts(row: Row) -> Iterable[str]:
    """Return everything a row says, role by role."""
    if isinstance(row, TextRow):
        return [row.text]
    if isinstance(row, PreferenceRow):
        return [*_texts(row.prompt), "preferred", *_texts(row.preferred), "other", *_texts(row.non_preferred)]
    tools = [json.dumps(row.tools, sort_keys=True)] if row.tools else []
    return [*tools, *_texts(row.messages)]


def _texts(messages: Sequence[ChatMessage]) -> Iterable[str]:
    for message in messages:
        yield message.role.value
        yield message.content
        for call in message.tool_calls:
            yield f"{call.name} {call.arguments}"


class Split(msgspec.Struct, frozen=True):
    """Hold out this share of the distinct rows, chosen by the seed."""

    share: float
    seed: int

    def rank(self, identity: int) -> int:
        """Return the row's place in the seed's order, from 0 to 2**64 (splitmix64 of identity and seed)."""
        mixed = (identity + (self.seed + 1) * 0x9E3779B97F4A7C15) % _RANGE
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) % _RANGE
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) % _RANGE
        return mixed ^ (mixed >> 31)

    def held_out(self, identities: Iterable[int]) -> list[bool]:
        """Return for each row whether it is held out; where the share is under one row, the first in order is."""
        ranks = [self.rank(identity) for identity in identities]
        if self.share <= 0 or not ranks:
            return [False] * len(ranks)
        limit = max(int(self.share * _RANGE), min(ranks) + 1)
        return [rank < limit for rank in ranks]
