"""The chunks of an engine's answer, as they come in its stream of server-sent events.

The engine is always asked for a stream with usage in each chunk, so that an interrupted answer is metered too.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from apps.contracts.serving import MAX_CHOICES

DONE = b"[DONE]"
MAX_EVENT_BYTES = 4 * 1024 * 1024


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

    index: Annotated[int, Meta(ge=0, lt=MAX_CHOICES)]
    delta: Delta | None = None
    text: str = ""
    logprobs: dict[str, list[msgspec.Raw] | None] | None = None  # not parsed, because they are many and only passed on
    finish_reason: str | None = None

    @property
    def content_bytes(self) -> int:
        """Return the length of the choice's content in UTF-8 bytes.

        Every token has at least one byte, except for the few that are not shown.
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
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ValueError("an event of the engine is too large")
        return [line[5:].strip() for line in lines if line and line[:5] == b"data:"]


decode_chunk = msgspec.json.Decoder(EngineChunk).decode  # raises msgspec.DecodeError
_decode_chunks = msgspec.json.Decoder(list[EngineChunk]).decode


def decode_chunks(payloads: list[bytes]) -> list[EngineChunk]:
    """Return the chunks of all payloads, decoded at once. Raises msgspec.DecodeError if one is not a chunk."""
    return _decode_chunks(b"[%b]" % b",".join(payloads))
