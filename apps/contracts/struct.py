"""The base of every wire type, and the numbers and texts that a worker may send: none that no machine could mean."""

from typing import Annotated

import msgspec
from msgspec import Meta


class Struct(msgspec.Struct, frozen=True, kw_only=True):
    """A wire type. Unknown fields are ignored on decode, so that old and new code can talk."""


Count = Annotated[int, Meta(ge=0, le=2**53)]  # tokens, bytes, sequences: what JSON's readers hold exactly
Steps = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]  # thirty years
Rate = Annotated[float, Meta(ge=0, le=1e12)]  # of anything, a second
Text = Annotated[str, Meta(max_length=300)]
Software = Annotated[dict[Text, Text], Meta(max_length=100)]
