"""Parsing of one line as a row of the file's kind."""

from typing import Any

import msgspec

from apps.contracts.chat.errors import RowError, RowErrorCode, json_type
from apps.contracts.chat.lines import MAX_LINE_BYTES, Line, parse_json, raise_too_long
from apps.contracts.chat.messages import MAX_MESSAGES, parse_messages, parse_tools, raise_unknown_key, unknown_keys
from apps.contracts.chat.rows import ChatMessage, ChatRow, MessageRole, PreferenceRow, Row, RowKind, TextRow

_CHAT_KEYS = {"messages", "tools", "parallel_tool_calls"}
_PREFERENCE_KEYS = {"input", "preferred_output", "non_preferred_output"}
_CHAT_EXAMPLE = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
_PREFERENCE_EXAMPLE = (
    '{"input": {"messages": [...]}, "preferred_output": [{"role": "assistant", "content": "..."}], '
    '"non_preferred_output": [{"role": "assistant", "content": "..."}]}'
)


def parse_line_as(line: Line, kind: RowKind) -> Row:
    """Parse one line of `split_lines` as a row of this kind. Raises RowError."""
    if line.is_too_long:
        raise_too_long(line.number)
    return parse_row_as(line.data, kind, line_number=line.number)


def parse_row_as(line: bytes, kind: RowKind, *, line_number: int) -> Row:
    """Parse one JSON line as a row of this kind. Raises RowError with a stable code and a fix."""
    if kind is RowKind.CHAT:
        return parse_row(line, line_number=line_number)
    value = _parse_object(line, line_number)
    return (_preference if kind is RowKind.PREFERENCE else _text)(value, line_number)


def parse_row(line: bytes, *, line_number: int) -> ChatRow:
    """Parse one JSON line as a conversation. Raises RowError with a stable code and a fix."""
    messages = _parse_quickly(line)
    if messages is not None:
        return ChatRow(messages, line_number)
    return parse_row_strictly(line, line_number=line_number)


def parse_row_strictly(line: bytes, *, line_number: int) -> ChatRow:
    """Parse a conversation with the strict parser, which names each error; `parse_row` gives the same result faster."""
    value = _parse_object(line, line_number)
    if "messages" not in value:
        fix = _missing_messages_fix(value)
        message = "The row has no `messages`."
        raise RowError(line_number, RowErrorCode.MISSING_MESSAGES, message, param="messages", fix=fix)
    _reject_unknown(value, _CHAT_KEYS, line_number)
    tools = parse_tools(value, line_number)
    messages = parse_messages(value["messages"], line_number)
    _check_last(messages, line_number, "messages")
    _check_trained(messages, line_number)
    return ChatRow(messages=messages, line_number=line_number, tools=tools)


# --- fast parser ------------------------------------------------------------------------------------------------------


class _PlainRow(msgspec.Struct, forbid_unknown_fields=True):
    messages: tuple[ChatMessage, ...]


_decode = msgspec.json.Decoder(_PlainRow).decode


def _parse_quickly(line: bytes) -> tuple[ChatMessage, ...] | None:
    """Return the messages of a plain, valid conversation; None if it needs the strict parser.

    The decoder keeps the last of two equal keys. Inside a string the quotes of a key are escaped, so as many quoted
    keys as messages means that each key occurs once.
    """
    if len(line) > MAX_LINE_BYTES or b"\\u" in line or b"\x00" in line:
        return None
    if b'"weight"' in line or b'"name"' in line or b'"tool_call' in line:  # rare, and may occur twice
        return None
    try:
        found = _decode(line).messages
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    count = len(found)
    is_single = line.count(b'"role"') == count == line.count(b'"content"') and line.count(b'"messages"') == 1
    if not is_single or not 0 < count <= MAX_MESSAGES or found[-1].role is not MessageRole.ASSISTANT:
        return None
    for message in found:
        if message.role is MessageRole.ASSISTANT and not message.content.strip():
            return None
        if message.role is MessageRole.TOOL:
            return None
    return found


# --- strict parser ----------------------------------------------------------------------------------------------------


