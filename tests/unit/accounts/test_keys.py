"""The text of a key: shape, checksum, fingerprint."""

import string
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apps.accounts.login import api_keys


@pytest.mark.parametrize("prefix", [api_keys.LIVE_PREFIX, api_keys.WEB_PREFIX])
def test_a_new_key_is_well_formed_and_unlike_the_next(prefix: str) -> None:
    first, second = api_keys.new_secret(prefix), api_keys.new_secret(prefix)

    assert api_keys.is_well_formed(first)
    assert first != second
    assert len(first) == len(prefix) + 36


@given(st.text(max_size=60))
def test_random_text_is_no_key(text: str) -> None:
    assert not api_keys.is_well_formed(text)
    assert not api_keys.is_well_formed(api_keys.LIVE_PREFIX + text)


def test_one_changed_character_is_noticed() -> None:
    secret = api_keys.new_secret(api_keys.LIVE_PREFIX)

    for place in range(len(secret)):
        other = "b" if secret[place] != "b" else "c"
        assert not api_keys.is_well_formed(secret[:place] + other + secret[place + 1 :])


def test_the_checksum_is_crc32_in_base62() -> None:
    digits = string.digits + string.ascii_uppercase + string.ascii_lowercase
    body = "ann_live_" + "0" * 30

    value = 0
    for character in api_keys.checksum(body):
        value = value * 62 + digits.index(character)

    assert value == zlib.crc32(body.encode())


def test_the_pepper_changes_the_fingerprint(settings: object) -> None:
    before = api_keys.fingerprint("ann_live_x")
    settings.KEY_PEPPER = "another"  # type: ignore[attr-defined]

    assert api_keys.fingerprint("ann_live_x") != before


def test_what_is_shown_of_a_key_is_too_little_to_use_it() -> None:
    secret = api_keys.new_secret(api_keys.LIVE_PREFIX)

    assert secret.startswith(api_keys.shown_prefix(secret))
    assert len(api_keys.shown_prefix(secret)) == len(api_keys.LIVE_PREFIX) + 4
