"""Formats: the meaning of a row's columns, detected or given, as one of three row kinds.

A dataset's rows are stored as JSON text of three kinds, the only ones that counting and training read: chat
`{"messages": [...], "tools"?, "parallel_tool_calls"?}`, preference `{"input": {...}, "preferred_output": [...],
"non_preferred_output": [...]}` and text `{"text": "..."}`. Values are passed on as their original text, so that no key
is dropped or invented.
"""

from collections import Counter
from collections.abc import Iterable
from enum import StrEnum

import msgspec

from apps.contracts.chat.rows import RowKind
from apps.core.errors import InvalidValue
from apps.core.http.json_bodies import explain


class Format(StrEnum):
    """The format in which the rows were written."""

    CHAT = "chat"
    PREFERENCE = "preference"
    PREFERENCE_PAIRS = "preference_pairs"
    PROMPT_COMPLETION = "prompt_completion"
    INSTRUCTION = "instruction"
    SHAREGPT = "sharegpt"
    TEXT = "text"


class Field(msgspec.Struct, frozen=True):
    """A field of a format and the usual names of its column, the format's own name first."""

    names: tuple[str, ...]
    is_required: bool = True

    @property
    def name(self) -> str:
        return self.names[0]


def _optional(*names: str) -> Field:
    return Field(names, is_required=False)


_SYSTEM = _optional("system", "system_prompt")
_TOOLS = _optional("tools")
_PARALLEL = _optional("parallel_tool_calls")

# In order of detection: the format with the most specific names comes first.
FIELDS: dict[Format, tuple[Field, ...]] = {
    Format.PREFERENCE: (Field(("input",)), Field(("preferred_output",)), Field(("non_preferred_output",))),
    Format.PREFERENCE_PAIRS: (
        Field(("prompt", "question", "instruction", "messages", "conversations", "conversation")),
        Field(("chosen",)),
        Field(("rejected",)),
        _optional("input"),
        _SYSTEM,
    ),
    Format.CHAT: (Field(("messages",)), _TOOLS, _PARALLEL),
    Format.SHAREGPT: (Field(("conversations", "conversation")), _SYSTEM, _TOOLS),
    Format.INSTRUCTION: (
        Field(("instruction",)),
        Field(("output", "response", "completion", "answer")),
        _optional("input", "context"),
        _SYSTEM,
    ),
    Format.PROMPT_COMPLETION: (
        Field(("prompt", "question", "query", "input")),
        Field(("completion", "answer", "response", "output")),
        _SYSTEM,
    ),
    Format.TEXT: (Field(("text", "content")),),
}
KINDS: dict[Format, RowKind] = {
    Format.CHAT: RowKind.CHAT,
    Format.PREFERENCE: RowKind.PREFERENCE,
    Format.PREFERENCE_PAIRS: RowKind.PREFERENCE,
    Format.PROMPT_COMPLETION: RowKind.CHAT,
    Format.INSTRUCTION: RowKind.CHAT,
    Format.SHAREGPT: RowKind.CHAT,
    Format.TEXT: RowKind.TEXT,
}
LABELS: dict[Format, str] = {
    Format.CHAT: "Chats (OpenAI)",
    Format.PREFERENCE: "Preferences (OpenAI)",
    Format.PREFERENCE_PAIRS: "Preferences: prompt, chosen, rejected",
    Format.PROMPT_COMPLETION: "Prompt and completion",
    Format.INSTRUCTION: "Instructions (Alpaca)",
    Format.SHAREGPT: "ShareGPT",
    Format.TEXT: "Plain text",
}
OPTIONAL: dict[Format, frozenset[str]] = {
    format: frozenset(field.name for field in fields if not field.is_required) for format, fields in FIELDS.items()
}
# Metadata that may stand beside plain text. Any other column may be what should be learned.
_ABOUT_TEXT = frozenset({"id", "_id", "meta", "metadata", "source", "url", "title", "timestamp", "date", "language"})
_COLUMN_NAME_LIMIT = 200
_CONVERSATIONS = frozenset({"messages", "conversations", "conversation"})
_ANSWERS = frozenset({"assistant", "gpt", "chatgpt", "bot", "model"})


class Mapping(msgspec.Struct, frozen=True, kw_only=True):
    """The column that stands for each field of a format. A field without a column is not in the file."""

    format: Format
    columns: dict[str, str] = {}

    @property
    def kind(self) -> RowKind:
        return KINDS[self.format]

    @property
    def is_verbatim(self) -> bool:
        """Whether rows in this format are one of the stored kinds already, under their own names."""
        is_ours = self.format in (Format.CHAT, Format.PREFERENCE, Format.TEXT)
        return is_ours and all(field == column for field, column in self.columns.items())


