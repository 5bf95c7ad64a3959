"""Rows: strict parsing, rendering with a chat template, token ids and the mask of trained tokens.

Preview, token counts and training all use this code, so a page shows exactly what is trained.
"""

from apps.contracts.chat.errors import RowError, RowErrorCode, TemplateNotPrefixStable, TemplateRejectedRow
from apps.contracts.chat.lines import MAX_LINE_BYTES, Line, split_lines
from apps.contracts.chat.parsing import parse_line_as, parse_row, parse_row_as
from apps.contracts.chat.rendered import RenderedPair, RenderedRow, TrainOn
from apps.contracts.chat.renderer import ChatRenderer
from apps.contracts.chat.rows import ChatMessage, ChatRow, MessageRole, PreferenceRow, Row, RowKind, TextRow
from apps.contracts.chat.tokenizer_files import InvalidChatTemplate, chat_template_sha256

__all__ = [
    "MAX_LINE_BYTES",
    "ChatMessage",
    "ChatRenderer",
    "ChatRow",
    "InvalidChatTemplate",
    "Line",
    "MessageRole",
    "PreferenceRow",
    "RenderedPair",
    "RenderedRow",
    "Row",
    "RowError",
    "RowErrorCode",
    "RowKind",
    "TemplateNotPrefixStable",
    "TemplateRejectedRow",
    "TextRow",
    "TrainOn",
    "chat_template_sha256",
    "parse_line_as",
    "parse_row",
    "parse_row_as",
    "split_lines",
]  # fmt: skip
