"""Identifiers: a readable prefix and a ULID, so that ids sort by creation time and never collide across replicas."""

import os
import re
import secrets
import struct
import time
from typing import Any

from django.db import models

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford base 32, lower case
_PAIRS = [first + second for first in _ALPHABET for second in _ALPHABET]  # ten bits at a time
ULID_LENGTH = 26
_POOLED = 128
_ULID = re.compile(rf"[{_ALPHABET}]{{{ULID_LENGTH}}}")


def new_ulid() -> str:
    """Return 26 characters: 48 bits of Unix milliseconds, then 80 random bits (https://github.com/ulid/spec)."""
    number = (int(time.time() * 1000) << 80) | _random_number()
    return "".join([_PAIRS[(number >> shift) & 1023] for shift in range(120, -1, -10)])


_pool: list[int] = []  # random numbers of 80 bits: to ask the kernel for each costs more than all the rest of an id
os.register_at_fork(after_in_child=_pool.clear)


def _random_number() -> int:
    try:
        return _pool.pop()
    except IndexError:
        numbers = struct.iter_unpack(">HQ", os.urandom(10 * _POOLED))
        _pool.extend(high << 64 | low for high, low in numbers)
        return secrets.randbits(80)


def new_id(prefix: str, separator: str = "_") -> str:
    return f"{prefix}{separator}{new_ulid()}"


def ulid_of(identifier: str) -> str:
    """Return the ULID inside a prefixed id. Raises ValueError when there is none."""
    tail = identifier[-ULID_LENGTH:]
    if not _ULID.fullmatch(tail):
        raise ValueError(f"{identifier!r} does not end in a ULID")
    return tail


class IdField(models.CharField):
    """A primary key like `ds_01h…`; the prefix says what the id names."""

    def __init__(self, *, prefix: str, separator: str = "_", **kwargs: Any) -> None:
        self.prefix, self.separator = prefix, separator
        kwargs.setdefault("max_length", len(prefix) + len(separator) + ULID_LENGTH)
        kwargs.setdefault("primary_key", True)
        kwargs.setdefault("editable", False)
        super().__init__(**kwargs)

    def deconstruct(self) -> tuple:
        name, path, args, kwargs = super().deconstruct()
        kwargs |= {"prefix": self.prefix, "separator": self.separator}
        return name, path, args, kwargs

    def get_default(self) -> str:
        return new_id(self.prefix, self.separator)

    def has_default(self) -> bool:
        return True
