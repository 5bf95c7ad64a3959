"""Conversion of one row in a known format to the JSON text of a chat, preference or text row."""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from apps.datasets.problems import FileErrorCode, LineError, storable
from apps.datasets.validation.formats import Format, Mapping

Json = msgspec.Raw
_encode = msgspec.json.Encoder().encode
_read_columns = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_read = msgspec.json.Decoder().decode
_read_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_Turn = dict[str, Any] | msgspec.Raw


class Unconvertible(Exception):
    """A row lacks a field of its format, or has a wrong value there."""

    def __init__(self, message: str, *, param: str, fix: str, code: str = FileErrorCode.MISSING_VALUE) -> None:
        super().__init__(message)
        self.message, self.param, self.fix, self.code = message, param, fix, code

    def at(self, line: int) -> LineError:
        return LineError(
            line=line, code=self.code, message=storable(self.message), param=storable(self.param), fix=self.fix
        )


class Columns:
    """The values of one row by field. JSON text is parsed only where necessary."""

    def __init__(self, data: bytes, mapping: Mapping) -> None:
        """Parse the row. Raises Unconvertible unless it is a JSON object."""
        try:
            self._values = _read_columns(data)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            fix = "Write each row as one complete JSON object on one line."
            raise Unconvertible("The row is not a JSON object.", param="", fix=fix, code="invalid_json") from None
        self._columns = mapping.columns

    def raw(self, field: str) -> Json | None:
        """Return the JSON text of a field; text that contains an array or object counts as that."""
        value = self._values.get(self._columns.get(field, ""))
        if value is None or bytes(value) in (b"null", b'""'):
            return None
        if bytes(value)[:1] == b'"' and (inner := _inner_json(value)) is not None:
            return inner
        return value

    def required(self, field: str) -> Json:
        value = self.raw(field)
        if value is None:
            column = self._columns.get(field, field)
            raise Unconvertible(f"`{column}` is empty.", param=column, fix="Fill it in, or remove the row.")
        return value

    def text(self, field: str, *, is_required: bool = True) -> str:
        """Return a text field, "" if it is missing. Numbers are accepted as text: labels often are numbers."""
        column = self._columns.get(field, field)
        value = self._values.get(column)
        found = None if value is None else _read(value)
        if isinstance(found, int | float) and not isinstance(found, bool) and value is not None:
            return bytes(value).decode()
        if found is None or found == "":
            if is_required:
                raise Unconvertible(f"`{column}` is empty.", param=column, fix="Fill it in, or remove the row.")
            return ""
        if not isinstance(found, str):
            raise _wrong(column, f"`{column}` is not text.")
        return found

    def turn(self, field: str) -> Json | None:
        """Return the JSON text of a field that is one turn, and not text that looks like one."""
        value = self._values.get(self._columns.get(field, ""))
        return value if value is not None and bytes(value)[:1] == b"{" else None

    def column(self, field: str) -> str:
        return self._columns.get(field, field)


def convert(data: bytes, mapping: Mapping) -> bytes:
    """Return a row as JSON text of the mapping's kind. Raises Unconvertible."""
    return _CONVERTERS[mapping.format](Columns(data, mapping))


