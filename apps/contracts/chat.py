"""Chat rows: strict parsing, rendering with a chat template, token ids and the mask of trained tokens.

The only code that does this: preview, token counts and training all come here, so what a page shows is what trains.
"""

import datetime
import functools
import hashlib
import json
import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import msgspec
from tokenizers import Encoding, Tokenizer

MAX_LINE_BYTES = 4 * 1024 * 1024
MAX_DEPTH = 32
MAX_MESSAGES = 2_000

# Bumped when the same row could give other tokens or another mask; part of every renderer's fingerprint.
RENDERING_VERSION = 1

# `strftime_now` of some templates must not make the same run differ from day to day: the date that Llama 3's
# template itself falls back to.
TEMPLATE_DATE = datetime.datetime(2024, 7, 26)


class Role(StrEnum):
    SYSTEM = "system"
    DEVELOPER = "developer"  # rendered as system: templates know one of the two
    USER = "user"
    ASSISTANT = "assistant"


class RowErrorCode(StrEnum):
    """Stable words of what can be wrong with one line."""

    LINE_TOO_LONG = "line_too_long"
    NOT_UTF8 = "not_utf8"
    NUL_CHARACTER = "nul_character"
    LONE_SURROGATE = "lone_surrogate"
    INVALID_JSON = "invalid_json"
    INVALID_NUMBER = "invalid_number"
    DUPLICATE_KEY = "duplicate_key"
    TOO_DEEP = "too_deep"
    NOT_AN_OBJECT = "not_an_object"
    UNKNOWN_KEY = "unknown_key"
    MISSING_MESSAGES = "missing_messages"
    INVALID_MESSAGES = "invalid_messages"
    TOO_MANY_MESSAGES = "too_many_messages"
    INVALID_MESSAGE = "invalid_message"
    INVALID_ROLE = "invalid_role"
    INVALID_CONTENT = "invalid_content"
    EMPTY_ASSISTANT_CONTENT = "empty_assistant_content"
    LAST_MESSAGE_NOT_ASSISTANT = "last_message_not_assistant"
    INVALID_WEIGHT = "invalid_weight"
    NO_TRAINED_MESSAGE = "no_trained_message"
    # Found while rendering, so they depend on the base model.
    TEMPLATE_REJECTED = "template_rejected"
    TEMPLATE_NOT_PREFIX_STABLE = "template_not_prefix_stable"
    CONTROL_TOKEN_IN_CONTENT = "control_token_in_content"  # noqa: S105 (not a secret)


class RowError(Exception):
    """One line that cannot be used: where, what (`code`), in words, which field (`param`), and how to fix it."""

    def __init__(self, line: int, code: RowErrorCode, message: str, *, param: str | None = None, fix: str = "") -> None:
        super().__init__(f"line {line}: {message}")
        self.line = line
        self.code = code
        self.message = message
        self.param = param
        self.fix = fix


class TemplateRejectedRow(RowError):
    """The chat template refuses this order of roles, or fails on it."""


class TemplateNotPrefixStable(RowError):
    """The template renders earlier turns differently once later ones follow, so a mask cannot be trusted."""


class InvalidChatTemplate(Exception):
    """The template of the base model does not compile, or the tokenizer cannot be read."""


class ChatMessage(msgspec.Struct, frozen=True):
    role: Role
    content: str
    weight: int = 1

    @property
    def is_trained(self) -> bool:
        return self.role is Role.ASSISTANT and self.weight == 1


class ChatRow(msgspec.Struct, frozen=True):
    messages: tuple[ChatMessage, ...]
    line_number: int = 0


class Line(msgspec.Struct, frozen=True):
    """One non-blank line of a file; `data` is empty when the line was too long to keep."""

    number: int
    data: bytes
    is_too_long: bool = False


class Segment(msgspec.Struct, frozen=True):
    """A stretch of rendered text whose characters are all trained, or all not."""

    text: str
    is_trained: bool


class RenderedRow(msgspec.Struct, frozen=True):
    """What the model sees. `trained_mask[i]` tells whether the loss counts token i."""

    text: str
    segments: tuple[Segment, ...]
    token_ids: tuple[int, ...]
    trained_mask: tuple[bool, ...]
    is_truncated: bool = False

    @property
    def n_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def n_trained(self) -> int:
        return sum(self.trained_mask)

    def truncate(self, max_length: int) -> "RenderedRow":
        """Return the row cut to its first `max_length` tokens; text and segments stay whole."""
        if len(self.token_ids) <= max_length:
            return self
        return RenderedRow(
            text=self.text,
            segments=self.segments,
            token_ids=self.token_ids[:max_length],
            trained_mask=self.trained_mask[:max_length],
            is_truncated=True,
        )


