"""The engine's stream of server-sent events: its content, its token usage, and the form in which customers get it.

The engine is always asked for a stream with usage in each chunk, so that an interrupted answer is metered too. A
customer who did not ask for a stream gets the chunks assembled into one answer.
"""

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from apps.interfaces.gateway.requests.schema import MAX_CHOICES, MAX_PROMPTS

DONE = b"[DONE]"
LARGEST_EVENT_BYTES = 4 * 1024 * 1024
# No vocabulary has a longer token, so an answer beyond this length is faulty.
_MAX_TOKEN_BYTES, _MAX_ANSWER_BYTES = 1024, 64 * 1024 * 1024
_MAX_SHOWN = 10**18  # cap of a count in a message, because JSON numbers can have any length
# The ways in which a complete answer may end. The engine's "abort" and "error" are failures that look like answers.
GOOD_ENDS = frozenset({"stop", "length", "content_filter", "tool_calls"})


# --- The engine's messages --------------------------------------------------------------------------------------------


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
    """A part of one call. All parts of a call share its index."""

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
    """A choice of either surface: chat sends `delta`, completions send `text`."""

    index: Annotated[int, Meta(ge=0, lt=MAX_PROMPTS * MAX_CHOICES)]
    delta: Delta | None = None
    text: str = ""
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None

    @property
    def content_bytes(self) -> int:
        """Return the length of the choice's content in UTF-8 bytes.

        Every token has at least one byte, except the few that are not shown.
        """
        delta = self.delta
        if delta is None:
            return _utf8_length(self.text)
        length = _utf8_length(delta.content or "") + _utf8_length(delta.reasoning or "")
        for call in delta.tool_calls or ():
            if call.function is not None:
                length += _utf8_length(call.function.name or "") + _utf8_length(call.function.arguments or "")
        return length

    @property
    def has_content(self) -> bool:
        delta = self.delta
        return bool(self.text or (delta and (delta.content or delta.reasoning or delta.tool_calls)))


def _utf8_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


class EngineFault(msgspec.Struct, gc=False):
    """The engine's own error object, in a body or in a stream. `code` is an HTTP status or one of the proxy's words."""

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
        """Return the complete payloads. Raises ValueError for an event without an end."""
        lines = (self._rest + content).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > LARGEST_EVENT_BYTES:
            raise ValueError("an event of the engine is too large")
        return [line[5:].strip() for line in lines if line and line[:5] == b"data:"]


decode_chunk = msgspec.json.Decoder(EngineChunk).decode  # raises msgspec.DecodeError
_decode_chunks = msgspec.json.Decoder(list[EngineChunk]).decode


def decode_chunks(payloads: list[bytes]) -> list[EngineChunk]:
    """Return the chunks of all payloads, decoded at once. Raises msgspec.DecodeError if one is not a chunk."""
    return _decode_chunks(b"[%b]" % b",".join(payloads))


# --- Token usage ------------------------------------------------------------------------------------------------------


class TokenBounds(msgspec.Struct, frozen=True):
    """Upper bounds for the tokens that a replica may report for one request.

    `input` and `output` are the reserved counts; nothing above them is billed. No working engine counts more than
    `possible_input` or `possible_output` for any prompt, so a replica that does is faulty.
    """

    input: int
    output: int
    possible_input: int
    possible_output: int


