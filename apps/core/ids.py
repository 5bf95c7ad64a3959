"""Identifiers: a readable prefix and a ULID, so that ids sort by creation time and never collide across replicas."""

import os
import re
import time
from typing import Any

from django.db import models

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford base 32, lower case
_PAIRS = [first + second for first in _ALPHABET for second in _ALPHABET]  # ten bits at a time
_FIVE_BITS = bytes(ord(_ALPHABET[byte & 31]) for byte in range(256))
ULID_LENGTH = 26
_TAIL_LENGTH, _POOLED = 16, 128
_ULID = re.compile(rf"[{_ALPHABET}]{{{ULID_LENGTH}}}")


def new_ulid() -> str:
    """Return 26 characters: 48 bits of Unix milliseconds, then 80 random bits (https://github.com/ulid/spec)."""
    global _moment
    milliseconds = int(time.time() * 1000)
    known, written = _moment
    if known != milliseconds:
        written = "".join([_PAIRS[(milliseconds >> shift) & 1023] for shift in range(40, -1, -10)])
        _moment = milliseconds, written
    return written + _random_tail()


_moment = -1, ""  # the milliseconds of the last identifier, and their encoding
_tails: list[str] = []  # made in batches, because one kernel call costs more than the rest of an id
os.register_at_fork(after_in_child=_tails.clear)


def _random_tail() -> str:
    """Return 16 characters of five random bits each. No two threads or processes get the same ones."""
    try:
        return _tails.pop()
    except IndexError:
        text = os.urandom(_TAIL_LENGTH * _POOLED).translate(_FIVE_BITS).decode()
        _tails.extend(text[place : place + _TAIL_LENGTH] for place in range(_TAIL_LENGTH, len(text), _TAIL_LENGTH))
        return text[:_TAIL_LENGTH]


def random_name() -> str:
    """Return 26 characters of 130 random bits, shaped like a ULID: a name that cannot be guessed."""
    return os.urandom(ULID_LENGTH).translate(_FIVE_BITS).decode()


def new_id(prefix: str, separator: str = "_") -> str:
    return f"{prefix}{separator}{new_ulid()}"


def ulid_of(identifier: str) -> str:
    """Return the ULID inside a prefixed id. Raises ValueError if there is none."""
    tail = identifier[-ULID_LENGTH:]
    if not _ULID.fullmatch(tail):
        raise ValueError(f"{identifier!r} does not end in a ULID")
    return tail


class IdField(models.CharField):
    """A primary key like `ds_01h…`. The prefix names the kind of object."""

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
