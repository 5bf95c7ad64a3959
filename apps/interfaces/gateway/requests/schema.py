"""The fields that a request may have. The engine's request has only these. An unknown field is refused by its name.

Bounds limit the cost of one tenant's request to others: prompt log-probabilities stall a batch, and the gateway holds
an answer until it is whole.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from apps.contracts.serving import MAX_CHOICES
from apps.core.errors import InvalidValue, MissingParameter
from apps.core.http.json_bodies import decode_body
from apps.interfaces.gateway.errors import UnsupportedParameter
from apps.interfaces.gateway.requests.calls import read_arguments
from apps.interfaces.gateway.requests.engine_request import EngineRequest
from apps.interfaces.gateway.requests.media import ContentPart, Medium, read_parts
from apps.interfaces.gateway.requests.stored import kept_request
from apps.interfaces.gateway.requests.structured import (
    MAX_TOOLS,
    NamedTool,
    ResponseFormat,
    Tool,
    response_format_field,
    schemas_to_compile,
    tools_fields,
)

MAX_PROMPTS = 8
# An engine compiles the schema again for each choice, in a pool that all tenants share.
MAX_STRUCTURED_CHOICES = 8
MAX_LOGPROBS = 5  # of /v1/completions, as at OpenAI
MAX_TOP_LOGPROBS = 20  # of a chat; engines are started to accept it
MAX_MESSAGES = 2048
MAX_PARTS = 512  # of one message's content
MAX_TOKENS = 2**24  # longer than any model's context
NOT_MODERATED = "Nothing here judges requests or answers."
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions, and the engine's

_MAX_TOKEN_ID = 9  # digits

_Probability = Annotated[float, Meta(ge=0, le=1)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
TokenCount = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(gt=0, le=1)]
_LogprobCount = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
_Bias = Annotated[float, Meta(ge=-100, le=100)]
_Stop = Annotated[str, Meta(min_length=1, max_length=256)]
_TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
_Prompt = str | list[str | _TokenId | list[_TokenId]]
CallId = Annotated[str, Meta(max_length=256)]
CalledName = Annotated[str, Meta(min_length=1, max_length=64)]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Sampling(msgspec.Struct, omit_defaults=True):
    """Fields of both surfaces that go to the engine unchanged."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1_000_000)] | None = None
    min_p: _Probability | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.1, le=10)] | None = None  # lower values make logits infinite
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: _Stop | Annotated[list[_Stop], Meta(max_length=16)] | None = None
    logit_bias: Annotated[dict[str, _Bias], Meta(max_length=300)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: TokenCount | None = None


class CalledFunction(msgspec.Struct):
    name: CalledName
    arguments: str


class MessageToolCall(msgspec.Struct):
    id: CallId
    function: CalledFunction
    type: Literal["function"] = "function"


class Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Meta(max_length=MAX_PARTS)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[MessageToolCall], Meta(max_length=MAX_TOOLS)] | None = None
    tool_call_id: CallId | None = None


class ChatBody(Sampling, forbid_unknown_fields=True):
    model: str | None = None
    messages: Annotated[list[Message], Meta(max_length=MAX_MESSAGES)] | None = None
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    response_format: ResponseFormat | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    store: bool | None = None
    metadata: Metadata | None = None  # of the stored completion
    # Refused when given, because ignoring them would change the meaning of the answer.
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    web_search_options: Any = None
    moderation: Any = None
    # Accepted and ignored: OpenAI documents them, but they have no effect on the answers of open models.
    user: Any = None
    service_tier: Any = None
    modalities: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None


class CompletionBody(Sampling, forbid_unknown_fields=True):
    model: str | None = None
    prompt: _Prompt | None = None
    logprobs: _LogprobCount | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    # Accepted and ignored.
    user: Any = None


IGNORED = {
    "/v1/chat/completions": (
        "modalities", "prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
        "reasoning_effort", "safety_identifier", "service_tier", "user", "verbosity",
    ),
    "/v1/completions": ("user",),
}  # fmt: skip


# --- Parsing ----------------------------------------------------------------------------------------------------------


