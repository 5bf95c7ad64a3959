"""The automatic split: which rows are held out for validation, the same on the page and in the run.

A row's side depends on the seed and on the text of the first row it copies, so copies are always on the same side: rows
equal except for case and spacing, and near copies among the first `near_copies.MAX_ROWS` rows.
"""

import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from apps.contracts.chat.rows import ChatMessage, ChatRow, PreferenceRow, Row, TextRow
from apps.contracts.splits.near_copies import NearCopies

IDENTITY_BYTES = 8
MAX_SHARE = 0.5
_RANGE = 1 << 64


def row_identity(row: Row) -> int:
    """Return a 64-bit number shared by equal rows."""
    content = "\0".join([" ".join(text.casefold().split()) for text in row_texts(row)])
    digest = hashlib.blake2b(content.encode("utf-8", "replace"), digest_size=IDENTITY_BYTES)
    return int.from_bytes(digest.digest(), "big")


def row_texts(row: Row) -> Iterable[str]:
    """Return all texts of a row, with roles."""
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


class RowGroups:
    """Accepts rows in file order; stores each row's identity, and the identity of the first row it copies."""

    def __init__(self) -> None:
        self.identities = array("Q")
        self._near = NearCopies()

    def take(self, row: Row) -> int | None:
        """Add a row; return the index of an earlier near copy, or None."""
        place = len(self.identities)
        self.identities.append(row_identity(row))
        return self._near.find(own_words(row), place)

    def keys(self) -> "array[int]":
        """Return the keys that decide each row's side: equal for all copies of a row."""
        firsts = {self.identities[place]: self.identities[root] for place, root in self._near.roots()}
        return array("Q", (firsts.get(identity, identity) for identity in self.identities))


def split_keys(rows: Iterable[Row]) -> "array[int]":
    """Return the keys that decide each row's side, in file order."""
    groups = RowGroups()
    for row in rows:
        groups.take(row)
    return groups.keys()


def own_words(row: Row) -> str:
    """Return the text specific to a row: system messages are often the same in every row."""
    if isinstance(row, ChatRow):
        return "\n".join(message.content for message in row.messages if message.role not in ("system", "developer"))
    return "\n".join(row_contents(row))


def row_contents(row: Row) -> list[str]:
    """Return every text of a row, without roles."""
    if isinstance(row, TextRow):
        return [row.text]
    messages: tuple[ChatMessage, ...]
    messages = (*row.prompt, *row.preferred, *row.non_preferred) if isinstance(row, PreferenceRow) else row.messages
    return [message.content for message in messages] + [
        call.arguments for message in messages for call in message.tool_calls
    ]


class Split(msgspec.Struct, frozen=True):
    """A split that holds out this share of the distinct rows, chosen by the seed.

    Its input is each row's key of `split_keys`.
    """

    share: float
    seed: int

    def rank(self, key: int) -> int:
        """Return the row's position in the seed's order, from 0 to 2**64 (splitmix64 of key and seed)."""
        mixed = (key + (self.seed + 1) * 0x9E3779B97F4A7C15) % _RANGE
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) % _RANGE
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) % _RANGE
        return mixed ^ (mixed >> 31)

    def held_out(self, keys: Iterable[int]) -> list[bool]:
        """Return for each row whether it is held out.

        If the share is less than one row, the first in order is held out. Groups of copies larger than the share are
        trained; if all groups are larger, the smallest is held out.
        """
        listed = list(keys)
        if self.share <= 0 or not listed:
            return [False] * len(listed)
        sizes = Counter(listed)
        most = max(1.0, self.share * len(listed))
        small = [key for key, size in sizes.items() if size <= most]
        small = small or [min(sizes, key=lambda key: (sizes[key], self.rank(key)))]
        limit = max(int(self.share * _RANGE), min(map(self.rank, small)) + 1)
        held = {key for key in small if self.rank(key) < limit}
        return [key in held for key in listed]
