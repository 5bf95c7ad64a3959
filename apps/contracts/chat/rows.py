"""The three kinds of trainable rows: conversations, preferences between two answers, plain text."""

from enum import StrEnum
from typing import Any

import msgspec


class MessageRole(StrEnum):
    SYSTEM = "system"
    DEVELOPER = "developer"  # rendered as system: templates know only one of the two
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class RowKind(StrEnum):
    """The kind of every row in a file; a file has one kind."""

    CHAT = "chat"
    PREFERENCE = "preference"
    TEXT = "text"


class ToolCall(msgspec.Struct, frozen=True, gc=False):
    """A function call by an assistant. `arguments` is the JSON text of an object, as in OpenAI's API."""

    id: str
    name: str
    arguments: str


class ChatMessage(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    role: MessageRole
    content: str
    weight: int = 1
    name: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""

    @property
    def is_trained(self) -> bool:
        return self.role is MessageRole.ASSISTANT and self.weight == 1


class ChatRow(msgspec.Struct, frozen=True, gc=False):
    messages: tuple[ChatMessage, ...]
    line_number: int = 0
    tools: tuple[dict[str, Any], ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether it has only roles and contents: no tools, calls or names."""
        return not self.tools and not any(m.tool_calls or m.tool_call_id or m.name for m in self.messages)


class PreferenceRow(msgspec.Struct, frozen=True):
    """A prompt with a preferred answer and another one; each is trained against the other."""

    prompt: tuple[ChatMessage, ...]
    preferred: tuple[ChatMessage, ...]
    non_preferred: tuple[ChatMessage, ...]
    line_number: int = 0
    tools: tuple[dict[str, Any], ...] = ()

    @property
    def chosen(self) -> ChatRow:
        """The conversation that ends with the preferred answer; only the answer is trained."""
        return self._with(self.preferred)

    @property
    def rejected(self) -> ChatRow:
        """The conversation that ends with the other answer."""
        return self._with(self.non_preferred)

    def _with(self, answer: tuple[ChatMessage, ...]) -> ChatRow:
        context = tuple(msgspec.structs.replace(m, weight=0) if m.is_trained else m for m in self.prompt)
        return ChatRow(messages=context + answer, line_number=self.line_number, tools=self.tools)


class TextRow(msgspec.Struct, frozen=True, gc=False):
    """Text for continued pre-training: every token is trained."""

    text: str
    line_number: int = 0


Row = ChatRow | PreferenceRow | TextRow
