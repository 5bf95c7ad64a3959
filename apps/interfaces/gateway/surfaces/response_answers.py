"""The answer of POST /v1/responses: one Response, whole or as the events of a stream."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

import msgspec

from apps.interfaces.gateway.engines.chunks import EngineChunk, ToolCallPart
from apps.interfaces.gateway.engines.meter import Meter
from apps.interfaces.gateway.surfaces.answers import Assembler, ToolCallObject

_encode = msgspec.json.Encoder().encode
_CUT = "length"  # the engine's word for an answer that reached its most tokens


class ResponseAnswer(TypedDict):
    """OpenAI's Response. It repeats the settings of the request beside these members."""

    id: str
    object: Literal["response"]
    created_at: int
    status: str
    model: str
    output: Sequence[Any]
    error: None
    incomplete_details: dict[str, str] | None
    usage: dict[str, Any] | None


@dataclass
class ResponseRenderer:
    """Writes one Response, whole or as the events of a stream."""

    ulid: str
    created: int
    model_name: str
    echoed: dict[str, object]
    _number: int = 0
    _assembler: Assembler = field(default_factory=Assembler)
    # The items in the order they began: None is the text, a number the engine's index of a call.
    _opened: list[int | None] = field(default_factory=list)

    def opening(self) -> bytes:
        response = self._response("in_progress", [], None)
        return self._events(
            ("response.created", {"response": response}), ("response.in_progress", {"response": response})
        )

    def event(self, chunk: EngineChunk) -> bytes:
        """Return the events for a chunk. There is only one choice here."""
        self._assembler.add(chunk)
        written = b""
        for choice in chunk.choices:
            delta = choice.delta
            if delta is not None and delta.content:
                written += self._text(delta.content, _logprobs(choice.logprobs))
            for part in (delta.tool_calls if delta else None) or ():
                written += self._call(part)
        return written

    def _text(self, content: str, logprobs: Sequence[object] = ()) -> bytes:
        is_open = None in self._opened
        if not is_open:
            self._opened.append(None)
        number, opened = self._opened.index(None), b""
        place = {"item_id": f"msg_{self.ulid}", "output_index": number, "content_index": 0}
        if not is_open:
            opened = self._events(
                ("response.output_item.added", {"output_index": number, "item": self._message(None)}),
                ("response.content_part.added", place | {"part": _text_part("")}),
            )
        return opened + self._events(("response.output_text.delta", place | {"delta": content, "logprobs": logprobs}))

    def _call(self, part: ToolCallPart) -> bytes:
        opened = b""
        if part.index not in self._opened:
            self._opened.append(part.index)
            item = self._function_call(part.index, self._assembler.parts()[0].calls[part.index], "in_progress")
            opened = self._events(
                (
                    "response.output_item.added",
                    {"output_index": self._opened.index(part.index), "item": item | {"arguments": ""}},
                )
            )
        delta = part.function.arguments if part.function else None
        if not delta:
            return opened
        place = {"item_id": f"fc_{self.ulid}_{part.index}", "output_index": self._opened.index(part.index)}
        return opened + self._events(("response.function_call_arguments.delta", place | {"delta": delta}))

    def closing(self, meter: Meter) -> bytes:
        """Return the events that complete each item and the response. This surface has no [DONE]."""
        response = self._finished(self._assembler, meter)
        written = b"" if self._opened else self._text("")
        for number, item in enumerate(response["output"]):
            place = {"item_id": item["id"], "output_index": number}
            if item["type"] == "message":
                text, first = item["content"][0], place | {"content_index": 0}
                said = {"text": text["text"], "logprobs": text["logprobs"]}
                written += self._events(
                    ("response.output_text.done", first | said),
                    ("response.content_part.done", first | {"part": text}),
                )
            else:
                done = place | {"arguments": item["arguments"], "name": item["name"]}
                written += self._events(("response.function_call_arguments.done", done))
            written += self._events(("response.output_item.done", {"output_index": number, "item": item}))
        return written + self._events((f"response.{response['status']}", {"response": response}))

    def whole(self, assembler: Assembler, meter: Meter) -> bytes:
        return _encode(self._finished(assembler, meter))

    def _finished(self, assembler: Assembler, meter: Meter) -> dict[str, Any]:
        status = "incomplete" if meter.finish == _CUT else "completed"
        return self._response(status, self._output(assembler), meter)

    def _output(self, assembler: Assembler) -> list[dict[str, Any]]:
        part = next(iter(assembler.parts()), None)
        text = "".join(part.texts) if part else ""
        items: dict[int | None, dict[str, Any]] = {}
        calls = part.calls if part else {}
        if text or not calls:
            items[None] = self._message(text, _logprobs(part.logprobs) if part else ())
        items |= {index: self._function_call(index, call, "completed") for index, call in calls.items()}
        return [items[each] for each in self._opened or items]

    def _message(self, text: str | None, logprobs: Sequence[object] = ()) -> dict[str, Any]:
        """Return the item of the text. With None, its text is still to come."""
        status, content = ("in_progress", []) if text is None else ("completed", [_text_part(text, logprobs)])
        return {
            "id": f"msg_{self.ulid}", "type": "message", "role": "assistant", "status": status, "content": content,
        }  # fmt: skip

    def _function_call(self, index: int, call: ToolCallObject, status: str) -> dict[str, Any]:
        item = {"id": f"fc_{self.ulid}_{index}", "type": "function_call", "call_id": call["id"], "status": status}
        return item | call["function"]

    def _response(self, status: str, output: Sequence[object], meter: Meter | None) -> dict[str, Any]:
        is_cut = meter is not None and meter.finish == _CUT
        return {
            "id": f"resp_{self.ulid}", "object": "response", "created_at": self.created, "status": status,
            "model": self.model_name, "output": output, "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": _usage(meter) if meter else None,
        } | self.echoed  # fmt: skip

    def _events(self, *named: tuple[str, dict[str, object]]) -> bytes:
        written = b""
        for name, fields in named:
            body = _encode({"type": name, "sequence_number": self._number} | fields)
            written += b"event: " + name.encode() + b"\ndata: " + body + b"\n\n"
            self._number += 1
        return written


def _text_part(text: str, logprobs: Sequence[object] = ()) -> dict[str, object]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _logprobs(given: Mapping[str, Any] | None) -> Sequence[object]:
    """Return the tokens' log-probabilities of a chat; they have the same shape here."""
    return (given or {}).get("content") or ()


def _usage(meter: Meter) -> dict[str, object]:
    return {
        "input_tokens": meter.input_tokens,
        "input_tokens_details": {"cached_tokens": meter.cached_input_tokens, "cache_write_tokens": 0},
        "output_tokens": meter.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": meter.input_tokens + meter.output_tokens,
    }