# --- lines and rows -----------------------------------------------------------------------------------------------


def split_lines(chunks: Iterable[bytes], *, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[Line]:
    """Cut a stream into numbered lines, blank ones left out, never holding more than one line and one chunk."""
    number, pending, is_too_long = 1, bytearray(), False
    for chunk in chunks:
        *ended, rest = chunk.split(b"\n")
        for piece in ended:
            line = _join_line(number, pending, piece, is_too_long, max_line_bytes)
            if line is not None:
                yield line
            number, is_too_long = number + 1, False
            pending.clear()
        if len(pending) + len(rest) > max_line_bytes + 1:  # one more for a "\r"
            is_too_long = True
            pending.clear()
        if not is_too_long:
            pending += rest
    line = _join_line(number, pending, b"", is_too_long, max_line_bytes)
    if line is not None:
        yield line


def _join_line(number: int, pending: bytearray, piece: bytes, is_too_long: bool, limit: int) -> Line | None:
    data = (bytes(pending) + piece).rstrip(b"\r")
    if is_too_long or len(data) > limit:
        return Line(number, b"", is_too_long=True)
    return Line(number, data) if data.strip() else None


def parse_line(line: Line) -> ChatRow:
    """Parse one line of `split_lines`; raises RowError."""
    if line.is_too_long:
        _raise_too_long(line.number)
    return parse_row(line.data, line_number=line.number)


def parse_row(line: bytes, *, line_number: int) -> ChatRow:
    """Parse one JSON line into a chat row; raises RowError with a stable code and the way to fix it."""
    if len(line) > MAX_LINE_BYTES:
        _raise_too_long(line_number)
    value = _parse_json(line, line_number)
    if not isinstance(value, dict):
        raise RowError(
            line_number,
            RowErrorCode.NOT_AN_OBJECT,
            f"The line is a JSON {_json_type(value)}, not an object.",
            fix='Write one object per line: {"messages": [...]}; no surrounding array.',
        )
    _reject_unknown_row_keys(value, line_number)
    messages = _parse_messages(value["messages"], line_number)
    _check_conversation(messages, line_number)
    return ChatRow(messages=messages, line_number=line_number)


def _raise_too_long(line_number: int) -> NoReturn:
    raise RowError(
        line_number,
        RowErrorCode.LINE_TOO_LONG,
        f"The line is longer than {MAX_LINE_BYTES // (1024 * 1024)} MiB.",
        fix="Put one conversation on each line, separated by newlines; split very long conversations.",
    )


class _Duplicate(Exception):
    pass


class _BadNumber(Exception):
    pass


def _parse_json(line: bytes, number: int) -> Any:
    if b"\x00" in line:
        raise RowError(
            number,
            RowErrorCode.NUL_CHARACTER,
            "The line holds NUL bytes; the file looks binary or UTF-16.",
            fix="Save the file as UTF-8 text, one JSON object per line.",
        )
    try:
        text = line.removeprefix(b"\xef\xbb\xbf").decode("utf-8")
    except UnicodeDecodeError as error:
        message = f"Byte {error.start + 1} of the line is not UTF-8."
        raise RowError(number, RowErrorCode.NOT_UTF8, message, fix="Save the file as UTF-8 text.") from None
    value = _load_json(text, number)
    may_hide_bad_text = b"\\u" in line
    if may_hide_bad_text or line.count(b"{") + line.count(b"[") > MAX_DEPTH:
        _check_values(value, number)
    return value


def _load_json(text: str, number: int) -> Any:
    try:
        return json.loads(
            text,
            object_pairs_hook=_unique_object,
            parse_constant=_reject_number,
            parse_int=_small_int,
            parse_float=_finite_float,
        )
    except _Duplicate as error:
        message = f"The key {_short(str(error))} appears twice in one object."
        raise RowError(number, RowErrorCode.DUPLICATE_KEY, message, fix="Keep each key once.") from None
    except _BadNumber as error:
        message = f"{_short(str(error))} is not a number JSON allows here."
        fix = "Use finite numbers of ordinary size."
        raise RowError(number, RowErrorCode.INVALID_NUMBER, message, fix=fix) from None
    except RecursionError:
        _raise_too_deep(number)
    except json.JSONDecodeError as error:
        message = f"Not valid JSON at column {error.colno}: {error.msg}."
        fix = "Write each row as one complete JSON object on one line; the line may be cut off."
        raise RowError(number, RowErrorCode.INVALID_JSON, message, fix=fix) from None


def _unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Duplicate(key)
            seen.add(key)
    return value


def _reject_number(text: str) -> NoReturn:
    raise _BadNumber(text)


def _small_int(text: str) -> int:
    if len(text) > 18:
        raise _BadNumber(text)
    return int(text)


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _BadNumber(text)
    return value


def _check_values(value: Any, number: int) -> None:
    """Refuse nesting beyond MAX_DEPTH, and characters only escapes can bring in: NUL and halves of a surrogate pair."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        deeper: list[Any] = []
        for item in level:
            if isinstance(item, str):
                _check_text(item, number)
            elif isinstance(item, dict):
                deeper += item.keys()
                deeper += item.values()
            elif isinstance(item, list):
                deeper += item
        if not deeper:
            return
        level = deeper
    _raise_too_deep(number)


_SURROGATE = re.compile("[\ud800-\udfff]")


def _check_text(text: str, number: int) -> None:
    if "\x00" in text:
        raise RowError(
            number,
            RowErrorCode.NUL_CHARACTER,
            "A string holds the NUL character (\\u0000).",
            fix="Remove \\u0000 from the text.",
        )
    if _SURROGATE.search(text):
        raise RowError(
            number,
            RowErrorCode.LONE_SURROGATE,
            "A string holds half of a surrogate pair (\\ud800–\\udfff), which is not a character.",
            fix="Write the character itself in UTF-8, or both halves of the pair.",
        )


def _raise_too_deep(number: int) -> NoReturn:
    message = f"Values are nested deeper than {MAX_DEPTH} levels."
    raise RowError(number, RowErrorCode.TOO_DEEP, message, fix='A row is {"messages": [...]} with flat messages.')


_TOOL_KEYS = {"tools", "tool_calls", "tool_call_id", "functions", "function_call", "parallel_tool_calls"}


def _reject_unknown_row_keys(row: dict[str, Any], number: int) -> None:
    if "messages" not in row:
        raise RowError(
            number,
            RowErrorCode.MISSING_MESSAGES,
            "The row has no `messages`.",
            param="messages",
            fix=_missing_messages_fix(row),
        )
    for key in row:
        if key != "messages":
            _raise_unknown_key(number, key, _short_key(key), "Only `messages` is read.")


def _missing_messages_fix(row: dict[str, Any]) -> str:
    if {"prompt", "completion"} <= row.keys():
        return (
            "Turn prompt and completion into messages: "
            '{"messages": [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": COMPLETION}]}.'
        )
    return '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'


def _raise_unknown_key(number: int, key: str, param: str, note: str) -> NoReturn:
    is_tool = key in _TOOL_KEYS
    message = (
        f"{_short(key)} is not supported: tool calls cannot be trained yet."
        if is_tool
        else f"Unknown key {_short(key)}."
    )
    raise RowError(number, RowErrorCode.UNKNOWN_KEY, message, param=param, fix=f"Remove {_short(key)}. {note}")


def _parse_messages(value: Any, number: int) -> tuple[ChatMessage, ...]:
    if not isinstance(value, list) or not value:
        message = "`messages` is empty." if value == [] else f"`messages` is a JSON {_json_type(value)}, not an array."
        fix = "Give at least one user and one assistant message."
        raise RowError(number, RowErrorCode.INVALID_MESSAGES, message, param="messages", fix=fix)
    if len(value) > MAX_MESSAGES:
        message = f"The row has {len(value)} messages; {MAX_MESSAGES} are allowed."
        fix = "Split the conversation into several rows."
        raise RowError(number, RowErrorCode.TOO_MANY_MESSAGES, message, param="messages", fix=fix)
    return tuple(_parse_message(item, index, number) for index, item in enumerate(value))


_MESSAGE_KEYS = {"role", "content", "weight"}


def _parse_message(value: Any, index: int, number: int) -> ChatMessage:
    param = f"messages[{index}]"
    if not isinstance(value, dict):
        raise RowError(
            number,
            RowErrorCode.INVALID_MESSAGE,
            f"`{param}` is a JSON {_json_type(value)}, not an object.",
            param=param,
            fix='Write {"role": "user", "content": "..."}.',
        )
    role = _parse_role(value.get("role"), param, number)
    unknown = value.keys() - _MESSAGE_KEYS
    if unknown:
        key = min(unknown)
        _raise_unknown_key(number, key, f"{param}.{_short_key(key)}", "A message has role, content and weight.")
    content = _parse_content(value, role, param, number)
    return ChatMessage(role=role, content=content, weight=_parse_weight(value, role, param, number))


_ROLES = {role.value: role for role in Role}


def _parse_role(value: Any, param: str, number: int) -> Role:
    role = _ROLES.get(value) if isinstance(value, str) else None
    if role is None:
        what = "has no role" if value is None else f"has the role {_short(str(value))}"
        hint = " Tool and function messages cannot be trained yet." if value in ("tool", "function") else ""
        raise RowError(
            number,
            RowErrorCode.INVALID_ROLE,
            f"`{param}` {what}.",
            param=f"{param}.role",
            fix=f"Use system, developer, user or assistant.{hint}",
        )
    return role


def _parse_content(message: dict[str, Any], role: Role, param: str, number: int) -> str:
    content = message.get("content")
    field = f"{param}.content"
    if not isinstance(content, str):
        what = "is missing" if "content" not in message else f"is a JSON {_json_type(content)}, not a string"
        fix = "Give the text of the message as one string; images and content parts are not supported."
        raise RowError(number, RowErrorCode.INVALID_CONTENT, f"`{field}` {what}.", param=field, fix=fix)
    if role is Role.ASSISTANT and not content.strip():
        raise RowError(
            number,
            RowErrorCode.EMPTY_ASSISTANT_CONTENT,
            f"`{field}` is empty: there is nothing to learn from this answer.",
            param=field,
            fix="Write the answer the model should give, or remove the row.",
        )
    return content


def _parse_weight(message: dict[str, Any], role: Role, param: str, number: int) -> int:
    if "weight" not in message:
        return 1
    weight = message["weight"]
    if role is not Role.ASSISTANT:
        what, fix = f"`weight` stands on a {role.value} message.", "Only assistant messages may have a weight."
    elif type(weight) is not int or weight not in (0, 1):
        what, fix = f"`{param}.weight` is {_short(json.dumps(weight))}.", "Use 1 (trained) or 0 (context only)."
    else:
        return weight
    raise RowError(number, RowErrorCode.INVALID_WEIGHT, what, param=f"{param}.weight", fix=fix)


def _check_conversation(messages: tuple[ChatMessage, ...], number: int) -> None:
    last = messages[-1]
    if last.role is not Role.ASSISTANT:
        raise RowError(
            number,
            RowErrorCode.LAST_MESSAGE_NOT_ASSISTANT,
            f"The last message is from {last.role.value}, so nothing after it can be learned.",
            param=f"messages[{len(messages) - 1}].role",
            fix="End the conversation with the assistant's answer.",
        )
    if not any(message.is_trained for message in messages):
        raise RowError(
            number,
            RowErrorCode.NO_TRAINED_MESSAGE,
            "Every assistant message has weight 0.",
            param="messages",
            fix="Give at least one assistant message weight 1, or remove the row.",
        )


def _json_type(value: Any) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")


def _short(text: str) -> str:
    return f"`{text if len(text) <= 40 else text[:39] + '…'}`"


def _short_key(key: str) -> str:
    return key[:40]


# --- rendering ----------------------------------------------------------------------------------------------------


class ChatRenderer:
    """A chat template with its tokenizer: rows in; text, token ids and trained mask out. Deterministic.

    `tokenizer_json` is the content of the file (str or bytes) or its Path. The ids are those of
    `apply_chat_template(..., tokenize=True)`, hence of serving.
    """

    def __init__(
        self,
        chat_template: str,
        tokenizer_json: str | bytes | Path,
        *,
        bos_token: str = "",
        eos_token: str = "",
        pad_token: str = "",
        unk_token: str = "",
    ) -> None:
        content = _read_tokenizer(tokenizer_json)
        self._tokenizer = _load_tokenizer(content)
        self._template = _compile_template(chat_template)
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token, "pad_token": pad_token, "unk_token": unk_token}
        self._tokens = {name: token for name, token in self._tokens.items() if token}
        self._control = _control_token_pattern(self._tokenizer)
        self.chat_template = chat_template
        self.fingerprint = _fingerprint(chat_template, content, self._tokens)

    @classmethod
    def from_folder(cls, folder: Path, *, chat_template: str = "") -> "ChatRenderer":
        """Read tokenizer, special tokens and (unless given) template as `from_pretrained` does from the same folder."""
        config = _read_json(folder / "tokenizer_config.json")
        config = _read_json(folder / "special_tokens_map.json") | config
        template = chat_template or read_chat_template(folder)
        tokens = {name: _token_text(config.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        return cls(template, folder / "tokenizer.json", **tokens)

    @property
    def special_tokens(self) -> dict[str, str]:
        """The tokens the template may name; give them back to build the same renderer without the folder."""
        return dict(self._tokens)

    @property
    def vocabulary_size(self) -> int:
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def render(self, row: ChatRow) -> RenderedRow:
        """Render one row; raises TemplateRejectedRow, TemplateNotPrefixStable or RowError."""
        text, spans = self._render_spans(row)
        return _rendered(text, spans, self._tokenizer.encode(text, add_special_tokens=False))

    def render_many(self, rows: Iterable[ChatRow], *, batch_size: int = 256) -> Iterator[RenderedRow]:
        """Render rows in order, tokenising a batch at a time; the same result as `render` for each."""
        batch: list[tuple[str, list[tuple[int, int]]]] = []
        for row in rows:
            batch.append(self._render_spans(row))
            if len(batch) == batch_size:
                yield from self._encode_batch(batch)
                batch = []
        yield from self._encode_batch(batch)

    def render_prompt(self, messages: Iterable[ChatMessage]) -> str:
        """Return the text an inference request of these messages starts from."""
        return self._render_text(_as_dicts(messages), 0, add_generation_prompt=True)

    def token_spans(self, text: str) -> list[tuple[int, int]]:
        """Return where each token of a rendered text stands in it."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).offsets)

    def control_spans(self, text: str) -> list[tuple[int, int]]:
        """Return where a rendered text holds control tokens such as the end of a turn."""
        return [found.span() for found in self._control.finditer(text)]

    def count_prompt_tokens(self, messages: Iterable[ChatMessage]) -> int:
        return len(self._tokenizer.encode(self.render_prompt(messages), add_special_tokens=False).ids)

    def _encode_batch(self, batch: list[tuple[str, list[tuple[int, int]]]]) -> Iterator[RenderedRow]:
        encodings = self._tokenizer.encode_batch([text for text, _ in batch], add_special_tokens=False)
        for (text, spans), encoding in zip(batch, encodings, strict=True):
            yield _rendered(text, spans, encoding)

    def _render_spans(self, row: ChatRow) -> tuple[str, list[tuple[int, int]]]:
        """Return the whole text and the character spans of it that are trained."""
        self._reject_control_tokens(row)
        messages = _as_dicts(row.messages)
        text = self._render_text(messages, row.line_number)
        spans = []
        for index, message in enumerate(row.messages):
            if message.is_trained:
                spans.append(self._find_answer(text, messages, index, row.line_number))
        return text, spans

    def _find_answer(self, text: str, messages: list[dict[str, str]], index: int, line: int) -> tuple[int, int]:
        """Locate the answer with its end-of-turn token: what the model must write after the generation prompt."""
        before = self._render_text(messages[:index], line, add_generation_prompt=True)
        is_last = index == len(messages) - 1
        through = text if is_last else self._render_text(messages[: index + 1], line)
        if not through.startswith(before) or not text.startswith(through):
            raise TemplateNotPrefixStable(
                line,
                RowErrorCode.TEMPLATE_NOT_PREFIX_STABLE,
                "The base model's chat template renders this conversation differently turn by turn, "
                "so the trained part cannot be told apart.",
                param=f"messages[{index}]",
                fix="Split the conversation so that only its last message is trained, or use another base model.",
            )
        return len(before), self._end_of_turn(through, len(before), messages[index]["content"])

    def _end_of_turn(self, text: str, start: int, content: str) -> int:
        content = content.strip()
        found = text.find(content, start)
        written = start if found < 0 else found + len(content)
        token = self._control.search(text, written)
        return token.end() if token else start + len(text[start:].rstrip())

    def _reject_control_tokens(self, row: ChatRow) -> None:
        """Text that spells a control token would be read as one, here and in serving: it could end a turn early."""
        for index, message in enumerate(row.messages):
            found = self._control.search(message.content)
            if found:
                raise RowError(
                    row.line_number,
                    RowErrorCode.CONTROL_TOKEN_IN_CONTENT,
                    f"The text holds {_short(found.group())}, a control token of this base model.",
                    param=f"messages[{index}].content",
                    fix="Remove or rewrite it.",
                )

    def _render_text(self, messages: list[dict[str, str]], line: int, *, add_generation_prompt: bool = False) -> str:
        try:
            return self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._tokens,
            )
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise TemplateRejectedRow(
                line,
                RowErrorCode.TEMPLATE_REJECTED,
                f"The base model's chat template refuses this conversation: {_one_line(error)}",
                param="messages",
                fix="Most templates want an optional system message, then user and assistant in turn.",
            ) from error


