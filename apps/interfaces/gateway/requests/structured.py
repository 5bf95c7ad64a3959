"""Structured answers: JSON schemas and tools, as requests contain them and as the engine receives them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from apps.core.errors import InvalidValue, MissingParameter
from apps.interfaces.gateway.requests.grammars import CheckedSchema
from apps.interfaces.gateway.requests.schema_bounds import require_bounded, require_bounded_together

MAX_TOOLS = 64
TOOLS_BYTES = 32 * 1024
_SCHEMA = "response_format.json_schema.schema"
SchemaName = Annotated[str, Meta(max_length=64)]
FunctionName = Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{1,64}$")]
_ONE_OF_AS_ANY_OF = {"x-guidance": {"coerce_one_of": True}}  # no grammar compiler can do better


class JsonSchema(msgspec.Struct, omit_defaults=True):
    name: SchemaName
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(msgspec.Struct, omit_defaults=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Function(msgspec.Struct, omit_defaults=True):
    name: FunctionName
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
) -> dict[str, object]:
    """Return the fields that let the model call functions. Raises InvalidValue."""
    if not tools:
        if choice not in (None, "none", "auto"):
            what = "names a tool" if isinstance(choice, NamedTool) else f"is '{choice[:40]}'"
            text = f"`tool_choice` {what}, but `tools` is empty. Send `tools`, or leave `tool_choice` out."
            raise InvalidValue(text, param="tool_choice")
        return {}
    if len(tools) > MAX_TOOLS:
        raise InvalidValue(f"`tools` holds {len(tools)} tools; at most {MAX_TOOLS} are allowed.", param="tools")
    if len(msgspec.json.encode(tools)) > TOOLS_BYTES:
        raise InvalidValue(f"`tools` is larger than {TOOLS_BYTES} bytes.", param="tools")
    sizes = [
        require_bounded(tool.function.parameters, f"tools[{number}].function.parameters")
        for number, tool in enumerate(tools)
        if tool.function.parameters is not None
    ]
    if choice == "required":
        require_bounded_together(sizes, "tools")
    if isinstance(choice, NamedTool) and choice.function.name not in {tool.function.name for tool in tools}:
        raise InvalidValue("`tool_choice` names a function that is not in `tools`.", param="tool_choice")
    given = {
        "tools": msgspec.to_builtins(tools),
        "tool_choice": msgspec.to_builtins(choice),
        "parallel_tool_calls": in_parallel,
    }
    return {name: value for name, value in given.items() if value is not None}


# --- Structured output ------------------------------------------------------------------------------------------------


def response_format_field(given: ResponseFormat | None) -> dict[str, object] | None:
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return {"type": "json_object"}
    if given.json_schema is None or given.json_schema.schema is None:
        raise MissingParameter(f"`{_SCHEMA}` is required.", param=_SCHEMA)
    require_bounded(given.json_schema.schema, _SCHEMA)
    field = msgspec.to_builtins(given)
    field["json_schema"]["schema"] |= _ONE_OF_AS_ANY_OF
    return field


def schemas_to_compile(fields: Mapping[str, Any]) -> Iterator[CheckedSchema]:
    """Yield the schemas that the engine compiles; those of tools only if strict or if a call of them is required."""
    response_format = fields.get("response_format")
    if response_format and response_format["type"] == "json_schema":
        yield CheckedSchema(_SCHEMA, response_format["json_schema"]["schema"])
    choice = fields.get("tool_choice")
    named = choice["function"]["name"] if isinstance(choice, dict) else None
    functions = [tool["function"] for tool in fields.get("tools", ())]
    for number, function in enumerate(functions):
        is_forced = choice == "required" or function["name"] == named
        if function.get("parameters") is not None and (is_forced or function.get("strict")):
            yield CheckedSchema(f"tools[{number}].function.parameters", function["parameters"])
    if choice == "required" and len(functions) > 1:
        yield CheckedSchema("tools", _schema_of_any(functions, in_parallel=fields.get("parallel_tool_calls")))


def _schema_of_any(functions: Sequence[Mapping[str, Any]], *, in_parallel: bool | None) -> dict[str, object]:
    """Return the schema of a required call as vLLM 0.32 builds it from all tools (vllm/tool_parsers/utils.py)."""
    definitions: dict[str, object] = {}
    calls = []
    for function in functions:
        parameters = dict(function.get("parameters") or {"type": "object", "properties": {}})
        own = parameters.pop("$defs", {})
        definitions |= own if isinstance(own, dict) else {}
        properties = {"name": {"type": "string", "enum": [function["name"]]}, "parameters": parameters}
        calls.append({"properties": properties, "required": ["name", "parameters"]})
    schema: dict[str, object] = {"type": "array", "minItems": 1, "items": {"type": "object", "anyOf": calls}}
    if in_parallel is False:
        schema["maxItems"] = 1
    return schema | ({"$defs": definitions} if definitions else {})
