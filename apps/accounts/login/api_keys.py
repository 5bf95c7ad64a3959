"""The text of an API key: its format, and the parts of it that are stored.

A key is `ann_live_` (or `ann_web_` for a member's browser), 30 random base62 characters (178 bits), and 6 more: the
CRC-32 of all before them. The CRC detects a typing error or a truncated paste without a query, and lets secret scanners
match exactly. 178 random bits need no slow hash (OWASP ASVS 6.5.2: 112 suffice); the pepper makes a stolen table
useless.
"""

import hashlib
import hmac
import secrets
import string
import zlib

from django.conf import settings

LIVE_PREFIX = "ann_live_"
WEB_PREFIX = "ann_web_"
RANDOM_LENGTH = 30
CHECKSUM_LENGTH = 6
SHOWN_LENGTH = 4  # random characters stored so that people recognise a key

_ALPHABET = string.digits + string.ascii_uppercase + string.ascii_lowercase


def new_secret(prefix: str) -> str:
    body = prefix + "".join(secrets.choice(_ALPHABET) for _ in range(RANDOM_LENGTH))
    return body + checksum(body)


def is_well_formed(secret: str) -> bool:
    """Return whether `secret` has the format of a key, without a query."""
    prefix = next((known for known in (LIVE_PREFIX, WEB_PREFIX) if secret.startswith(known)), None)
    if prefix is None or len(secret) != len(prefix) + RANDOM_LENGTH + CHECKSUM_LENGTH or not secret.isascii():
        return False
    return hmac.compare_digest(secret[-CHECKSUM_LENGTH:], checksum(secret[:-CHECKSUM_LENGTH]))


def checksum(body: str) -> str:
    """Return the CRC-32 of `body` as six base62 digits."""
    number, digits = zlib.crc32(body.encode()), ""
    for _ in range(CHECKSUM_LENGTH):
        number, digit = divmod(number, len(_ALPHABET))
        digits = _ALPHABET[digit] + digits
    return digits


def fingerprint(secret: str) -> str:
    """Return the value stored in place of the key: HMAC-SHA256 under the installation's pepper, in hex."""
    return hmac.new(settings.KEY_PEPPER.encode(), secret.encode(), hashlib.sha256).hexdigest()


def shown_prefix(secret: str) -> str:
    """Return the first characters of a key, which may be shown."""
    prefix = WEB_PREFIX if secret.startswith(WEB_PREFIX) else LIVE_PREFIX
    return secret[: len(prefix) + SHOWN_LENGTH]
