"""Sealing of the few recoverable secrets: AES-256-GCM under a key derived from settings.SECRET_KEY.

A sealed value opens only in the place it was sealed for, not in another row. It names its key, so SECRET_KEY can be
replaced: the old key stays in SECRET_KEY_FALLBACKS until `manage.py reseal` has resealed every value.
"""

import hashlib
import os
from functools import cache

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from django.conf import settings

_WITHOUT_KEY_ID, _VERSION = b"\x01", b"\x02"
_KEY_ID_BYTES, _NONCE_BYTES = 8, 12


class SealBroken(Exception):
    """The value was altered, moved to another place, or sealed under a secret key that is no longer known."""


def place_of(*, table: str, column: str, row_id: str) -> bytes:
    """Return the name of one field of one row; a seal is bound to it."""
    return f"{table}:{column}:{row_id}".encode()


def seal(secret: str, *, place: bytes) -> bytes:
    """Return `secret` encrypted for `place`: version, key id, nonce, ciphertext."""
    nonce, key = os.urandom(_NONCE_BYTES), settings.SECRET_KEY
    return _VERSION + _key_id(key) + nonce + _cipher(key).encrypt(nonce, secret.encode(), place)


def unseal(sealed: bytes, *, place: bytes) -> str:
    """Return the secret that was sealed for `place`. Raises SealBroken."""
    sealed = bytes(sealed)
    keys = [settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS]
    if sealed[:1] == _VERSION:
        named, rest = sealed[1 : 1 + _KEY_ID_BYTES], sealed[1 + _KEY_ID_BYTES :]
        keys = [key for key in keys if _key_id(key) == named]
        if not keys:
            raise SealBroken("the value was sealed under a secret key that is not known any more")
    elif sealed[:1] == _WITHOUT_KEY_ID:
        rest = sealed[1:]
    else:
        raise SealBroken("not a sealed value")
    nonce, ciphertext = rest[:_NONCE_BYTES], rest[_NONCE_BYTES:]
    if len(nonce) != _NONCE_BYTES:
        raise SealBroken("not a sealed value")
    for key in keys:
        try:
            return _cipher(key).decrypt(nonce, ciphertext, place).decode()
        except InvalidTag:
            continue
    raise SealBroken("the seal does not fit this place or this key")


def is_current(sealed: bytes) -> bool:
    """Return whether the value is sealed under the current SECRET_KEY and names it."""
    return bytes(sealed)[: 1 + _KEY_ID_BYTES] == _VERSION + _key_id(settings.SECRET_KEY)


@cache
def _key_id(secret_key: str) -> bytes:
    """Return eight bytes that identify a key and reveal nothing about it."""
    return hashlib.sha256(b"anneal seal key id" + secret_key.encode()).digest()[:_KEY_ID_BYTES]


@cache
def _cipher(secret_key: str) -> AESGCM:
    derived = HKDF(algorithm=SHA256(), length=32, salt=None, info=b"anneal sealing").derive(secret_key.encode())
    return AESGCM(derived)
