"""The base of every wire type, with bounds for the numbers, texts and nesting that a worker or customer may send."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Annotated

import msgspec
from msgspec import Meta


class Struct(msgspec.Struct, frozen=True, kw_only=True):
    """A wire type. Decoding ignores unknown fields, so old and new code can communicate."""


def prepare_types() -> None:
    """Have msgspec look at every type that is defined. Call it in one thread, before others use types.

    msgspec looks at a type and those inside it when a decoder or `convert` first meets it. Meanwhile version 0.22 lets
    other threads use the unfinished result, which ends the process with a segmentation fault.
    """
    for kind in _kinds_of(msgspec.Struct):
        with suppress(TypeError):  # a type that can only be encoded, such as one with a union of untagged types
            msgspec.json.Decoder(kind)


def _kinds_of(base: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _kinds_of(kind)


Count = Annotated[int, Meta(ge=0, le=2**53)]  # tokens, bytes, sequences: integers that JSON readers keep exact
Steps = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]  # thirty years
Rate = Annotated[float, Meta(ge=0, le=1e12)]  # of anything, per second
Text = Annotated[str, Meta(max_length=300)]
Software = Annotated[dict[Text, Text], Meta(max_length=100)]


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
