"""Row checks by apps.contracts.chat, a block of lines at a time where all of them are plain and valid.

Most files hold thousands of plain rows for each bad one. The fast check only ever confirms that all rows of a block are
valid; it passes every uncertain block to the strict parser, line by line.
"""

import msgspec
from msgspec import UNSET

from apps.contracts.chat.errors import RowError
from apps.contracts.chat.lines import Line
from apps.contracts.chat.parsing import parse_row_as
from apps.contracts.chat.rows import RowKind
from apps.datasets.problems import MAX_LINE_BYTES, LineError, from_row_error, too_long

MAX_MESSAGES = 2_000


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str
    weight: int | msgspec.UnsetType = UNSET


class _Chat(msgspec.Struct, forbid_unknown_fields=True):
    messages: list[_Message]


class _Text(msgspec.Struct, forbid_unknown_fields=True):
    text: str


_decode_chats = msgspec.json.Decoder(_Chat).decode_lines
_decode_texts = msgspec.json.Decoder(_Text).decode_lines
_CONTEXT_ROLES = frozenset({"user", "system", "developer"})
# An escaped letter could spell a key in a second way; databases do not accept an escaped NUL.
_ESCAPES = (b"\\u0000", b"\\u005", b"\\u006", b"\\u007")


def check_line(line: Line, kind: RowKind) -> LineError | None:
    """Return the problem of one line, None for a valid line."""
    if line.is_too_long:
        return too_long(line.number)
    try:
        parse_row_as(line.data, kind, line_number=line.number)
    except RowError as error:
        return from_row_error(error)
    return None


def count_if_plain(block: bytes, kind: RowKind) -> int | None:
    """Return the number of rows in a block of whole lines if every line is certainly valid, else None.

    None says nothing about the rows: they may be unusual or wrong, or have blank lines between them.
    """
    lines = block.count(b"\n")
    # One object on each line: the decoder itself would accept two on one line, or one over two lines.
    is_regular = block.startswith(b"{") and block.endswith(b"}\n") and block.count(b"}\n{") == lines - 1
    if not is_regular or any(escape in block for escape in _ESCAPES) or len(block) > MAX_LINE_BYTES:
        return None
    try:
        match kind:
            case RowKind.CHAT:
                return lines if _are_plain_chats(block, lines) else None
            case RowKind.TEXT:
                rows = _decode_texts(block)
                are_plain_texts = len(rows) == lines == block.count(b'"text"') and all(row.text.strip() for row in rows)
                return lines if are_plain_texts else None
            case _:
                return None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _are_plain_chats(block: bytes, lines: int) -> bool:
    rows = _decode_chats(block)
    messages = weighted = 0
    for row in rows:
        found = row.messages
        messages += len(found)
        if not found or found[-1].role != "assistant" or len(found) > MAX_MESSAGES:
            return False
        is_trained = False
        for message in found:
            if message.role == "assistant":
                weight = message.weight
                if weight is UNSET:
                    is_trained = True
                else:
                    weighted += 1
                    if weight == 1:
                        is_trained = True
                    elif weight != 0:
                        return False
                content = message.content
                if not content or (content[0].isspace() and not content.strip()):
                    return False
            elif message.role not in _CONTEXT_ROLES or message.weight is not UNSET:
                return False
        if not is_trained:
            return False
    return len(rows) == lines and _keys_are_single(block, lines, messages, weighted)


def _keys_are_single(block: bytes, rows: int, messages: int, weighted: int) -> bool:
    """Return whether each key occurs once in its object: the decoder silently keeps the last of two.

    A quote inside a string is escaped, so `"role"` in a block is a key, or a string that is just that word.
    """
    return (
        block.count(b'"role"') == messages == block.count(b'"content"')
        and block.count(b'"messages"') == rows
        and block.count(b'"weight"') == weighted
    )
