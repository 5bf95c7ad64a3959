"""POST /v1/responses without stored state.

Each request goes to the engine as a chat, and the answer is rendered as a Response. Nothing is stored, so any reference
to an earlier response is refused.
"""

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from apps.core.errors import DomainError, InvalidValue, MissingParameter
from apps.core.http.json_bodies import decode_body
from apps.interfaces.gateway.errors import UnsupportedParameter
from apps.interfaces.gateway.requests.calls import read_arguments
from apps.interfaces.gateway.requests.engine_request import EngineRequest
from apps.interfaces.gateway.requests.schema import (
    MAX_MESSAGES,
    MAX_PARTS,
    NOT_MODERATED,
    CalledName,
    CallId,
    ChatBody,
    Metadata,
    Temperature,
    TokenCount,
    TopLogprobs,
    TopP,
    chat_request,
)
from apps.interfaces.gateway.requests.structured import MAX_TOOLS, FunctionName, SchemaName

_REFUSED = {
    "previous_response_id": "Nothing is stored here: send the whole conversation as `input`.",
    "conversation": "Nothing is stored here: send the whole conversation as `input`.",
    "background": "Answers are given at once: use `stream`.",
    "prompt": "No prompts are stored here: send `instructions` and `input`.",
    "store": "Nothing is stored here: send `store: false`.",
    "moderation": NOT_MODERATED,
}
IGNORED = (
    "access_programs", "background_options", "context_management", "image", "include", "max_tool_calls", "metadata",
    "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "reasoning", "safety_identifier",
    "service_tier", "stream_options", "truncation", "user",
)  # fmt: skip
# The chat's field names, and those of this surface.
_SENT = (
    (re.compile(r"\bresponse_format(\.json_schema)?"), "text.format"),
    (re.compile(r"\b(tools\[\d+\]|tool_choice)\.function"), r"\1"),
    (re.compile(r"\bmax_tokens"), "max_output_tokens"),
)
# The AI SDK sends such items in each turn after the first one, unless it is told that nothing is stored.
_NO_STORED_ITEMS = (
    "Nothing is stored here, so an item cannot be named by its id: send the item itself. In the AI SDK, set "
    "`providerOptions.openai.store` to false, or use `openai.chat(…)`."
)
_LOGPROBS = "message.output_text.logprobs"  # the only value of `include` with data in these answers


