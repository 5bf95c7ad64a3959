"""The base of every wire type."""

import msgspec


class Struct(msgspec.Struct, frozen=True, kw_only=True):
    """A wire type. Unknown fields are ignored on decode, so that old and new code can talk."""