def detect(rows: Iterable[Iterable[str]]) -> Mapping | None:
    """Return the mapping that fits most rows; None when no format fits any row.

    A row is its column names, or a dict with the JSON text of their values.
    """
    found = Counter[Format]()
    columns = dict[str, None]()
    for row in rows:
        names = list(row)
        columns |= dict.fromkeys(names)
        if (mapping := _mapping_of(set(names), row if isinstance(row, dict) else None)) is not None:
            found[mapping.format] += 1
    if not found:
        return None
    return match_columns(found.most_common(1)[0][0], columns)


def match_columns(format: Format, columns: Iterable[str]) -> Mapping:
    """Return the format with those columns that have its usual names."""
    present = set(columns)
    chosen: dict[str, str] = {}
    for field in FIELDS[format]:
        is_pairs_input = format is Format.PREFERENCE_PAIRS and field.name == "input"
        if is_pairs_input and chosen.get("prompt") != "instruction":
            continue  # only Alpaca's input is a part of the prompt
        name = next((name for name in field.names if name in present and name not in chosen.values()), None)
        if name is not None:
            chosen[field.name] = name
    return Mapping(format=format, columns=chosen)


def stored_mapping(kind: RowKind, columns: Iterable[str]) -> Mapping:
    """Return the mapping of rows that are stored in this kind."""
    format, present = Format(kind), set(columns)
    names = [field.name for field in FIELDS[format] if field.name in present]
    return Mapping(format=format, columns={name: name for name in names})


def _mapping_of(columns: set[str], row: dict[str, msgspec.Raw] | None) -> Mapping | None:
    for format, fields in FIELDS.items():
        mapping = match_columns(format, columns)
        if not all(field.name in mapping.columns for field in fields if field.is_required):
            continue
        if format is Format.TEXT and columns - _ABOUT_TEXT - set(mapping.columns.values()):
            continue
        if format is Format.PREFERENCE_PAIRS and row is not None and not _is_pair(row, mapping.columns["prompt"]):
            continue
        return mapping
    return None


def _is_pair(row: dict[str, msgspec.Raw], prompt: str) -> bool:
    """Return whether a row with a conversation is a pair of answers to it, and not a chat with other columns."""
    if not _CONVERSATIONS & row.keys():
        return True
    if not all(isinstance(_value(row[name]), str | dict | list) for name in ("chosen", "rejected")):
        return False
    return prompt not in _CONVERSATIONS or not _is_answered(_value(row[prompt]))


def _is_answered(turns: object) -> bool:
    last = turns[-1] if isinstance(turns, list) and turns else None
    sender = last.get("role", last.get("from")) if isinstance(last, dict) else None
    return isinstance(sender, str) and sender in _ANSWERS


def _value(raw: msgspec.Raw) -> object:
    """Return a value; text of a table that is JSON counts as that, and empty text as nothing."""
    try:
        found = msgspec.json.decode(raw)
        is_json = isinstance(found, str) and found.lstrip().startswith(("[", "{"))
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    try:
        return msgspec.json.decode(found) if is_json else found or None
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return found


def check_mapping(mapping: Mapping) -> Mapping:
    """Return the mapping if it names only known fields and all required ones. Raises InvalidValue."""
    fields = {field.name: field for field in FIELDS[mapping.format]}
    columns = {field: column for field, column in mapping.columns.items() if column}
    for field, column in columns.items():
        if field not in fields:
            raise InvalidValue(f"{mapping.format} has no field '{field[:40]}'.", param=f"mapping.columns.{field[:40]}")
        if len(column) > _COLUMN_NAME_LIMIT:
            raise InvalidValue("The column's name is too long.", param=f"mapping.columns.{field}")
    for name, wanted in fields.items():
        if wanted.is_required and name not in columns:
            raise InvalidValue(f"Name the column that holds '{name}'.", param=f"mapping.columns.{name}")
    return Mapping(format=mapping.format, columns=columns)


def read_mapping(value: object, *, param: str = "mapping") -> Mapping | None:
    """Return a mapping given as JSON or as JSON text; None if empty. Raises InvalidValue."""
    if value in (None, "", {}):
        return None
    try:
        data = msgspec.json.decode(value) if isinstance(value, str) else value
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidValue(f"'{param}' must be a JSON object with 'format' and 'columns'.", param=param) from error
    try:
        mapping = msgspec.convert(data, Mapping)
    except msgspec.ValidationError as error:
        raise explain(data, Mapping, at=param) from error
    # A format alone: the columns have the format's own names.
    own = mapping.columns or {field.name: field.name for field in FIELDS[mapping.format]}
    return check_mapping(Mapping(format=mapping.format, columns=own))
