"""Structured answers: JSON schemas and tools, bounded by what one tenant's may cost the others.

Grammars are compiled in a pool all tenants share, without a time limit.
"""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from apps.core.errors import InvalidValue
from apps.gateway.errors import MissingParameter

SCHEMA_BYTES = 16 * 1024
SCHEMA_DEPTH = 16
SCHEMA_PROPERTIES = 100
SCHEMA_ENUM = 500
SCHEMA_BOUND = 4096  # of minLength, maxLength, minItems, maxItems
PATTERN_BYTES = 512

MOST_TOOLS = 64
TOOLS_BYTES = 32 * 1024


class JsonSchema(msgspec.Struct, omit_defaults=True):
    name: Annotated[str, Meta(max_length=64)]
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(msgspec.Struct, omit_defaults=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Function(msgspec.Struct, omit_defaults=True):
    name: Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct):
    type: Literal["function"]
    function: Function


class NamedFunction(msgspec.Struct):
    name: str


class NamedTool(msgspec.Struct):
    type: Literal["function"]
    function: NamedFunction


# --- Tools ------------------------------------------------------------------------------------------------------------


def tools_fields(
    tools: list[Tool] | None, choice: str | NamedTool | None, *, in_parallel: bool | None
) -> dict[str, Any]:
    """Return the fields that let the model call functions. Raises InvalidValue."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidValue("`tool_choice` names a tool, but `tools` is empty.", param="tool_choice")
        return {}
    if len(tools) > MOST_TOOLS:
        raise InvalidValue(f"`tools` holds {len(tools)} tools; at most {MOST_TOOLS} are allowed.", param="tools")
    if len(msgspec.json.encode(tools)) > TOOLS_BYTES:
        raise InvalidValue(f"`tools` is larger than {TOOLS_BYTES} bytes.", param="tools")
    for number, tool in enumerate(tools):
        if tool.function.parameters is not None:
            _check_schema(tool.function.parameters, f"tools[{number}].function.parameters")
    if isinstance(choice, NamedTool) and choice.function.name not in {tool.function.name for tool in tools}:
        raise InvalidValue("`tool_choice` names a function that is not in `tools`.", param="tool_choice")
    given = {
        "tools": msgspec.to_builtins(tools),
        "tool_choice": msgspec.to_builtins(choice),
        "parallel_tool_calls": in_parallel,
    }
    return {name: value for name, value in given.items() if value is not None}


# --- Structured output ------------------------------------------------------------------------------------------------


def response_format_field(given: ResponseFormat | None) -> dict[str, Any] | None:
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return {"type": "json_object"}
    param = "response_format.json_schema"
    if given.json_schema is None or given.json_schema.schema is None:
        raise MissingParameter("`response_format.json_schema.schema` is required.", param=f"{param}.schema")
    _check_schema(given.json_schema.schema, f"{param}.schema")
    return msgspec.to_builtins(given)


def _check_schema(schema: dict[str, Any], param: str) -> None:
    """Refuse what would keep the grammar compiler, which all tenants share, busy for seconds."""
    if len(msgspec.json.encode(schema)) > SCHEMA_BYTES:
        raise InvalidValue(f"The schema is larger than {SCHEMA_BYTES} bytes.", param=param)
    properties = 0
    for depth, value in _walk(schema):
        if depth > SCHEMA_DEPTH * 2:  # a level of a schema is an object in `properties` or `anyOf`: two of JSON
            raise InvalidValue(f"The schema is nested deeper than {SCHEMA_DEPTH} levels.", param=param)
        if isinstance(value, dict):
            properties += _count_properties(value)
            _check_keywords(value, param)
        if properties > SCHEMA_PROPERTIES:
            raise InvalidValue(f"The schema has more than {SCHEMA_PROPERTIES} properties.", param=param)


def _walk(schema: Any) -> Iterable[tuple[int, Any]]:
    """Yield every object and list of the schema with its depth in JSON."""
    waiting: list[tuple[int, Any]] = [(0, schema)]
    while waiting:
        depth, value = waiting.pop()
        yield depth, value
        inside = value.values() if isinstance(value, dict) else value
        waiting.extend((depth + 1, inner) for inner in inside if isinstance(inner, dict | list))


def _count_properties(value: dict[str, Any]) -> int:
    found = [value.get(name) for name in ("properties", "patternProperties")]
    return sum(len(properties) for properties in found if isinstance(properties, dict))


def _check_keywords(value: dict[str, Any], param: str) -> None:
    for name in ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"):
        bound = value.get(name)
        if isinstance(bound, int | float) and abs(bound) > SCHEMA_BOUND:
            raise InvalidValue(f"`{name}` in the schema is above {SCHEMA_BOUND}.", param=param)
    if isinstance(value.get("enum"), list) and len(value["enum"]) > SCHEMA_ENUM:
        raise InvalidValue(f"An `enum` in the schema has more than {SCHEMA_ENUM} values.", param=param)
    named = value.get("patternProperties")
    patterns = [value.get("pattern"), *(named if isinstance(named, dict) else ())]
    if any(isinstance(pattern, str) and len(pattern.encode()) > PATTERN_BYTES for pattern in patterns):
        raise InvalidValue(f"A pattern in the schema is longer than {PATTERN_BYTES} bytes.", param=param)
