"""What one tenant's schema may cost the others: each bound at its limit and one above."""

from typing import Any

import pytest

from apps.core.errors import InvalidValue
from apps.interfaces.gateway.requests.schema_bounds import (
    PATTERN_BYTES,
    PATTERN_COUNT,
    PATTERN_EXPANDED,
    PATTERN_GROUPS,
    SCHEMA_BOUND,
    SCHEMA_BYTES,
    SCHEMA_DEPTH,
    SCHEMA_ENUM,
    SCHEMA_EXPANDED,
    SCHEMA_NESTED,
    SCHEMA_PROPERTIES,
    TOOLS_PROPERTIES,
)
from apps.interfaces.gateway.requests.structured import (
    MAX_TOOLS,
    TOOLS_BYTES,
    Function,
    JsonSchema,
    NamedFunction,
    NamedTool,
    ResponseFormat,
    Tool,
    response_format_field,
    schemas_to_compile,
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
        (lambda most: {"a": [[]] * (most - 2)}, SCHEMA_NESTED, "objects and lists"),
        (lambda most: inside("enum", list(range(most))), SCHEMA_ENUM, "enum"),
        (lambda most: inside("pattern", "a" * most), PATTERN_BYTES, "pattern"),
        (lambda most: inside("patternProperties", {"a" * most: {}}), PATTERN_BYTES, "pattern"),
        (lambda most: inside("pattern", "(a)" * most), PATTERN_GROUPS, "groups"),
        (lambda most: inside("pattern", f"(ab|c){{1,{most}}}"), PATTERN_COUNT, "at most 64 times"),
        (lambda most: inside("pattern", f"[a-z]{{{most}}}"), PATTERN_COUNT, "at most 64 times"),
        (lambda most: inside("pattern", f"a{{{most - 1},}}"), PATTERN_COUNT, "at most 64 times"),
        (lambda most: inside("patternProperties", {f"(a{{2}}){{{most}}}": {}}), PATTERN_COUNT, "at most 64 times"),
        (lambda most: {"pattern": "(a{20}){50}" + "b" * (most - 1000)}, PATTERN_EXPANDED, "repetitions written out"),
        (
            lambda most: {"pattern": "((a|bc){5}){50}" + "b" * (most - 1000)},
            PATTERN_EXPANDED,
            "repetitions written out",
        ),
        (
            lambda most: {"anyOf": [{"pattern": "(a{20}){50}"}] * 4 + [{"pattern": "a" * (most - 4000)}]},
            SCHEMA_EXPANDED,
            "patterns have more",
        ),
        *((lambda most, name=name: inside(name, most), SCHEMA_BOUND, name) for name in BOUNDS),
    ],
)
def test_a_schema_passes_at_each_bound_and_not_above(make, most: int, reason: str) -> None:
    check(make(most))

    with pytest.raises(InvalidValue, match=reason) as refused:
        check(make(most + 1))
    assert refused.value.param == "response_format.json_schema.schema"


@pytest.mark.parametrize(
    "pattern",
    [
        r"^\d{3}-\d{4}$",
        r"\{1,9999\}",
        "[{1,9999}]",
        r"\p{L}{1,64}",
        "(",
        "a)",
        "[",
        "{1,2}",
        "x{,5}",
        r"(\(a{2}\)){3}",
        "é" * 200,
    ],
)
def test_a_harmless_or_broken_pattern_is_left_to_the_compiler(pattern: str) -> None:
    check({"pattern": pattern})


@pytest.mark.parametrize(
    "pattern", ["a{" + "9" * 100 + "}", "(a|b|c){1,2000}", "(((a{9}){9}){9}){9}", "(a{64}b{64}){64}"]
)
def test_the_place_of_a_pattern_that_repeats_too_much_is_told(pattern: str) -> None:
    with pytest.raises(InvalidValue, match=r"at `properties\.a\.items"):
        check({"properties": {"a": {"items": {"pattern": pattern}}}})