def read_chat_template(folder: Path) -> str:
    """Return the default chat template of a model folder, "" when it has none."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = _read_json(folder / "tokenizer_config.json").get("chat_template") or ""
    if isinstance(template, list):
        return next((item["template"] for item in template if item.get("name") == "default"), "")
    return template


def chat_template_sha256(chat_template: str) -> str:
    return hashlib.sha256(chat_template.encode()).hexdigest()


def _rendered(text: str, spans: list[tuple[int, int]], encoding: Encoding) -> RenderedRow:
    return RenderedRow(
        text=text,
        segments=_segments(text, spans),
        token_ids=tuple(encoding.ids),
        trained_mask=_mask(encoding.offsets, spans),
    )


def _mask(offsets: list[tuple[int, int]], spans: list[tuple[int, int]]) -> tuple[bool, ...]:
    """A token is trained when any of its characters is."""
    starts = [start for start, _ in spans]
    mask = []
    for start, end in offsets:
        at = bisect_right(starts, end - 1) - 1  # the last span that begins before the token ends
        mask.append(at >= 0 and end > start and start < spans[at][1])
    return tuple(mask)


def _segments(text: str, spans: list[tuple[int, int]]) -> tuple[Segment, ...]:
    parts, position = [], 0
    for start, end in spans:
        parts += [Segment(text[position:start], False), Segment(text[start:end], True)]
        position = end
    parts.append(Segment(text[position:], False))
    return tuple(part for part in parts if part.text)


def _as_dicts(messages: Iterable[ChatMessage]) -> list[dict[str, str]]:
    return [{"role": "system" if m.role is Role.DEVELOPER else m.role.value, "content": m.content} for m in messages]


def _control_token_pattern(tokenizer: Tokenizer) -> re.Pattern[str]:
    special = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
    longest_first = sorted((token for token in special if token), key=len, reverse=True)
    return re.compile("|".join(re.escape(token) for token in longest_first) or r"(?!)")


def _read_tokenizer(tokenizer_json: str | bytes | Path) -> bytes:
    if isinstance(tokenizer_json, Path):
        try:
            return tokenizer_json.read_bytes()
        except OSError as error:
            raise InvalidChatTemplate(f"The tokenizer cannot be read: {error.strerror}.") from error
    return tokenizer_json.encode() if isinstance(tokenizer_json, str) else tokenizer_json


def _load_tokenizer(content: bytes) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except ValueError as error:
        raise InvalidChatTemplate(f"The tokenizer is not a tokenizers file: {_one_line(error)}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _fingerprint(chat_template: str, tokenizer: bytes, tokens: dict[str, str]) -> str:
    digest = hashlib.sha256(f"{RENDERING_VERSION}\0{chat_template}\0{json.dumps(tokens, sort_keys=True)}\0".encode())
    digest.update(tokenizer)
    return digest.hexdigest()


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _token_text(value: Any) -> str:
    return value.get("content", "") if isinstance(value, dict) else value or ""


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


# --- template environment: what transformers and vLLM offer to a template, in the immutable sandbox -----------------


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the answer in some templates; here it renders its body."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


@functools.lru_cache(maxsize=32)
def _compile_template(chat_template: str) -> jinja2.Template:
    if not chat_template:
        raise InvalidChatTemplate("The base model has no chat template.")
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = TEMPLATE_DATE.strftime
    try:
        return environment.from_string(chat_template)
    except jinja2.TemplateError as error:
        raise InvalidChatTemplate(f"The chat template does not compile: {_one_line(error)}") from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
