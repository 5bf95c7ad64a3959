"""Conversion of rows to text with trained characters: by layout where there is one, else by the template."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from tokenizers import Tokenizer

from apps.contracts.chat.encoding import EdgePlan, Planner
from apps.contracts.chat.errors import RowError, RowErrorCode, TemplateNotPrefixStable, TemplateRejectedRow, short
from apps.contracts.chat.rendered import Span, TrainOn
from apps.contracts.chat.rows import ChatMessage, ChatRow, MessageRole, TextRow
from apps.contracts.chat.tokenizer_files import InvalidChatTemplate, marked_twin
from apps.contracts.templating.environment import MARKS
from apps.contracts.templating.layout import Layout
from apps.contracts.templating.process import TemplateInvalid, TemplateKilled, TemplateProcess
from apps.contracts.templating.spans import control_pattern

_LAYOUT_MESSAGES = 64  # longer conversations are few, and each length would need a separate layout
_LAYOUTS_KEPT = 2_000
Key = tuple[tuple[MessageRole, ...], tuple[int, ...]]


class Text(msgspec.Struct, gc=False):
    """A row before tokenization, or its error. Plain text gets the tokenizer's own first and last tokens."""

    text: str = ""
    spans: Sequence[Span] = ()
    plan: EdgePlan | None = None
    error: RowError | None = None
    is_plain: bool = False


class _Known(msgspec.Struct, frozen=True):
    layout: Layout
    plan: EdgePlan | None


class TextMaker:
    """One chat template, run in the limited process."""

    def __init__(
        self, chat_template: str, tokenizer: Tokenizer, tokens: dict[str, str], process: TemplateProcess, key: str
    ) -> None:
        if not chat_template:
            raise InvalidChatTemplate("The base model has no chat template.")
        added = tokenizer.get_added_tokens_decoder().values()
        control = sorted({token.content for token in added if token.special and token.content})
        self.control = control_pattern(control)
        self._first_characters = {token[0] for token in control}
        self._planner = Planner(tokenizer, self.control)
        self._eos = tokens.get("eos_token", "")
        self._process, self._key = process, key
        self._source = (chat_template, marked_twin(chat_template), tokens, control)
        self._layouts: dict[Key, _Known | None] = {}
        try:
            self._ask("load")
        except TemplateInvalid as error:
            raise InvalidChatTemplate(f"The chat template does not compile: {error}") from error
        except TemplateKilled as error:
            raise InvalidChatTemplate(f"The chat template does not compile: {error}.") from error

    def make(self, rows: Sequence[ChatRow | TextRow], train_on: TrainOn, *, by_layout: bool = True) -> list[Text]:
        """Return the text of each row; rows without a layout go to the process together."""
        made = [self._quick(row, train_on, by_layout) for row in rows]
        waiting = [at for at, text in enumerate(made) if text is None]
        if waiting:
            for at, text in zip(waiting, self._render([rows[at] for at in waiting], train_on), strict=True):
                made[at] = text
        return [text for text in made if text is not None]

    def render_prompt(self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, object]] = ()) -> str:
        """Return the text at which an inference request with these messages starts."""
        try:
            reply = self._ask("prompt", _as_dicts(messages), list(tools) or None)
        except TemplateKilled as error:
            raise _refused(0, str(error)) from error
        if isinstance(reply, dict):
            raise _refused(0, reply["rejected"])
        return reply

    # --- by layout ------------------------------------------------------------------------------------------------

    def _quick(self, row: ChatRow | TextRow, train_on: TrainOn, by_layout: bool) -> Text | None:
        error = self._find_control_token(row)
        if error is not None:
            return Text(error=error)
        if isinstance(row, TextRow):
            text = row.text if self._eos and row.text.endswith(self._eos) else row.text + self._eos
            return Text(text, [(0, len(text))], is_plain=True)
        if not by_layout or train_on is TrainOn.COMPLETION or len(row.messages) > _LAYOUT_MESSAGES or not row.is_plain:
            return None
        known = self._layout_of(row)
        return None if known is None else _laid_out(known, [message.content for message in row.messages])

    def _layout_of(self, row: ChatRow) -> _Known | None:
        roles = tuple([message.role for message in row.messages])
        trained = tuple(
            [at for at, role in enumerate(roles) if role is MessageRole.ASSISTANT and row.messages[at].weight]
        )
        key = (roles, trained)
        if key not in self._layouts:
            if len(self._layouts) >= _LAYOUTS_KEPT:
                return None
            self._layouts[key] = self._find_layout(key)
        return self._layouts[key]

    def _find_layout(self, key: Key) -> _Known | None:
        roles, trained = key
        try:
            reply = self._ask("layout", [_template_role(role) for role in roles], trained)
        except TemplateKilled:
            return None
        if reply is None:
            return None
        layout = msgspec.convert(reply, Layout)
        return _Known(layout, self._planner.plan(layout))

    # --- by the template ------------------------------------------------------------------------------------------

    def _render(self, rows: Sequence[Any], train_on: TrainOn) -> list[Text]:
        requests = [_request(row, train_on) for row in rows]
        try:
            replies = self._ask("render", requests)
        except TemplateKilled as error:
            if len(rows) == 1:
                return [Text(error=_refused(rows[0].line_number, str(error)))]
            middle = len(rows) // 2  # split until the row that kills the process is alone
            return self._render(rows[:middle], train_on) + self._render(rows[middle:], train_on)
        return [_text_of(row, reply) for row, reply in zip(rows, replies, strict=True)]

    def _ask(self, do: str, *arguments: object) -> Any:
        return self._process.ask(self._key, self._source, do, *arguments)

    # --- control tokens -------------------------------------------------------------------------------------------

    def _find_control_token(self, row: ChatRow | TextRow) -> RowError | None:
        """Return the error of a text that spells a control token.

        Training and serving would read it as that token, so it could end a turn early.
        """
        if isinstance(row, TextRow):
            return self._judge(row.text.removesuffix(self._eos), "text", row.line_number)
        for index, message in enumerate(row.messages):
            found = self._judge(message.content, f"messages[{index}].content", row.line_number)
            for call in message.tool_calls:
                called = f"{call.name}\n{_with_unescaped(call.arguments)}"
                found = found or self._judge(called, f"messages[{index}].tool_calls", row.line_number)
            if found:
                return found
        tools = _with_unescaped(json.dumps(row.tools, ensure_ascii=False))
        return self._judge(tools, "tools", row.line_number) if row.tools else None

    def _judge(self, text: str, param: str, line: int) -> RowError | None:
        if text.isascii():
            for character in self._first_characters:
                if character in text:
                    break
            else:
                return None
        found = self.control.search(text)
        spelled = found.group() if found else next((mark for mark in MARKS if mark in text), None)
        if spelled is None:
            return None
        message = f"The text holds {short(spelled)}, a control token of this base model."
        if not found:
            message = f"The text holds `U+{ord(spelled):04X}`, a Unicode noncharacter."
        code = RowErrorCode.CONTROL_TOKEN_IN_CONTENT
        return RowError(line, code, message, param=param, fix="Remove or rewrite it.")