def _inner_json(value: Json) -> Json | None:
    """Return JSON that a table can only hold as text, e.g. a column of messages in CSV."""
    text = _read(value)
    if not text.lstrip().startswith(("[", "{")):
        return None
    try:
        _read(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    return msgspec.Raw(text.replace("\r", " ").replace("\n", " ").encode())


def _wrong(column: str, message: str) -> Unconvertible:
    return Unconvertible(
        message,
        param=column,
        fix="Correct the row, or choose another column.",
        code=FileErrorCode.INVALID_VALUE,
    )


# A table of text has no booleans, and Python writes them with a capital.
_WRITTEN = {b'"true"': msgspec.Raw(b"true"), b'"false"': msgspec.Raw(b"false")}


# --- formats ----------------------------------------------------------------------------------------------------------


def _chat(columns: Columns) -> bytes:
    row = {"messages": columns.required("messages")} | _present(columns, "tools", "parallel_tool_calls")
    if (told := row.get("parallel_tool_calls")) is not None:
        row["parallel_tool_calls"] = _WRITTEN.get(bytes(told).lower(), told)
    return _encode(row)


def _preference(columns: Columns) -> bytes:
    names = ("input", "preferred_output", "non_preferred_output")
    return _encode({name: columns.required(name) for name in names})


def _pairs(columns: Columns) -> bytes:
    asked = _turns(columns, "prompt", role="user")
    last = _read(asked[-1]) if isinstance(asked[-1], msgspec.Raw) else asked[-1]
    if last.get("role") == "assistant":
        column = columns.column("prompt")
        raise _wrong(column, f"`{column}` ends with an answer. It must end before the two answers.")
    if columns.raw("input") is not None and (more := columns.text("input", is_required=False)):
        asked = [{"role": "user", "content": f"{columns.text('prompt')}\n\n{more}"}]
    prompt = _system(columns) + asked
    return _encode(
        {
            "input": {"messages": prompt},
            "preferred_output": _answer(columns, "chosen", prompt),
            "non_preferred_output": _answer(columns, "rejected", prompt),
        }
    )


def _answer(columns: Columns, field: str, prompt: list[_Turn]) -> list[_Turn]:
    """Return only the answer where a file repeats the conversation before each answer."""
    turns = _turns(columns, field, role="assistant")
    return turns[-1:] if len(turns) > len(prompt) else turns


def _prompt_completion(columns: Columns) -> bytes:
    prompt = _turns(columns, "prompt", role="user")
    return _encode({"messages": _system(columns) + prompt + _turns(columns, "completion", role="assistant")})


def _instruction(columns: Columns) -> bytes:
    question, more = columns.text("instruction"), columns.text("input", is_required=False)
    user = f"{question}\n\n{more}" if more else question
    answer = columns.text("output")
    turns = [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
    return _encode({"messages": _system(columns) + turns})


def _text(columns: Columns) -> bytes:
    return _encode({"text": columns.text("text")})


def _present(columns: Columns, *fields: str) -> dict[str, Json]:
    return {field: value for field in fields if (value := columns.raw(field)) is not None}


def _system(columns: Columns) -> list[_Turn]:
    text = columns.text("system", is_required=False)
    return [{"role": "system", "content": text}] if text else []


def _turns(columns: Columns, field: str, *, role: str) -> list[_Turn]:
    """Return a field as turns: its messages or ShareGPT's, one of them, or one turn with its text."""
    value = columns.required(field)
    if (turn := columns.turn(field)) is not None:
        value = msgspec.Raw(b"[" + bytes(turn) + b"]")
    found = _read(value) if bytes(value)[:1] == b"[" else None
    if found and all(isinstance(item, dict) and "role" in item for item in found):
        return list(_read_items(value))
    if found and all(isinstance(item, dict) and "value" in item and _is_sender(item.get("from")) for item in found):
        return list(_sharegpt_messages(found, columns.column(field)))
    return [{"role": role, "content": columns.text(field)}]


# --- ShareGPT ---------------------------------------------------------------------------------------------------------

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "call",
    "tool_call": "call",
}


def _is_sender(name: object) -> bool:
    return isinstance(name, str) and name in _ROLES


def _sharegpt(columns: Columns) -> bytes:
    column = columns.column("conversations")
    turns = _read(columns.required("conversations"))
    if not isinstance(turns, list) or not turns:
        raise _wrong(column, f"`{column}` is not an array of turns.")
    messages = _system(columns) + list(_sharegpt_messages(turns, column))
    return _encode({"messages": messages} | _present(columns, "tools"))


def _sharegpt_messages(turns: list[Any], column: str) -> Iterator[_Turn]:
    call_id = ""
    for index, turn in enumerate(turns):
        param = f"{column}[{index}]"
        role, content = _sharegpt_turn(turn, param)
        if role == "call":
            call_id = f"call_{index}"
            yield {"role": "assistant", "tool_calls": [_tool_call(call_id, content, param)]}
        elif role == "tool":
            yield {"role": "tool", "tool_call_id": call_id, "content": content}
        else:
            weight = {"weight": turn["weight"]} if turn.get("weight") is not None else {}
            yield {"role": role, "content": content} | weight


def _sharegpt_turn(turn: object, param: str) -> tuple[str, str]:
    if not isinstance(turn, dict):
        raise _wrong(param, f"`{param}` is not an object.")
    sender, content = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
    role = _ROLES.get(sender) if isinstance(sender, str) else None
    if role is None:
        raise Unconvertible(
            f"`{param}.from` is {str(sender)[:40]!r}, which is not a known role.",
            param=f"{param}.from",
            fix="Use system, human, gpt, function_call or observation.",
            code="invalid_role",
        )
    if not isinstance(content, str):
        raise _wrong(f"{param}.value", f"`{param}.value` is not text.")
    return role, content


def _tool_call(call_id: str, content: str, param: str) -> _Turn:
    """Return a call in OpenAI's form; its arguments stay JSON text."""
    try:
        call = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
        name, arguments = _read(call["name"]), call.get("arguments", call.get("parameters", msgspec.Raw(b"{}")))
    except (msgspec.MsgspecError, KeyError, UnicodeError, RecursionError):
        message = f'`{param}.value` is not a call {{"name": ..., "arguments": {{...}}}}.'
        raise _wrong(f"{param}.value", message) from None
    text = _read(arguments) if bytes(arguments)[:1] == b'"' else bytes(arguments).decode()
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


_CONVERTERS: dict[Format, Callable[[Columns], bytes]] = {
    Format.CHAT: _chat,
    Format.PREFERENCE: _preference,
    Format.PREFERENCE_PAIRS: _pairs,
    Format.PROMPT_COMPLETION: _prompt_completion,
    Format.INSTRUCTION: _instruction,
    Format.SHAREGPT: _sharegpt,
    Format.TEXT: _text,
}