def parse_chat(raw: bytes) -> EngineRequest:
    """Return the request to /v1/chat/completions. Raises DomainErrors that name the field."""
    return chat_request(decode_body(raw, _chat_decoder), body_bytes=len(raw))


def chat_request(
    body: ChatBody, *, body_bytes: int, prompt_param: str = "messages", echoed: dict[str, object] | None = None
) -> EngineRequest:
    """Return the engine's request. Raises DomainErrors that name the field."""
    model_name = _model_name(body)
    _require_stream(body)
    if body.functions or body.function_call or body.audio or body.web_search_options or body.moderation:
        for name, instead in _REFUSED.items():
            _refuse_given(name, getattr(body, name), instead)
    if body.modalities is not None and body.modalities != ["text"]:
        raise UnsupportedParameter("`modalities` may only be ['text'].", param="modalities")
    if not body.messages:
        raise MissingParameter(f"`{prompt_param}` must hold at least one message.", param=prompt_param)
    fields = _sampling_fields(body)
    media: list[Medium] = []
    fields["messages"] = [_message(number, message, media) for number, message in enumerate(body.messages)]
    if body.top_logprobs and not body.logprobs:
        raise InvalidValue("`top_logprobs` needs `logprobs: true` beside it.", param="top_logprobs")
    if body.logprobs is not None or body.top_logprobs is not None:
        fields |= _given(logprobs=body.logprobs, top_logprobs=body.top_logprobs)
    if body.max_completion_tokens is not None:  # the newer name of the same field takes precedence
        fields.pop("max_tokens", None)
        fields["max_completion_tokens"] = body.max_completion_tokens
    response_format = response_format_field(body.response_format)
    if response_format is not None:
        fields["response_format"] = response_format
    fields |= tools_fields(body.tools, body.tool_choice, in_parallel=body.parallel_tool_calls)
    is_structured = response_format is not None or "tools" in fields
    if is_structured and (body.n or 1) > MAX_STRUCTURED_CHOICES:
        raise InvalidValue(
            f"`n` is {body.n}: at most {MAX_STRUCTURED_CHOICES} choices are allowed with `response_format` or `tools`.",
            param="n",
        )
    return EngineRequest(
        model_name=model_name,
        fields=fields,
        is_streamed=bool(body.stream),
        wants_usage=_wants_usage(body),
        is_structured=is_structured,
        prompt_param=prompt_param,
        prompt_count=1,
        choice_count=body.n or 1,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        body_bytes=body_bytes,
        logprob_count=1 + (body.top_logprobs or 0) if body.logprobs else 0,
        is_held=not body.stream or bool(body.store) or echoed is not None,  # a Response is repeated as its stream ends
        echoed=echoed or {},
        media=tuple(media),
        schemas=tuple(schemas_to_compile(fields)),
        stored=kept_request(body, metadata=body.metadata) if body.store else None,
    )


def parse_completion(raw: bytes) -> EngineRequest:
    """Return the request to /v1/completions. Raises DomainErrors that name the field."""
    body = decode_body(raw, _completion_decoder)
    model_name = _model_name(body)
    _require_stream(body)
    fields = _sampling_fields(body)
    fields["prompt"], prompt_count = _prompts(body.prompt)
    if prompt_count * (body.n or 1) > MAX_CHOICES:
        raise InvalidValue(
            f"{prompt_count} prompts with {body.n} choices each are more than {MAX_CHOICES} answers. Send fewer "
            "prompts at once.",
            param="n",
        )
    _refuse_given("echo", body.echo, "Ask for `logprobs` of what the model writes.")
    _refuse_given("suffix", body.suffix, "No model here fills in the middle.")
    _refuse_given("best_of", body.best_of if body.best_of != (body.n or 1) else None, "Use `n`.")
    max_tokens = body.max_tokens or DEFAULT_COMPLETION_TOKENS
    fields["max_tokens"] = max_tokens
    fields |= _given(logprobs=body.logprobs)
    return EngineRequest(
        model_name=model_name,
        fields=fields,
        is_streamed=bool(body.stream),
        wants_usage=_wants_usage(body),
        is_structured=False,
        prompt_param="prompt",
        prompt_count=prompt_count,
        choice_count=body.n or 1,
        max_tokens=max_tokens,
        body_bytes=len(raw),
        logprob_count=0 if body.logprobs is None else 1 + body.logprobs,
        is_held=not body.stream,
    )