def _parse_object(line: bytes, number: int) -> dict[str, Any]:
    if len(line) > MAX_LINE_BYTES:
        raise_too_long(number)
    value = parse_json(line, number)
    if isinstance(value, dict):
        return value
    raise RowError(
        number,
        RowErrorCode.NOT_AN_OBJECT,
        f"The line is a JSON {json_type(value)}, not an object.",
        fix='Write one object per line: {"messages": [...]}; no surrounding array.',
    )


def _preference(value: dict[str, object], number: int) -> PreferenceRow:
    for key in ("input", "preferred_output", "non_preferred_output"):
        if key not in value:
            message = f"The row has no `{key}`."
            raise RowError(number, RowErrorCode.MISSING_PREFERENCE, message, param=key, fix=_PREFERENCE_EXAMPLE)
    _reject_unknown(value, _PREFERENCE_KEYS, number)
    given = value["input"]
    if not isinstance(given, dict) or "messages" not in given:
        message = "`input` is not an object with `messages`."
        raise RowError(number, RowErrorCode.MISSING_PREFERENCE, message, param="input", fix=_PREFERENCE_EXAMPLE)
    _reject_unknown(given, _CHAT_KEYS, number, param="input.")
    tools = parse_tools(given, number, param="input.")
    prompt = parse_messages(given["messages"], number, param="input.messages")
    preferred, other = (_answer(value[key], key, number) for key in ("preferred_output", "non_preferred_output"))
    if preferred == other:
        message = "Both answers are the same, so there is nothing to prefer."
        fix = "Give two different answers, or remove the row."
        raise RowError(number, RowErrorCode.SAME_ANSWERS, message, param="non_preferred_output", fix=fix)
    return PreferenceRow(prompt, preferred, other, number, tools)


def _answer(value: object, param: str, number: int) -> tuple[ChatMessage, ...]:
    messages = parse_messages(value, number, param=param)
    if len(messages) != 1:
        message = f"`{param}` has {len(messages)} messages."
        fix = "Give one assistant message; everything before it belongs to `input`."
        raise RowError(number, RowErrorCode.INVALID_MESSAGES, message, param=param, fix=fix)
    _check_last(messages, number, param)
    _check_trained(messages, number, param)
    return messages


def _text(value: dict[str, object], number: int) -> TextRow:
    text = value.get("text")
    if not isinstance(text, str) or not text.strip():
        message = "The row has no text in `text`." if text != "" else "The row has an empty `text`."
        message = message if "text" in value else "The row has no `text`."
        fix = 'Write {"text": "..."}.'
        raise RowError(number, RowErrorCode.MISSING_TEXT, message, param="text", fix=fix)
    _reject_unknown(value, {"text"}, number)
    return TextRow(text, number)


def _reject_unknown(value: dict[str, object], known: set[str], number: int, *, param: str = "") -> None:
    for key in unknown_keys(value, known):
        raise_unknown_key(number, key, f"{param}{key[:40]}", f"Only {', '.join(sorted(known))} are read.")


def _missing_messages_fix(row: dict[str, object]) -> str:
    if {"prompt", "completion"} <= row.keys():
        return (
            "Turn prompt and completion into messages: "
            '{"messages": [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": COMPLETION}]}.'
        )
    return _CHAT_EXAMPLE


def _check_last(messages: tuple[ChatMessage, ...], number: int, param: str) -> None:
    last = messages[-1]
    if last.role is not MessageRole.ASSISTANT:
        raise RowError(
            number,
            RowErrorCode.LAST_MESSAGE_NOT_ASSISTANT,
            f"The last message is from {last.role.value}, so there is no answer to learn from.",
            param=f"{param}[{len(messages) - 1}].role",
            fix="End the conversation with the assistant's answer.",
        )


def _check_trained(messages: tuple[ChatMessage, ...], number: int, param: str = "messages") -> None:
    if not any(message.is_trained for message in messages):
        raise RowError(
            number,
            RowErrorCode.NO_TRAINED_MESSAGE,
            "Every assistant message has weight 0.",
            param=param,
            fix="Give at least one assistant message weight 1, or remove the row.",
        )
