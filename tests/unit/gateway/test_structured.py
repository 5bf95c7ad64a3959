"""What one tenant's schema may cost the others: each bound at its limit and one above."""

from typing import Any

import pytest

from apps.core.errors import InvalidValue
from apps.gateway.structured import (
    MOST_TOOLS,
    PATTERN_BYTES,
    SCHEMA_BOUND,
    SCHEMA_BYTES,
    SCHEMA_DEPTH,
    SCHEMA_ENUM,
    SCHEMA_PROPERTIES,
    TOOLS_BYTES,
    Function,
    JsonSchema,
    ResponseFormat,
    Tool,
    response_format_field,
    tools_fields,
)

Schema = dict[str, Any]


def check(schema: Schema) -> None:
    response_format_field(ResponseFormat(type="json_schema", json_schema=JsonSchema(name="s", schema=schema)))


def nested(levels: int) -> Schema:
    return {"properties": {"a": nested(levels - 1)}} if levels else {"type": "string"}


def alternatives(levels: int) -> Schema:
    return {"anyOf": [alternatives(levels - 1)]} if levels else {"type": "string"}


def sized(size: int) -> Schema:
    """Return a schema of so many bytes."""
    return {"title": "x" * (size - len('{"title":""}'))}


def wide(properties: int) -> Schema:
    """Return so many properties in several places."""
    half = properties // 2
    first, second = ({f"p{n}": {} for n in numbers} for numbers in (range(half), range(half, properties)))
    return {"anyOf": [{"properties": first}, {"items": {"patternProperties": second}}]}


def inside(keyword: str, value: object) -> Schema:
    return {"properties": {"a": {"items": [{"allOf": [{keyword: value}]}]}}}


BOUNDS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")


@pytest.mark.parametrize(
    ("make", "most", "reason"),
    [
        (sized, SCHEMA_BYTES, "larger than"),
        (nested, SCHEMA_DEPTH, "nested deeper"),
        (alternatives, SCHEMA_DEPTH, "nested deeper"),
        (wide, SCHEMA_PROPERTIES, "properties"),
        (lambda most: inside("enum", list(range(most))), SCHEMA_ENUM, "enum"),
        (lambda most: inside("pattern", "a" * most), PATTERN_BYTES, "pattern"),
        (lambda most: inside("patternProperties", {"a" * most: {}}), PATTERN_BYTES, "pattern"),
        *((lambda most, name=name: inside(name, most), SCHEMA_BOUND, name) for name in BOUNDS),
    ],
)
def test_a_schema_passes_at_each_bound_and_not_above(make, most: int, reason: str) -> None:
    check(make(most))

    with pytest.raises(InvalidValue, match=reason) as refused:
        check(make(most + 1))
    assert refused.value.param == "response_format.json_schema.schema"


@pytest.mark.parametrize("keyword", ["properties", "patternProperties", "enum", "pattern", *BOUNDS])
@pytest.mark.parametrize("value", [7, -1.5, "x", None, True, [], [[]], {}, {"a": 1}])
def test_a_keyword_of_another_type_is_left_to_the_engine(keyword: str, value: object) -> None:
    """It answers 400; here nothing may fail on it."""
    check({keyword: value})


def tools(count: int, description: str = "") -> list[Tool]:
    return [Tool("function", Function(name=f"f{n}", description=description or None)) for n in range(count)]


def test_the_number_and_the_size_of_tools_are_bounded_and_so_is_each_ones_schema() -> None:
    assert len(tools_fields(tools(MOST_TOOLS), None, in_parallel=None)["tools"]) == MOST_TOOLS

    for too_much in (tools(MOST_TOOLS + 1), tools(1, "x" * TOOLS_BYTES)):
        with pytest.raises(InvalidValue) as refused:
            tools_fields(too_much, None, in_parallel=None)
        assert refused.value.param == "tools"
    deep = Tool("function", Function(name="f", parameters=nested(SCHEMA_DEPTH + 1)))
    with pytest.raises(InvalidValue, match="nested deeper") as refused:
        tools_fields([*tools(1), deep], None, in_parallel=None)
    assert refused.value.param == "tools[1].function.parameters"
