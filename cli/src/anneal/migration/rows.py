"""Rows of other services in Anneal's form: `functions` become `tools`, and reinforcement rows supervised ones."""

import codecs
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anneal.output import counted

# Keys under which reinforcement rows usually keep their ideal answer.
ANSWER_KEYS = ("reference_answer", "ideal", "answer", "correct_answer", "expected", "target", "solution", "completion")
PAIR = ("chosen", "rejected")
_LEGACY_CALL = "function_call"
_CHAT_KEYS = frozenset({"messages", "tools", "parallel_tool_calls", "functions", _LEGACY_CALL})

Row = dict[str, Any]


class Unconvertible(Exception):
    """A row has no form here. The text says why."""


@dataclass
class Conversion:
    """What came of a file: rows that were written, how many of them are new, and the lines that were left out."""

    rows: int = 0
    functions: int = 0
    answers: int = 0
    problems: list[tuple[int, str]] = field(default_factory=list)

    @property
    def is_changed(self) -> bool:
        return bool(self.functions or self.answers or self.problems)


def convert_file(
    source: Path, target: Path, *, answer_key: str | None = None, pair: tuple[str, str] = PAIR
) -> Conversion:
    """Write the converted rows of a JSONL file. `pair` names the columns of rows with a better and a worse answer.

    A line that is no JSON object is copied: the check names it.
    """
    found = Conversion()
    part = target.with_name(f"{target.name}.part")
    with source.open("rb") as lines, part.open("w", encoding="utf-8") as file:
        for number, line in enumerate(lines, 1):
            try:
                if text := line.removeprefix(codecs.BOM_UTF8).decode().strip():
                    file.write(_converted(text, found, answer_key, pair) + "\n")
                    found.rows += 1
            except UnicodeDecodeError:
                found.problems.append((number, "The line is not UTF-8 text."))
            except Unconvertible as reason:
                found.problems.append((number, str(reason)))
    part.replace(target)
    return found


def conversion_text(done: Conversion) -> str:
    """Return what became of a file's rows, in one sentence."""
    left_out = len(done.problems)
    parts = [f"{counted(done.rows, 'row')} {'is' if done.rows == 1 else 'are'} kept"]
    parts += [f"{done.functions:,} had functions, which are tools now"] if done.functions else []
    parts += [f"{done.answers:,} got the ideal answer as the last message"] if done.answers else []
    parts += [f"{left_out:,} {'is' if left_out == 1 else 'are'} left out"] if left_out else []
    return f"{', '.join(parts)}."


def _converted(text: str, found: Conversion, answer_key: str | None, pair: tuple[str, str]) -> str:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(row, dict) or not isinstance(row.get("messages"), list):
        return text
    is_legacy = has_functions(row)
    if is_legacy:
        row = tools_of(row)
    last = row["messages"][-1] if row["messages"] else None
    is_open = isinstance(last, dict) and last.get("role") in ("user", "system", "developer", "tool")
    is_unanswered = is_open and any(row.get(name) is None for name in pair)
    if is_unanswered:
        row = answered(row, answer_key=answer_key)
    if not (is_legacy or is_unanswered):
        return text
    try:
        made = json.dumps(row, ensure_ascii=False)
        made.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise Unconvertible(f"{half} is half of a character, which no text can hold.") from error
    found.functions += is_legacy
    found.answers += is_unanswered
    return made


# --- functions --------------------------------------------------------------------------------------------------------


def has_functions(row: Row) -> bool:
    """Return whether the row has OpenAI's old form of tools."""
    return any(key in row for key in ("functions", _LEGACY_CALL)) or any(
        isinstance(each, dict) and (_LEGACY_CALL in each or each.get("role") == "function") for each in row["messages"]
    )


def tools_of(row: Row) -> Row:
    """Return the row with tools and tool calls. Raises Unconvertible."""
    functions = row.get("functions") or []
    if not isinstance(functions, list) or not all(isinstance(each, dict) for each in functions):
        raise Unconvertible("`functions` is not an array of objects.")
    tools = [*(row.get("tools") or []), *({"type": "function", "function": each} for each in functions)]
    kept = {key: value for key, value in row.items() if key not in ("functions", _LEGACY_CALL)}
    return kept | {"messages": list(_messages(row["messages"]))} | ({"tools": tools} if tools else {})


def _messages(messages: list[Any]) -> Iterator[Any]:
    waiting: list[tuple[str, str]] = []  # the name and the id of calls without a result
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            yield message
        elif message.get("role") == "function":
            name = message.get("name")
            call_id = next((call for called, call in waiting if called == name), None)
            if call_id is None:
                raise Unconvertible(f"`messages[{number}]` is a result of {str(name)[:40]!r}, which was not called.")
            waiting = [each for each in waiting if each[1] != call_id]
            yield {"role": "tool", "tool_call_id": call_id, "content": message.get("content")}
        elif (call := message.get(_LEGACY_CALL)) is not None:
            name = call.get("name") if isinstance(call, dict) else None
            if not isinstance(name, str):
                raise Unconvertible(f"`messages[{number}].function_call` has no name.")
            call_id = f"call_{number}"
            waiting.append((name, call_id))
            kept = {key: value for key, value in message.items() if key != _LEGACY_CALL and value is not None}
            function = {"name": name, "arguments": call.get("arguments", "{}")}
            yield kept | {"tool_calls": [{"id": call_id, "type": "function", "function": function}]}
        else:
            yield {key: value for key, value in message.items() if key != _LEGACY_CALL}


# --- reinforcement ----------------------------------------------------------------------------------------------------


def answered(row: Row, *, answer_key: str | None = None) -> Row:
    """Return the row with its ideal answer as the last message. Raises Unconvertible if there is none."""
    keys = (answer_key,) if answer_key else ANSWER_KEYS
    key = next((each for each in keys if row.get(each) not in (None, "", [], {})), None)
    if key is None:
        others = ", ".join(sorted(set(row) - _CHAT_KEYS)) or "none"
        looked = f"no `{answer_key}`" if answer_key else "no ideal answer"
        raise Unconvertible(f"The row has {looked}, only a grader could judge it. Its own keys: {others[:200]}.")
    value = row[key]
    content = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    kept = {name: each for name, each in row.items() if name in _CHAT_KEYS}
    return kept | {"messages": [*row["messages"], {"role": "assistant", "content": content}]}