def _laid_out(known: _Known, contents: list[str]) -> Text | None:
    layout = known.layout
    for guard in layout.guards:
        if not guard.holds(contents):
            return None
    parts: list[str] = []
    starts: list[int] = []
    position = 0
    for literal, text in zip(layout.literals, layout.texts, strict=False):
        value = contents[text.message] if not text.strips else text.of(contents)
        starts.append(position)
        parts += (literal, value)
        position += len(literal) + len(value)
    starts.append(position)
    parts.append(layout.literals[-1])
    spans = [(starts[a] + start, starts[b] + end) for (a, start), (b, end) in layout.spans]
    return Text("".join(parts), spans, known.plan)


def _request(row: ChatRow, train_on: TrainOn) -> dict[str, object]:
    trained = [at for at, message in enumerate(row.messages) if message.is_trained]
    return {
        "messages": _as_dicts(row.messages),
        "tools": list(row.tools) or None,
        "trained": trained if train_on is not TrainOn.COMPLETION else None,
    }


def _text_of(row: ChatRow, reply: Any) -> Text:
    if not isinstance(reply, dict):
        text, spans = reply
        return Text(text, [(start, end) for start, end in spans])
    if "rejected" in reply:
        return Text(error=_refused(row.line_number, reply["rejected"]))
    return Text(
        error=TemplateNotPrefixStable(
            row.line_number,
            RowErrorCode.TEMPLATE_NOT_PREFIX_STABLE,
            "The base model's chat template renders this conversation differently turn by turn, so its trained part "
            "cannot be found.",
            param=f"messages[{reply['unstable']}]",
            fix="Split the conversation so that only its last message is trained, or use another base model.",
        )
    )


def _refused(line: int, why: str) -> TemplateRejectedRow:
    why = why.rstrip()
    if not why.endswith((".", "!", "?")):
        why += "."
    return TemplateRejectedRow(
        line,
        RowErrorCode.TEMPLATE_REJECTED,
        f"The base model's chat template refuses this conversation: {why}",
        param="messages",
        fix="Most templates expect an optional system message, then user and assistant messages in turn.",
    )


def _template_role(role: str) -> str:
    return "system" if role == MessageRole.DEVELOPER else role


def _with_unescaped(text: str) -> str:
    """Return JSON text, followed by its strings as a template gets them if an escape could hide a control token."""
    return "\n".join((text, *_strings(json.loads(text)))) if "\\" in text else text


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        for each in value.values():
            yield from _strings(each)
    elif isinstance(value, list):
        for each in value:
            yield from _strings(each)


def _as_dicts(messages: Sequence[ChatMessage]) -> list[dict[str, object]]:
    return [_as_dict(message) for message in messages]


def _as_dict(message: ChatMessage) -> dict[str, object]:
    """Return the message as serving passes it to the template: arguments of calls as objects, not as text."""
    found: dict[str, object] = {"role": _template_role(message.role.value), "content": message.content}
    if message.name:
        found["name"] = message.name
    if message.tool_call_id:
        found["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        found["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": json.loads(c.arguments)}}
            for c in message.tool_calls
        ]
    return found
