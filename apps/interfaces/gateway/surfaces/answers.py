"""The answers of chat and completions, in the form that customers get.

A customer who did not ask for a stream gets the chunks assembled into one answer.
"""

from typing import Any, NotRequired, TypedDict

import msgspec
from msgspec import UNSET, UnsetType

from apps.interfaces.gateway.engines.chunks import Delta, EngineChoice, EngineChunk, ToolCallPart
from apps.interfaces.gateway.engines.meter import Meter, Usage


class _ChatChunkChoice(msgspec.Struct, gc=False):
    index: int
    delta: Delta
    logprobs: dict[str, Any] | None
    finish_reason: str | None


class CompletionChoice(msgspec.Struct, gc=False):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str | None


class _Answer(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[Any]
    usage: Usage | UnsetType | None = UNSET


class CalledFunctionObject(TypedDict):
    name: str
    arguments: str


class ToolCallObject(TypedDict):
    id: str | None
    type: str
    function: CalledFunctionObject


class ChatMessageObject(TypedDict):
    role: str
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[ToolCallObject]]
    reasoning: NotRequired[str]


class ChatChoice(TypedDict):
    index: int
    message: ChatMessageObject
    logprobs: dict[str, list[Any]] | None
    finish_reason: str | None


class ChatAnswer(_Answer):
    """OpenAI's chat completion."""

    choices: list[ChatChoice]


class CompletionAnswer(_Answer):
    """OpenAI's completion."""

    choices: list[CompletionChoice]


_encoder = msgspec.json.Encoder()


class Renderer(msgspec.Struct, frozen=True):
    """Writes the answers of one request under its public names; never shows the engine's ids, names or extra fields."""

    id: str
    created: int
    model_name: str
    is_chat: bool
    wants_usage: bool

    def event(self, chunk: EngineChunk) -> bytes:
        """Return the chunk as a server-sent event, without the usage that only the gateway asked for."""
        choices = [
            _ChatChunkChoice(each.index, each.delta or Delta(), each.logprobs, each.finish_reason)
            if self.is_chat
            else CompletionChoice(each.index, each.text, each.logprobs, each.finish_reason)
            for each in chunk.choices
        ]
        return self._event(choices, None if self.wants_usage else UNSET)

    def opening(self) -> bytes:
        """Return the bytes before the first chunk of a stream."""
        return b""

    def closing(self, meter: Meter) -> bytes:
        """Return the bytes that end a complete stream."""
        usage = self._event([], meter.usage()) if self.wants_usage else b""
        return usage + b"data: [DONE]\n\n"

    def _event(self, choices: list[Any], usage: Usage | UnsetType | None) -> bytes:
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        answer = _Answer(self.id, kind, self.created, self.model_name, choices, usage)
        return b"data: " + _encoder.encode(answer) + b"\n\n"

    def whole(self, assembler: "Assembler", meter: Meter) -> bytes:
        """Return the whole answer to a request that did not ask for a stream."""
        kind = "chat.completion" if self.is_chat else "text_completion"
        choices = [part.chat() if self.is_chat else part.completion() for part in assembler.parts()]
        return _encoder.encode(_Answer(self.id, kind, self.created, self.model_name, choices, meter.usage()))


class _Part(msgspec.Struct):
    """One choice, assembled from its chunks."""

    index: int
    texts: list[str] = []
    reasoning: list[str] = []
    calls: dict[int, ToolCallObject] = {}
    logprobs: dict[str, list[Any]] | None = None
    finish_reason: str | None = None

    def add_rest(self, choice: EngineChoice) -> None:
        """Add all but the text; few chunks have these fields."""
        if choice.delta is not None:
            if choice.delta.reasoning:
                self.reasoning.append(choice.delta.reasoning)
            for part in choice.delta.tool_calls or ():
                self._add_call(part)
        if choice.finish_reason:
            self.finish_reason = choice.finish_reason
        if choice.logprobs:
            for name, values in choice.logprobs.items():
                if values is not None:
                    self.logprobs = self.logprobs or {}
                    # Copies, because each holds the whole event otherwise.
                    self.logprobs.setdefault(name, []).extend(map(msgspec.Raw.copy, values))

    def _add_call(self, part: ToolCallPart) -> None:
        call = self.calls.setdefault(
            part.index, {"id": None, "type": "function", "function": {"name": "", "arguments": ""}}
        )
        call["id"] = part.id or call["id"]
        if part.function is not None:
            call["function"]["name"] += part.function.name or ""
            call["function"]["arguments"] += part.function.arguments or ""

    def chat(self) -> ChatChoice:
        message: ChatMessageObject = {"role": "assistant", "content": "".join(self.texts), "refusal": None}
        if self.calls:
            message["tool_calls"] = [self.calls[index] for index in sorted(self.calls)]
            message["content"] = message["content"] or None
        if self.reasoning:
            message["reasoning"] = "".join(self.reasoning)
        return {
            "index": self.index,
            "message": message,
            "logprobs": self.logprobs,
            "finish_reason": self.finish_reason,
        }

    def completion(self) -> CompletionChoice:
        return CompletionChoice(self.index, "".join(self.texts), self.logprobs, self.finish_reason)


class Assembler:
    """Assembles the chunks of an answer."""

    def __init__(self) -> None:
        self._parts: dict[int, _Part] = {}

    def add(self, *chunks: EngineChunk) -> None:
        parts = self._parts
        for chunk in chunks:
            for choice in chunk.choices:
                part = parts.get(choice.index)
                if part is None:
                    part = parts[choice.index] = _Part(choice.index)
                delta = choice.delta
                if delta is not None and delta.content:
                    part.texts.append(delta.content)
                if choice.text:
                    part.texts.append(choice.text)
                if choice.finish_reason or choice.logprobs or (delta and (delta.reasoning or delta.tool_calls)):
                    part.add_rest(choice)

    def parts(self) -> list[_Part]:
        return [self._parts[index] for index in sorted(self._parts)]
