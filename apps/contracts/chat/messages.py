"""Parsing of messages, tools and tool calls from JSON. Each refusal names the field and the fix."""

import json
from typing import Any, NoReturn

import msgspec

from apps.contracts.chat.errors import RowError, RowErrorCode, json_type, short
from apps.contracts.chat.lines import MAX_DEPTH
from apps.contracts.chat.rows import ChatMessage, MessageRole, ToolCall
from apps.contracts.struct import is_deeper

MAX_MESSAGES = 2_000

_LEGACY_KEYS = {"functions", "function_call"}
_NOTED_NOTHING: tuple[str, list[Any]] = ("annotations", [])
_KEYS = {
    MessageRole.SYSTEM: {"role", "content", "name", "weight"},
    MessageRole.DEVELOPER: {"role", "content", "name", "weight"},
    MessageRole.USER: {"role", "content", "name", "weight"},
    MessageRole.ASSISTANT: {"role", "content", "name", "weight", "tool_calls", "refusal"},
    MessageRole.TOOL: {"role", "content", "name", "weight", "tool_call_id"},
}
_ROLES = {role.value: role for role in MessageRole}


def parse_messages(value: object, number: int, *, param: str = "messages") -> tuple[ChatMessage, ...]:
    """Return the messages of a JSON array. Raises RowError."""
    if not isinstance(value, list) or not value:
        message = f"`{param}` is empty." if value == [] else f"`{param}` is a JSON {json_type(value)}, not an array."
        fix = "Give at least one user and one assistant message."
        raise RowError(number, RowErrorCode.INVALID_MESSAGES, message, param=param, fix=fix)
    if len(value) > MAX_MESSAGES:
        message = f"The row has {len(value)} messages; {MAX_MESSAGES} are allowed."
        fix = "Split the conversation into several rows."
        raise RowError(number, RowErrorCode.TOO_MANY_MESSAGES, message, param=param, fix=fix)
    messages = tuple(_parse_message(item, f"{param}[{index}]", number) for index, item in enumerate(value))
    _check_tool_answers(messages, param, number)
    return messages


def parse_tools(row: dict[str, object], number: int, *, param: str = "") -> tuple[dict[str, Any], ...]:
    """Return the row's tool definitions unchanged. Raises RowError."""
    tools = row.get("tools")
    field = f"{param}tools"
    parallel = row.get("parallel_tool_calls")
    if parallel is not None and not isinstance(parallel, bool):
        what = f"`{param}parallel_tool_calls` is a JSON {json_type(parallel)}, not true or false."
        _raise_bad_tools(number, what, f"{param}parallel_tool_calls")
    if tools is None:
        return ()
    if not isinstance(tools, list):
        _raise_bad_tools(number, f"`{field}` is a JSON {json_type(tools)}, not an array.", field)
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type", "function") == "function" else {}
        if not (isinstance(function, dict) and isinstance(function.get("name"), str) and function["name"]):
            _raise_bad_tools(number, f"`{field}[{index}]` is not a function with a name.", f"{field}[{index}]")
    return tuple(tools)


def unknown_keys(value: dict[str, object], known: set[str]) -> list[str]:
    """Return the unknown keys with a value.

    OpenAI's client writes `"audio": null` and `"annotations": []` into messages that it dumps; these are ignored.
    """
    return [key for key in value if key not in known and value[key] is not None and (key, value[key]) != _NOTED_NOTHING]


def raise_unknown_key(number: int, key: str, param: str, note: str) -> NoReturn:
    """Raise the error of an unknown key: its content would silently not be trained."""
    if key in _LEGACY_KEYS:
        message = f"{short(key)} is OpenAI's old form of tools and is not read."
        fix = "Write `tools` and `tool_calls` instead; `anneal files convert` does it."
    else:
        message, fix = f"Unknown key {short(key)}.", f"Remove {short(key)}. {note}"
    raise RowError(number, RowErrorCode.UNKNOWN_KEY, message, param=param, fix=fix)


def _raise_bad_tools(number: int, message: str, param: str) -> NoReturn:
    fix = 'Write [{"type": "function", "function": {"name": "...", "parameters": {...}}}].'
    raise RowError(number, RowErrorCode.INVALID_TOOLS, message, param=param, fix=fix)


def _parse_message(value: object, param: str, number: int) -> ChatMessage:
    if not isinstance(value, dict):
        raise RowError(
            number,
            RowErrorCode.INVALID_MESSAGE,
            f"`{param}` is a JSON {json_type(value)}, not an object.",
            param=param,
            fix='Write {"role": "user", "content": "..."}.',
        )
    role = _parse_role(value.get("role"), param, number)
    unknown = unknown_keys(value, _KEYS[role])
    if unknown:
        key = min(unknown)
        known = ", ".join(sorted(_KEYS[role]))
        raise_unknown_key(number, key, f"{param}.{key[:40]}", f"A message with this role can have {known}.")
    calls = _parse_tool_calls(value.get("tool_calls"), f"{param}.tool_calls", number)
    return ChatMessage(
        role=role,
        content=_parse_content(value, role, param, number, may_be_empty=bool(calls)),
        weight=_parse_weight(value, role, param, number),
        name=_parse_text(value, "name", param, number),
        tool_calls=calls,
        tool_call_id=_parse_text(value, "tool_call_id", param, number),
    )


def _parse_role(value: object, param: str, number: int) -> MessageRole:
    role = _ROLES.get(value) if isinstance(value, str) else None
    if role is None:
        message = f"`{param}` has no role." if value is None else f"`{param}` has the role {short(str(value))}."
        hint = " Function messages are called tool messages now." if value == "function" else ""
        raise RowError(
            number,
            RowErrorCode.INVALID_ROLE,
            message,
            param=f"{param}.role",
            fix=f"Use system, developer, user, assistant or tool.{hint}",
        )
    return role