class Meter(msgspec.Struct):
    """Token counts of an answer so far: those the replica reports, limited to the request's bounds.

    A chunk's usage is cumulative for its own choice and includes the tokens of that choice's prompt. The last chunk has
    no choices and holds the sums.
    """

    choice_count: int  # per prompt
    bounds: TokenBounds | None = None  # known once the request is admitted
    prompts: dict[int, int] = {}
    outputs: dict[int, int] = {}
    total: EngineUsage | None = None
    finishes: dict[int, str] = {}
    content_bytes: int = 0  # of the answer's content, as received by this gateway

    def observe(self, *chunks: EngineChunk) -> None:
        latest: dict[int, EngineUsage] = {}  # by choice
        for chunk in chunks:
            usage, choices = chunk.usage, chunk.choices
            if usage is not None and not choices:
                self.total = usage
            for choice in choices:
                self.content_bytes += choice.content_bytes
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
        """Forget the answer of one engine before another is asked."""
        self.prompts.clear()
        self.outputs.clear()
        self.finishes.clear()
        self.total = None
        self.content_bytes = 0

    @property
    def input_tokens(self) -> int:
        return min(max(self._claimed_input, 0), self.bounds.input) if self.bounds else max(self._claimed_input, 0)

    @property
    def output_tokens(self) -> int:
        return min(max(self._claimed_output, 0), self.bounds.output) if self.bounds else max(self._claimed_output, 0)

    @property
    def cached_input_tokens(self) -> int:
        details = self.total.prompt_tokens_details if self.total else None
        return min(max((details.cached_tokens or 0) if details else 0, 0), self.input_tokens)

    @property
    def engine_input_tokens(self) -> int:
        """Return the prompt tokens as the engine's own counter has them: once for each choice."""
        if self.total:
            return self.input_tokens * self.choice_count
        counted = sum(self.prompts.get(index // self.choice_count, 0) for index in self.outputs)
        return min(counted, self.bounds.input * self.choice_count) if self.bounds else counted

    @property
    def _claimed_input(self) -> int:
        return self.total.prompt_tokens if self.total else sum(self.prompts.values())

    @property
    def _claimed_output(self) -> int:
        return (self.total.completion_tokens or 0) if self.total else sum(self.outputs.values())

    @property
    def excess(self) -> str:
        """Return a description of the counts above the reserved ones; empty if there are none."""
        bounds = self.bounds
        if bounds is None or (self._claimed_input <= bounds.input and self._claimed_output <= bounds.output):
            return ""
        return self._against(bounds.input, bounds.output)

    @property
    def fault(self) -> str:
        """Return a description of the counts that no working engine makes for this request; empty if there are none."""
        bounds, read, written = self.bounds, self._claimed_input, self._claimed_output
        if self._is_endless:
            return f"answered {self.content_bytes} bytes without an end"
        if bounds is None or (0 <= read <= bounds.possible_input and 0 <= written <= bounds.possible_output):
            return ""
        return self._against(bounds.possible_input, bounds.possible_output)

    def _against(self, most_input: int, most_output: int) -> str:
        read, written = (min(count, _MAX_SHOWN) for count in (self._claimed_input, self._claimed_output))
        return (
            f"counted {read:.4g} input tokens where at most {most_input} are possible"
            f" and {written:.4g} output tokens where at most {most_output} are"
        )

    @property
    def is_sound(self) -> bool:
        """Return whether each finished choice ended as a complete answer may, within the possible length."""
        return GOOD_ENDS.issuperset(self.finishes.values()) and not self._is_endless

    @property
    def _is_endless(self) -> bool:
        most = self.bounds.possible_output * _MAX_TOKEN_BYTES if self.bounds else _MAX_ANSWER_BYTES
        return self.content_bytes > min(most, _MAX_ANSWER_BYTES)

    @property
    def finish(self) -> str:
        return self.finishes.get(0, "stop")

    def usage(self) -> "Usage":
        """Return the usage shown to the customer, which is the billed usage."""
        read, written = self.input_tokens, self.output_tokens
        return Usage(read, written, read + written, CachedTokens(self.cached_input_tokens))


# --- The customer's messages ------------------------------------------------------------------------------------------


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
    """Writes the answers of one request under its public names; never shows the engine's ids, names or extra fields."""

    id: str
    created: int
    model_name: str
    is_chat: bool
    wants_usage: bool

    def event(self, chunk: EngineChunk) -> bytes:
        """Return the chunk as a server-sent event, without the usage that only the gateway asked for."""
        choices = [_chat_chunk(c) if self.is_chat else _completion(c) for c in chunk.choices]
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


def _chat_chunk(choice: EngineChoice) -> _ChatChunkChoice:
    return _ChatChunkChoice(choice.index, choice.delta or Delta(), choice.logprobs, choice.finish_reason)


def _completion(choice: EngineChoice) -> _CompletionChoice:
    return _CompletionChoice(choice.index, choice.text, choice.logprobs, choice.finish_reason)


class _Part(msgspec.Struct):
    """One choice, assembled from its chunks."""

    index: int
    texts: list[str] = []
    reasoning: list[str] = []
    calls: dict[int, dict[str, Any]] = {}
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
