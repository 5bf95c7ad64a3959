"""Requests of any shape for the gateway, and what reading them may end in."""

import gc
import time
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from apps.core.errors import DomainError
from apps.interfaces.gateway.requests.engine_request import EngineRequest

STALL_SECONDS = 0.2

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=20
)
patterns = st.text(alphabet="ab()[]{}|*+?.^$\\,0123456789dpuLw-é", max_size=40)
calls = st.fixed_dictionaries(
    {"id": st.text(max_size=5), "function": st.fixed_dictionaries({"name": st.text(), "arguments": st.text() | values})}
)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "system", "x"])},
    optional={"content": values, "tool_calls": st.lists(calls, max_size=3) | values, "tool_call_id": scalars},
)


def keyword(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    named = st.dictionaries(st.sampled_from(["a", "b", "c"]), inner, max_size=3)
    return st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["string", "integer", "number", "object", "array", "null", "x"]) | values,
            "pattern": patterns,
            "properties": named,
            "patternProperties": st.dictionaries(patterns, inner, max_size=2),
            "$defs": named,
            "$ref": st.sampled_from(["#", "#/$defs/a", "#/$defs/b", "#/properties/a", "x"]),
            "items": inner,
            "anyOf": st.lists(inner, max_size=4),
            "allOf": st.lists(inner, max_size=4),
            "oneOf": st.lists(inner, max_size=4),
            "enum": st.lists(values, max_size=5),
            "const": values,
            "minItems": st.integers(-1, 5000),
            "maxLength": st.integers(-1, 5000),
            "minimum": st.floats(allow_nan=False) | st.integers(),
            "maximum": st.floats(allow_nan=False) | st.integers(),
            "multipleOf": scalars,
            "format": st.sampled_from(["date", "email", "x"]),
            "additionalProperties": inner | st.booleans(),
            "required": st.lists(st.sampled_from(["a", "b", "z"]), max_size=3) | values,
        },
    )


schemas = st.recursive(st.just({}), keyword, max_leaves=8)
formats = st.fixed_dictionaries({"type": st.just("json_schema")}, optional={"json_schema": st.fixed_dictionaries(
    {"name": st.text(max_size=5), "schema": schemas})})  # fmt: skip


def bodies(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"model": st.just("m") | scalars}, optional=fields)


chats = bodies(
    messages=st.lists(messages, max_size=4) | values,
    response_format=formats | values,
    **dict.fromkeys(("tools", "tool_choice", "stop", "logit_bias", "metadata", "stream_options"), values),
    **dict.fromkeys(("n", "seed", "stream", "max_tokens", "temperature", "top_logprobs", "logprobs"), scalars),
)
completions = bodies(prompt=values, n=scalars, max_tokens=scalars, logprobs=scalars, echo=scalars, stop=values)
responses = bodies(input=st.lists(values, max_size=4) | values, tools=values, text=values, metadata=values,
                   instructions=scalars, tool_choice=values, include=values)  # fmt: skip


def read(parse: Callable[[bytes], EngineRequest], raw: bytes) -> EngineRequest | None:
    """Return the request, or None when it is refused. Every other exception is a fault, as is a stall."""
    # Full garbage collections then pass over the thousands of examples that the test keeps, which took up to 0.6 s.
    gc.freeze()
    began = time.process_time()
    try:
        return parse(raw)
    except DomainError as refusal:
        for word in ("msgspec", "Traceback", "0x", "NoneType"):
            assert word not in refusal.message or word.encode() in raw, refusal.message
        return None
    finally:
        taken = time.process_time() - began
        gc.unfreeze()
        assert taken < STALL_SECONDS
