"""Limits on the size of a JSON schema.

They are checked before anything compiles it, so that no tenant slows down the others. The compiler expands each counted
repetition, and its work grows faster than the expanded size: xgrammar 0.2.8 takes 6.6 seconds of processor time for
`(a|b|c){1,4000}`, and nothing stops it. No schema within these limits took xgrammar longer than half a second.
"""

import re
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

import msgspec

from apps.core.errors import InvalidValue

SCHEMA_BYTES = 16 * 1024
SCHEMA_DEPTH = 16
SCHEMA_NESTED = 2000  # objects and lists
SCHEMA_PROPERTIES = 100
TOOLS_PROPERTIES = 256  # of all tools that the engine compiles as one schema
SCHEMA_ENUM = 500
SCHEMA_BOUND = 4096  # of minLength, maxLength, minItems, maxItems
PATTERN_BYTES = 512
PATTERN_GROUPS = 64
PATTERN_COUNT = 64  # the highest count of a repetition
PATTERN_EXPANDED = 1000  # characters of one pattern with its repetitions expanded
SCHEMA_EXPANDED = 4000  # of all patterns of a schema

_BOUNDS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_Nested = dict[str, object] | list[object]
_OWN = "x-guidance"  # options of the engine's compiler, which only the gateway may write


class SchemaSize(NamedTuple):
    properties: int
    expanded: int  # characters of all patterns with their repetitions expanded


def require_bounded(schema: dict[str, object], param: str) -> SchemaSize:
    """Return the schema's size. Raises InvalidValue that names the place in the schema if it exceeds a limit."""
    if len(msgspec.json.encode(schema)) > SCHEMA_BYTES:
        raise InvalidValue(f"The schema is larger than {SCHEMA_BYTES} bytes. Shorten it.", param=param)
    properties = expanded = 0
    for count, (depth, place, value) in enumerate(_walk(schema)):
        if count >= SCHEMA_NESTED:
            text = f"The schema has more than {SCHEMA_NESTED:,} objects and lists. Use fewer."
            raise InvalidValue(text, param=param)
        if depth > SCHEMA_DEPTH * 2:  # each level of a schema has two of JSON, such as an object inside `properties`
            raise InvalidValue(
                f"The schema is nested deeper than {SCHEMA_DEPTH} levels at `{place}`. Flatten it.", param=param
            )
        if isinstance(value, dict):
            named, by_pattern = value.get("properties"), value.get("patternProperties")
            properties += sum(len(each) for each in (named, by_pattern) if isinstance(each, dict))
            _require_keywords(value, place, param)
            patterns = [value.get("pattern"), *(by_pattern if isinstance(by_pattern, dict) else ())]
            expanded += sum(_expanded_size(each, place, param) for each in patterns if isinstance(each, str))
        if properties > SCHEMA_PROPERTIES:
            raise InvalidValue(f"The schema has more than {SCHEMA_PROPERTIES} properties. Remove some.", param=param)
        if expanded > SCHEMA_EXPANDED:
            raise InvalidValue(
                f"The schema's patterns have more than {SCHEMA_EXPANDED:,} characters with their repetitions written "
                "out. Use fewer or shorter ones.",
                param=param,
            )
    return SchemaSize(properties, expanded)


def require_bounded_together(sizes: Collection[SchemaSize], param: str) -> None:
    """Raise InvalidValue if the tools of a required call exceed a limit, because the engine compiles them as one."""
    instead = "Send fewer tools, or name one in `tool_choice`."
    if sum(size.properties for size in sizes) > TOOLS_PROPERTIES:
        raise InvalidValue(
            f"With `tool_choice: required`, all tools together may have {TOOLS_PROPERTIES} properties. {instead}",
            param=param,
        )
    if sum(size.expanded for size in sizes) > SCHEMA_EXPANDED:
        raise InvalidValue(
            f"With `tool_choice: required`, the patterns of all tools together may have {SCHEMA_EXPANDED:,} characters "
            f"with their repetitions written out. {instead}",
            param=param,
        )


