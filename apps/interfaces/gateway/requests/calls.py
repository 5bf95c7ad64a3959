"""The arguments of called functions that a conversation repeats.

A chat template expects an object, so the engine parses the arguments and answers invalid ones with a 500.
"""

import msgspec

from apps.contracts.struct import is_deeper
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