def test_the_compilers_own_keyword_is_ours_to_write() -> None:
    with pytest.raises(InvalidValue, match="not a keyword of JSON Schema"):
        check({"properties": {"a": {"x-guidance": {"lenient": True}}}})


@pytest.mark.parametrize(("choice", "is_strict", "count"), [(None, None, 0), ("auto", True, 1), ("required", None, 1)])
def test_the_schema_of_a_tool_is_compiled_where_the_engine_does(choice, is_strict, count) -> None:
    tool = Tool("function", Function(name="f", parameters={"type": "object"}, strict=is_strict))

    assert len(list(schemas_to_compile(tools_fields([tool], choice, in_parallel=None)))) == count


def callable_tools(count: int, **parameters: Any) -> list[Tool]:
    return [Tool("function", Function(name=f"f{n}", parameters=dict(parameters))) for n in range(count)]


def test_the_tools_of_a_required_call_are_bounded_and_compiled_together() -> None:
    """vLLM makes one schema of them and compiles it in the loop that writes all answers."""
    some = callable_tools(3, properties={"a": {"$ref": "#/$defs/x"}}, **{"$defs": {"x": {"type": "string"}}})

    *alone, together = schemas_to_compile(tools_fields(some, "required", in_parallel=False))

    assert [schema.param for schema in alone] == [f"tools[{n}].function.parameters" for n in range(3)]
    items = together.schema.pop("items")
    assert isinstance(items, dict)
    assert [call["properties"]["name"]["enum"] for call in items["anyOf"]] == [["f0"], ["f1"], ["f2"]]
    assert together.schema == {"type": "array", "minItems": 1, "maxItems": 1, "$defs": {"x": {"type": "string"}}}
    assert together.param == "tools"


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"properties": {f"p{n}": {} for n in range(TOOLS_PROPERTIES // 4 + 1)}}, "properties"),
        ({"anyOf": [{"pattern": "(a{50}){20}"}, {"pattern": "b"}]}, "patterns"),
    ],
)
def test_tools_that_are_too_much_together_need_a_choice_of_one(parameters: Schema, reason: str) -> None:
    many = callable_tools(4, **parameters)

    with pytest.raises(InvalidValue, match=reason) as refused:
        tools_fields(many, "required", in_parallel=None)
    assert refused.value.param == "tools"
    one = tools_fields(many, NamedTool("function", NamedFunction("f1")), in_parallel=None)
    assert [schema.param for schema in schemas_to_compile(one)] == ["tools[1].function.parameters"]


@pytest.mark.parametrize("keyword", ["properties", "patternProperties", "enum", "pattern", *BOUNDS])
@pytest.mark.parametrize("value", [7, -1.5, "x", None, True, [], [[]], {}, {"a": 1}])
def test_a_keyword_of_another_type_is_left_to_the_engine(keyword: str, value: object) -> None:
    """It answers 400; here nothing may fail on it."""
    check({keyword: value})


def tools(count: int, description: str = "") -> list[Tool]:
    return [Tool("function", Function(name=f"f{n}", description=description or None)) for n in range(count)]


def test_the_number_and_the_size_of_tools_are_bounded_and_so_is_each_ones_schema() -> None:
    assert len(tools_fields(tools(MAX_TOOLS), None, in_parallel=None)["tools"]) == MAX_TOOLS

    for too_much in (tools(MAX_TOOLS + 1), tools(1, "x" * TOOLS_BYTES)):
        with pytest.raises(InvalidValue) as refused:
            tools_fields(too_much, None, in_parallel=None)
        assert refused.value.param == "tools"
    deep = Tool("function", Function(name="f", parameters=nested(SCHEMA_DEPTH + 1)))
    with pytest.raises(InvalidValue, match="nested deeper") as refused:
        tools_fields([*tools(1), deep], None, in_parallel=None)
    assert refused.value.param == "tools[1].function.parameters"
