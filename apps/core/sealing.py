"""Sealing of the few secrets that must be read back: AES-256-GCM under a key derived from settings.SECRET_KEY.

A sealed value opens only in the place it was sealed for, so that nobody can move it to another row.
"""

import os
from functools import cache

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from django.conf import settings

_VERSION = b"\x01"
_NONCE_BYTES = 12


class SealBroken(Exception):
    """The value was altered, moved to another place, or sealed under another secret key."""


def place_of(*, table: str, column: str, row_id: str) -> bytes:
    """Return the name of one field of one row, to which a seal is bound."""
    return f"{table}:{column}:{row_id}".encode()


def seal(secret: str, *, place: bytes) -> bytes:
    """Return `secret` encrypted for `place`."""
    nonce = os.urandom(_NONCE_BYTES)
    return _VERSION + nonce + _cipher(settings.SECRET_KEY).encrypt(nonce, secret.encode(), place)


def unseal(sealed: bytes, *, place: bytes) -> str:
    """Return what was sealed for `place`. Raises SealBroken."""
    sealed = bytes(sealed)
    nonce, ciphertext = sealed[1 : 1 + _NONCE_BYTES], sealed[1 + _NONCE_BYTES :]
    if sealed[:1] != _VERSION or len(nonce) != _NONCE_BYTES:
        raise SealBroken("not a sealed value")
    try:
        return _cipher(settings.SECRET_KEY).decrypt(nonce, ciphertext, place).decode()
    except InvalidTag as error:
        raise SealBroken("the seal does not fit this place or this key") from error


@cache
def _cipher(secret_key: str) -> AESGCM:
    derived = HKDF(algorithm=SHA256(), length=32, salt=None, info=b"anneal sealing").derive(secret_key.encode())
    return AESGCM(derived)