def _parse_content(
    message: dict[str, object], role: MessageRole, param: str, number: int, *, may_be_empty: bool
) -> str:
    content = message.get("content")
    field = f"{param}.content"
    if content is None and may_be_empty:
        return ""
    if isinstance(content, list) and content:
        for index, part in enumerate(content):
            is_text = isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
            if not is_text or part.keys() != {"type", "text"}:
                raise RowError(
                    number,
                    RowErrorCode.INVALID_CONTENT,
                    f"`{field}[{index}]` is no text part.",
                    param=f"{field}[{index}]",
                    fix="Only text can be trained: give the message as one string; images and audio are not supported.",
                )
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        if content is None and isinstance(message.get("refusal"), str):
            what = f"`{param}` has its answer in `refusal`, which is not trained."
            fix = "Move the text of `refusal` to `content`, or remove the row."
            raise RowError(number, RowErrorCode.INVALID_CONTENT, what, param=f"{param}.refusal", fix=fix)
        is_missing, fix = "content" not in message, "Give the text of the message as one string."
        what = f"`{field}` is missing." if is_missing else f"`{field}` is a JSON {json_type(content)}, not a string."
        raise RowError(number, RowErrorCode.INVALID_CONTENT, what, param=field, fix=fix)
    if role is MessageRole.ASSISTANT and not may_be_empty and not content.strip():
        raise RowError(
            number,
            RowErrorCode.EMPTY_ASSISTANT_CONTENT,
            f"`{field}` is empty: there is nothing to learn from this answer.",
            param=field,
            fix="Write the answer the model should give, or remove the row.",
        )
    return content


def _parse_weight(message: dict[str, object], role: MessageRole, param: str, number: int) -> int:
    if "weight" not in message:
        return 1
    weight = message["weight"]
    if role is not MessageRole.ASSISTANT:
        what, fix = f"`weight` is set on a {role.value} message.", "Only assistant messages may have a weight."
    elif type(weight) is not int or weight not in (0, 1):
        what, fix = f"`{param}.weight` is {short(json.dumps(weight))}.", "Use 1 (trained) or 0 (context only)."
    else:
        return weight
    raise RowError(number, RowErrorCode.INVALID_WEIGHT, what, param=f"{param}.weight", fix=fix)


def _parse_text(message: dict[str, object], key: str, param: str, number: int) -> str:
    value = message.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        what = f"`{param}.{key}` is a JSON {json_type(value)}, not a string."
        raise RowError(number, RowErrorCode.INVALID_MESSAGE, what, param=f"{param}.{key}", fix="Give it as a string.")
    return value


def _parse_tool_calls(value: object, param: str, number: int) -> tuple[ToolCall, ...]:
    if value is None or value == []:
        return ()
    if not isinstance(value, list):
        _raise_bad_call(number, f"`{param}` is a JSON {json_type(value)}, not an array.", param)
    return tuple(_parse_tool_call(call, f"{param}[{index}]", number) for index, call in enumerate(value))


def _parse_tool_call(call: object, param: str, number: int) -> ToolCall:
    function = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(name, str) or not name:
        _raise_bad_call(number, f"`{param}` does not name the function to call.", param)
    if call.get("type", "function") != "function" or not isinstance(call.get("id", ""), str):
        _raise_bad_call(number, f"`{param}` is not of type function with a string as id.", param)
    return ToolCall(
        id=call.get("id", ""),
        name=name,
        arguments=_parse_arguments(function.get("arguments", "{}"), f"{param}.function.arguments", number),
    )


def _parse_arguments(value: object, param: str, number: int) -> str:
    """Return the arguments as JSON text; some tools write the object instead of its text."""
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    try:
        found = json.loads(value) if isinstance(value, str) else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        _raise_bad_call(number, f"`{param}` is not the JSON text of an object.", param)
    if is_deeper(found, MAX_DEPTH):
        _raise_bad_call(number, f"`{param}` is nested deeper than {MAX_DEPTH} levels.", param)
    try:
        msgspec.msgpack.encode(found)
    except OverflowError:
        what = f"`{param}` holds a whole number that does not fit into 64 bits."
        _raise_bad_call(number, what, param, fix="Write the number as a string.")
    except UnicodeEncodeError:
        what = f"`{param}` holds half of a surrogate pair (\\ud800–\\udfff), which is not a character."
        _raise_bad_call(number, what, param, fix="Write the character itself, or both halves of the pair.")
    return str(value)


def _raise_bad_call(number: int, message: str, param: str, fix: str = "") -> NoReturn:
    example = '[{"id": "call_1", "type": "function", "function": {"name": "...", "arguments": "{}"}}]'
    raise RowError(number, RowErrorCode.INVALID_TOOL_CALLS, message, param=param, fix=fix or f"Write {example}.")


def _check_tool_answers(messages: tuple[ChatMessage, ...], param: str, number: int) -> None:
    """Refuse a tool message that answers no earlier call: a template would pair it with the latest one."""
    asked: set[str] = set()
    for index, message in enumerate(messages):
        asked.update(call.id for call in message.tool_calls)
        if message.role is MessageRole.TOOL and message.tool_call_id not in asked:
            field = f"{param}[{index}].tool_call_id"
            raise RowError(
                number,
                RowErrorCode.UNKNOWN_TOOL_CALL_ID,
                f"`{field}` does not match a tool call of an earlier assistant message.",
                param=field,
                fix="Give the id of the call this message answers.",
            )