def _walk(schema: _Nested) -> Iterator[tuple[int, str, _Nested]]:
    """Yield each object and list of the schema with its depth in JSON and its place."""
    waiting: list[tuple[int, str, _Nested]] = [(0, "", schema)]
    while waiting:
        depth, place, value = waiting.pop()
        yield depth, place[:200], value
        inside: Iterable[tuple[str | int, object]] = value.items() if isinstance(value, dict) else enumerate(value)
        prefix = f"{place}." if place else ""
        waiting.extend(
            (depth + 1, f"{prefix}{name}", inner) for name, inner in inside if isinstance(inner, dict | list)
        )


def _require_keywords(value: dict[str, object], place: str, param: str) -> None:
    at = f" at `{place}`" if place else ""
    for name in _BOUNDS:
        bound = value.get(name)
        if isinstance(bound, int | float) and abs(bound) > SCHEMA_BOUND:
            raise InvalidValue(f"`{name}`{at} is above {SCHEMA_BOUND}. Lower it or leave it out.", param=param)
    if isinstance(values := value.get("enum"), list) and len(values) > SCHEMA_ENUM:
        raise InvalidValue(f"The `enum`{at} has more than {SCHEMA_ENUM} values. Remove some.", param=param)
    if _OWN in value:
        raise InvalidValue(f"`{_OWN}`{at} is not a keyword of JSON Schema. Remove it.", param=param)


_ENDLESS = 10**7  # for a count with too many digits


# --- Patterns ---------------------------------------------------------------------------------------------------------

_PART = re.compile(
    r"""\\[pPxu]\{[^}]*\} | \\. | \[\^?\]?(?:\\.|[^\]\\])*\]  # one character, or a class of characters
      | \{(?P<least>\d+)(?P<comma>,(?P<most>\d*))?\}          # a counted repetition
      | (?P<plain>[^\\\[({)]+)                               # characters that stand for themselves
      | . """,
    re.VERBOSE | re.DOTALL,
)


def _expanded_size(pattern: str, place: str, param: str) -> int:
    """Return the number of characters of a pattern with its repetitions expanded. Raises InvalidValue."""
    at = f" at `{place}`" if place else ""
    if len(pattern.encode()) > PATTERN_BYTES:
        raise InvalidValue(f"The pattern{at} is longer than {PATTERN_BYTES} bytes. Shorten it.", param=param)
    if pattern.count("(") > PATTERN_GROUPS:
        text = f"The pattern{at} has more than {PATTERN_GROUPS} groups. Use fewer."
        raise InvalidValue(text, param=param)
    sizes, last = [0], 0  # sizes of the open groups, and of the part that a repetition would repeat
    for found in _PART.finditer(pattern):
        part = found[0]
        if found["least"]:
            counts = [int(digits) if len(digits) < 8 else _ENDLESS for digits in found.group("least", "most") if digits]
            count = max(counts) + (found["comma"] is not None and not found["most"])  # one more if it is unbounded
            if count > PATTERN_COUNT:
                raise InvalidValue(
                    f"The pattern{at} repeats up to {part}: at most {PATTERN_COUNT} times is allowed. Use `+` or `*`, "
                    "or `maxLength` instead of a pattern.",
                    param=param,
                )
            sizes[-1] += last * (max(count, 1) - 1)
            last *= max(count, 1)
        elif found["plain"]:
            last = 1
            sizes[-1] += len(part)
        elif part == "(":
            sizes.append(0)
            last = 0
        elif part == ")" and len(sizes) > 1:
            last = max(sizes.pop(), 1)
            sizes[-1] += last
        else:
            last = 1 + len(part) // 4 if part[0] == "[" else 1
            sizes[-1] += last
    total = sum(sizes)
    if total > PATTERN_EXPANDED:
        raise InvalidValue(
            f"The pattern{at} has more than {PATTERN_EXPANDED:,} characters with its repetitions written out. "
            "Repeat less, or not inside another repetition.",
            param=param,
        )
    return total