class TextFormat(msgspec.Struct, omit_defaults=True):
    type: Literal["text", "json_object", "json_schema"]
    name: SchemaName | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextSettings(msgspec.Struct, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class FlatTool(msgspec.Struct, omit_defaults=True):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenTool(msgspec.Struct):
    type: Literal["function"]
    name: str


class InputPart(msgspec.Struct):
    type: str
    text: str | None = None


_InputParts = Annotated[list[InputPart], Meta(max_length=MAX_PARTS)]


class Item(msgspec.Struct):
    """One item of `input`: a message, a function call, or a function's result."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | _InputParts | None = None
    call_id: CallId | None = None
    name: CalledName | None = None
    arguments: str | None = None
    output: str | _InputParts | None = None


class ResponsesBody(msgspec.Struct, forbid_unknown_fields=True):
    model: str | None = None
    input: str | Annotated[list[Item], Meta(max_length=MAX_MESSAGES - 1)] | None = None
    instructions: str | None = None
    max_output_tokens: TokenCount | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    stream: bool | None = None
    text: TextSettings | None = None
    tools: Annotated[list[FlatTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: TopLogprobs | None = None
    include: Annotated[list[str], Meta(max_length=32)] | None = None
    store: bool | None = None
    previous_response_id: Any = None
    conversation: Any = None
    background: Any = None
    prompt: Any = None
    moderation: Any = None
    metadata: Metadata | None = None  # repeated in the answer
    # Accepted and ignored.
    access_programs: Any = None
    background_options: Any = None
    context_management: Any = None
    image: Any = None
    max_tool_calls: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    reasoning: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    stream_options: Any = None
    truncation: Any = None
    user: Any = None


_decoder = msgspec.json.Decoder(ResponsesBody)


def parse_response(raw: bytes) -> EngineRequest:
    """Return a request to /v1/responses as a chat request. Raises DomainErrors that name the field."""
    body = decode_body(raw, _decoder)
    for name, instead in _REFUSED.items():
        if getattr(body, name):
            raise UnsupportedParameter(f"`{name}` is not supported. {instead}", param=name)
    chat = msgspec.convert(_as_chat(body), ChatBody)  # the types above have the chat's limits
    return chat_request(chat, body_bytes=len(raw), prompt_param="input", echoed=_echoed(body))


def as_sent(error: DomainError) -> DomainError:
    """Return an error about the chat with the field names of this surface."""
    for chats, ours in _SENT:
        error.param = error.param and chats.sub(ours, error.param)
        error.message = chats.sub(ours, error.message)
    return error


def _as_chat(body: ResponsesBody) -> dict[str, object]:
    if not body.input:
        raise MissingParameter("`input` must hold a text or at least one item.", param="input")
    items = [Item(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    messages = _messages(items)
    if body.instructions:
        messages.insert(0, {"role": "system", "content": body.instructions})
    tools = [
        {
            "type": "function",
            "function": {name: value for name, value in msgspec.to_builtins(tool).items() if name != "type"},
        }
        for tool in body.tools or ()
    ]
    choice = body.tool_choice
    given = {
        "model": body.model,
        "messages": messages,
        "max_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "stream": body.stream,
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _format(body.text.format if body.text else None),
        "tools": tools or None,
        "tool_choice": {"type": "function", "function": {"name": choice.name}}
        if isinstance(choice, ChosenTool)
        else choice,
        "logprobs": True if body.top_logprobs is not None or _LOGPROBS in (body.include or ()) else None,
        "top_logprobs": body.top_logprobs,
    }
    return {name: value for name, value in given.items() if value is not None}


def _messages(items: list[Item]) -> list[dict[str, Any]]:
    """Return the chat's messages. Text and function calls of one turn of the assistant are one message."""
    found: list[dict[str, Any]] = []
    for number, item in enumerate(items):
        if item.type == "reasoning":
            continue
        message, last = _message(number, item), found[-1] if found else {}
        calls = last.get("tool_calls", [])
        if item.type == "function_call" and last.get("role") == "assistant" and len(calls) < MAX_TOOLS:
            last["tool_calls"] = calls + message["tool_calls"]
        else:
            found.append(message)
    return found


def _message(number: int, item: Item) -> dict[str, Any]:
    place = f"input[{number}]"
    if item.type == "message":
        if item.role is None:
            raise MissingParameter("A message needs `role`.", param=f"{place}.role")
        return {"role": item.role, "content": _content(item.content, f"{place}.content")}
    if item.type == "function_call":
        arguments = read_arguments(item.arguments or "", param=f"{place}.arguments")
        if item.name is None:
            raise MissingParameter("A function call needs `name`.", param=f"{place}.name")
        function = {"name": item.name, "arguments": arguments}
        call = {"id": item.call_id or "", "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if item.type == "function_call_output":
        if not item.call_id:
            raise MissingParameter("A function's output needs `call_id`.", param=f"{place}.call_id")
        return {"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output, f"{place}.output")}
    if item.type == "item_reference":
        raise InvalidValue(_NO_STORED_ITEMS, param=f"{place}.type")
    raise InvalidValue(
        f"Items of type {item.type[:40]!r} are not supported: send messages, function_call and function_call_output.",
        param=f"{place}.type",
    )


def _content(content: str | list[InputPart] | None, place: str) -> str:
    if content is None:
        raise MissingParameter(f"`{place}` is required.", param=place)
    if isinstance(content, str):
        return content
    for number, part in enumerate(content):
        if part.type not in ("input_text", "output_text") or part.text is None:
            raise InvalidValue(
                f"Content of type {part.type[:40]!r} is not supported: send text parts only.",
                param=f"{place}[{number}].type",
            )
    return "\n".join(part.text or "" for part in content)


def _format(given: TextFormat | None) -> dict[str, object] | None:
    if given is None:
        return None
    named = {name: value for name, value in msgspec.to_builtins(given).items() if name != "type"}
    return {"type": given.type} | ({"json_schema": {"name": "schema"} | named} if given.type == "json_schema" else {})


def _echoed(body: ResponsesBody) -> dict[str, object]:
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "store": False,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_logprobs": body.top_logprobs or 0,
        "text": msgspec.to_builtins(body.text) if body.text else {"format": {"type": "text"}},
        "tool_choice": msgspec.to_builtins(body.tool_choice) if body.tool_choice else "auto",
        "tools": msgspec.to_builtins(body.tools) if body.tools else [],
    }
