"""The engine's stream of server-sent events: what it says, what it used, and what of it a customer gets to see.

The engine is always asked for a stream with usage in each chunk, so that an answer cut short is metered too; a customer
who did not ask for a stream gets its chunks put together again.
"""

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

DONE = b"[DONE]"
LARGEST_EVENT_BYTES = 4 * 1024 * 1024
# How a complete answer may end. The engine's "abort" and "error" are failures that look like answers.
GOOD_ENDS = frozenset({"stop", "length", "content_filter", "tool_calls"})


# --- What the engine sends --------------------------------------------------------------------------------------------


class _CachedTokens(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class EngineUsage(msgspec.Struct, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _CachedTokens | None = None


class CalledPart(msgspec.Struct, omit_defaults=True, gc=False):
    name: str | None = None
    arguments: str | None = None


class ToolCallPart(msgspec.Struct, omit_defaults=True, gc=False):
    """A part of one call; the parts of a call share its index."""

    index: int
    id: str | None = None
    type: str | None = None
    function: CalledPart | None = None


class Delta(msgspec.Struct, omit_defaults=True, gc=False):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallPart] | None = None


class EngineChoice(msgspec.Struct, gc=False):
    """A choice of either surface: chat sends `delta`, completions `text`."""

    index: int
    delta: Delta | None = None
    text: str = ""
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None

    @property
    def has_content(self) -> bool:
        delta = self.delta
        return bool(self.text or (delta and (delta.content or delta.reasoning or delta.tool_calls)))


class EngineFault(msgspec.Struct, gc=False):
    """The engine's own error object, in a body or in a stream. `code` is an HTTP status, or a word of the proxy's."""

    message: str = ""
    param: str | None = None
    code: int | str | None = None


class EngineChunk(msgspec.Struct, gc=False):
    choices: list[EngineChoice] = []
    usage: EngineUsage | None = None
    error: EngineFault | None = None


class SseParser:
    """Splits the bytes of a stream into the payloads of its `data:` lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, content: bytes) -> list[bytes]:
        """Return the payloads that are complete. Raises ValueError for an event without end."""
        lines = (self._rest + content).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > LARGEST_EVENT_BYTES:
            raise ValueError("an event of the engine is too large")
        return [line[5:].strip() for line in lines if line and line[:5] == b"data:"]


decode_chunk = msgspec.json.Decoder(EngineChunk).decode  # raises msgspec.DecodeError
_decode_chunks = msgspec.json.Decoder(list[EngineChunk]).decode


def decode_chunks(payloads: list[bytes]) -> list[EngineChunk]:
    """Return the chunks of payloads, read in one go. Raises msgspec.DecodeError when one of them is none."""
    return _decode_chunks(b"[%b]" % b",".join(payloads))


# --- What was used ----------------------------------------------------------------------------------------------------


class Meter(msgspec.Struct):
    """Token counts of an answer as far as it got.

    A chunk's usage is cumulative for its own choice, with the tokens of the prompt that choice belongs to; the chunk
    without choices, at the end, has the sums.
    """

    choice_count: int  # per prompt
    prompts: dict[int, int] = {}
    outputs: dict[int, int] = {}
    total: EngineUsage | None = None
    finishes: dict[int, str] = {}

    def observe(self, *chunks: EngineChunk) -> None:
        latest: dict[int, EngineUsage] = {}  # by choice
        for chunk in chunks:
            usage, choices = chunk.usage, chunk.choices
            if usage is not None and not choices:
                self.total = usage
            for choice in choices:
                if choice.finish_reason is not None:
                    self.finishes[choice.index] = choice.finish_reason
                if usage is not None:
                    latest[choice.index] = usage
        for index, usage in latest.items():
            prompt, read, written = index // self.choice_count, usage.prompt_tokens, usage.completion_tokens or 0
            if read > self.prompts.get(prompt, -1):
                self.prompts[prompt] = read
            if written > self.outputs.get(index, -1):
                self.outputs[index] = written

    def reset(self) -> None:
        """Forget the answer of an engine in whose place another is asked."""
        self.prompts.clear()
        self.outputs.clear()
        self.finishes.clear()
        self.total = None

    @property
    def input_tokens(self) -> int:
        return self.total.prompt_tokens if self.total else sum(self.prompts.values())

    @property
    def output_tokens(self) -> int:
        return (self.total.completion_tokens or 0) if self.total else sum(self.outputs.values())

    @property
    def cached_input_tokens(self) -> int:
        details = self.total.prompt_tokens_details if self.total else None
        return (details.cached_tokens or 0) if details else 0

    @property
    def engine_input_tokens(self) -> int:
        """Return the tokens of the prompts as the engine's own counter has them: once for each choice."""
        if self.total:
            return self.total.prompt_tokens * self.choice_count
        return sum(self.prompts[index // self.choice_count] for index in self.outputs)

    @property
    def is_sound(self) -> bool:
        """Tell whether every choice that ended did so as a complete answer may."""
        return GOOD_ENDS.issuperset(self.finishes.values())

    @property
    def finish(self) -> str:
        return self.finishes.get(0, "stop")

    def usage(self) -> "Usage":
        """Return what the customer is told: what is billed."""
        read, written = self.input_tokens, self.output_tokens
        return Usage(read, written, read + written, CachedTokens(self.cached_input_tokens))


# --- What the customer gets -------------------------------------------------------------------------------------------


class CachedTokens(msgspec.Struct, gc=False):
    cached_tokens: int


class Usage(msgspec.Struct, gc=False):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class _ChatChunkChoice(msgspec.Struct, gc=False):
    index: int
    delta: Delta
    logprobs: dict[str, Any] | None
    finish_reason: str | None


class _CompletionChoice(msgspec.Struct, gc=False):
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


_encoder = msgspec.json.Encoder()


class Renderer(msgspec.Struct, frozen=True):
    """Writes answers of one request under its public names: never the engine's ids, names or extra fields."""

    id: str
    created: int
    model_name: str
    is_chat: bool
    wants_usage: bool

    def event(self, chunk: EngineChunk) -> bytes:
        """Return the chunk as a server-sent event, without the usage that only we asked for."""
        choices = [_chat_chunk(c) if self.is_chat else _completion(c) for c in chunk.choices]
        return self._event(choices, None if self.wants_usage else UNSET)

    def opening(self) -> bytes:
        """Return what comes before the first chunk of a stream."""
        return b""

    def closing(self, meter: Meter) -> bytes:
        """Return what ends a complete stream."""
        usage = self._event([], meter.usage()) if self.wants_usage else b""
        return usage + b"data: [DONE]\n\n"

    def _event(self, choices: list[Any], usage: Usage | UnsetType | None) -> bytes:
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        answer = _Answer(self.id, kind, self.created, self.model_name, choices, usage)
        return b"data: " + _encoder.encode(answer) + b"\n\n"

    def whole(self, assembler: "Assembler", meter: Meter) -> bytes:
        """Return the answer to a request that did not ask for a stream."""
        kind = "chat.completion" if self.is_chat else "text_completion"
        choices = [part.chat() if self.is_chat else part.completion() for part in assembler.parts()]
        return _encoder.encode(_Answer(self.id, kind, self.created, self.model_name, choices, meter.usage()))


def _chat_chunk(choice: EngineChoice) -> _ChatChunkChoice:
    return _ChatChunkChoice(choice.index, choice.delta or Delta(), choice.logprobs, choice.finish_reason)


def _completion(choice: EngineChoice) -> _CompletionChoice:
    return _CompletionChoice(choice.index, choice.text, choice.logprobs, choice.finish_reason)


class _Part(msgspec.Struct):
    """One choice, put together from its chunks."""

    index: int
    texts: list[str] = []
    reasoning: list[str] = []
    calls: dict[int, dict[str, Any]] = {}
    logprobs: dict[str, list[Any]] | None = None
    finish_reason: str | None = None

    def add_rest(self, choice: EngineChoice) -> None:
        """Add what few chunks have: all but the text."""
        if choice.delta is not None:
            if choice.delta.reasoning:
                self.reasoning.append(choice.delta.reasoning)
            for part in choice.delta.tool_calls or ():
                self._add_call(part)
        if choice.finish_reason:
            self.finish_reason = choice.finish_reason
        if choice.logprobs:
            self._add_logprobs(choice.logprobs)

    def _add_logprobs(self, logprobs: dict[str, Any]) -> None:
        for name, values in logprobs.items():
            if values is not None:
                self.logprobs = self.logprobs or {}
                self.logprobs.setdefault(name, []).extend(values)

    def _add_call(self, part: ToolCallPart) -> None:
        call = self.calls.setdefault(
            part.index, {"id": None, "type": "function", "function": {"name": "", "arguments": ""}}
        )
        call["id"] = part.id or call["id"]
        if part.function is not None:
            call["function"]["name"] += part.function.name or ""
            call["function"]["arguments"] += part.function.arguments or ""

    def chat(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self.texts), "refusal": None}
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

    def completion(self) -> _CompletionChoice:
        return _CompletionChoice(self.index, "".join(self.texts), self.logprobs, self.finish_reason)


class Assembler:
    """Puts the chunks of an answer together."""

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
