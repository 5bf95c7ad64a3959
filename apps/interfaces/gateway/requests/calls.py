"""The arguments of called functions, as a conversation repeats them.

A chat template takes them as an object, so the engine parses them and answers unparsable ones with a 500.
"""

from collections.abc import Iterable

import msgspec

from apps.core.errors import InvalidValue

ARGUMENTS_BYTES = 64 * 1024
ARGUMENTS_DEPTH = 32


def read_arguments(text: str, *, param: str) -> str:
    """Return the arguments in a form that the engine can parse. Raises InvalidValue."""
    if not text:
        return "{}"
    if len(text) > ARGUMENTS_BYTES or len(raw := text.encode()) > ARGUMENTS_BYTES:
        raise InvalidValue(f"`{param}` is larger than {ARGUMENTS_BYTES // 1024} KiB. Shorten it.", param=param)
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidValue(f"`{param}` must be a JSON object, as a string.", param=param) from error
    if not isinstance(value, dict):
        raise InvalidValue(f"`{param}` must be a JSON object, as a string.", param=param)
    if is_deeper(value, ARGUMENTS_DEPTH):
        raise InvalidValue(f"`{param}` is nested deeper than {ARGUMENTS_DEPTH} levels. Flatten it.", param=param)
    return text


def is_deeper(value: object, levels: int) -> bool:
    """Return whether objects and lists are nested deeper than `levels`."""
    layer: list[object] = [value]
    for _ in range(levels + 1):
        inside: list[Iterable[object]] = []
        for one in layer:
            if isinstance(one, dict):
                inside.append(one.values())
            elif isinstance(one, list):
                inside.append(one)
        if not inside:
            return False
        layer = [inner for values in inside for inner in values]
    return True