def _model_name(body: ChatBody | CompletionBody) -> str:
    """Return the model's name. A request without one is refused, because the engine would use its base model."""
    if not body.model:
        raise MissingParameter("`model` is required: the name of a base model or of one of yours.", param="model")
    return body.model


def _require_stream(body: ChatBody | CompletionBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise InvalidValue("`stream_options` may only be sent with `stream: true`.", param="stream_options")


def _wants_usage(body: ChatBody | CompletionBody) -> bool:
    return bool(body.stream_options and body.stream_options.include_usage)


_chat_decoder = msgspec.json.Decoder(ChatBody)
_completion_decoder = msgspec.json.Decoder(CompletionBody)


_REFUSED = {
    "functions": "Use `tools`.",
    "function_call": "Use `tool_choice`.",
    "audio": "No model here speaks.",
    "web_search_options": "No model here searches the web.",
    "moderation": NOT_MODERATED,
}


def _refuse_given(name: str, value: object, instead: str) -> None:
    if value:
        raise UnsupportedParameter(f"`{name}` is not supported. {instead}", param=name)


def _sampling_fields(body: Sampling) -> dict[str, object]:
    for token_id in body.logit_bias or ():
        if not (token_id.isascii() and token_id.isdigit() and len(token_id) <= _MAX_TOKEN_ID):
            raise InvalidValue(
                f"`logit_bias` has the key {token_id[:40]!r}: its keys are ids of tokens, such as '1734'.",
                param="logit_bias",
            )
    return {name: value for name in Sampling.__struct_fields__ if (value := getattr(body, name)) is not None}


def _given(**fields: object) -> dict[str, object]:
    return {name: value for name, value in fields.items() if value is not None}


def _message(number: int, message: Message, media: list[Medium]) -> dict[str, object]:
    content: object = message.content
    if content is None and not message.tool_calls:
        raise MissingParameter("A message needs `content`.", param=f"messages[{number}].content")
    if isinstance(message.content, list):
        place, is_users = f"messages[{number}].content", message.role == "user"
        content = read_parts(message.content, place=place, may_hold_media=is_users, media=media)
    written: dict[str, object] = {"role": "system" if message.role == "developer" else message.role, "content": content}
    if message.role == "assistant" and message.tool_calls:
        called = []
        for at, call in enumerate(message.tool_calls):
            param = f"messages[{number}].tool_calls[{at}].function.arguments"
            arguments = read_arguments(call.function.arguments, param=param)
            function = {"name": call.function.name, "arguments": arguments}
            called.append({"id": call.id, "function": function, "type": call.type})
        written["tool_calls"] = called
    if message.role == "tool":
        if not message.tool_call_id:
            raise MissingParameter("A tool's message needs `tool_call_id`.", param=f"messages[{number}].tool_call_id")
        written["tool_call_id"] = message.tool_call_id
    return written


def _prompts(prompt: _Prompt | None) -> tuple[_Prompt, int]:
    """Return the prompt in the engine's form and the number of prompts: a text, token ids, or a list of either."""
    if prompt is None or prompt == []:
        raise MissingParameter("`prompt` must hold at least one prompt.", param="prompt")
    if isinstance(prompt, str):
        return prompt, 1
    kinds = {type(one) for one in prompt}
    if len(kinds) > 1:
        raise InvalidValue("`prompt` mixes texts and token ids: send one kind.", param="prompt")
    if kinds == {int}:
        return prompt, 1
    if len(prompt) > MAX_PROMPTS:
        raise InvalidValue(f"`prompt` holds {len(prompt)} prompts; at most {MAX_PROMPTS} are allowed.", param="prompt")
    if kinds == {list} and not all(prompt):
        raise InvalidValue("`prompt` holds an empty list of token ids.", param="prompt")
    return prompt, len(prompt)
