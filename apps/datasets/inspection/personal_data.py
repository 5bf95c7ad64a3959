"""Hints at personal data and secrets in a text. Nothing is ever changed because of a hint.

Candidates with a checksum (cards by Luhn, IBANs by ISO 13616) are checked, so other numbers are not reported as cards.
"""

import re
from enum import StrEnum


class Hint(StrEnum):
    EMAIL = "email"
    PHONE = "phone"
    CARD = "card"
    IBAN = "iban"
    KEY = "key"


# Every pattern takes time in proportion to the text: a match begins at most once in a run, or has a bounded length.
_EMAIL = re.compile(r"(?<=[\w.+-])@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63}){0,9}\.[A-Za-z]{2,24}")
_PHONE = re.compile(
    r"(?<![\w.,-])(?<!\d )(?:\+\d{1,3}[\s().-]{0,2}|\(\d{3}\)\s?|0\d{2,4}[\s/-])\d[\d\s().-]{5,13}\d(?![\w,])"
)
_CARD = re.compile(r"(?<![\d.,-])[3-6]\d{3}(?:[ -]?\d{4}){2}[ -]?\d{1,7}(?![\d.,-]*\d)")
_IBAN = re.compile(r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?\b")
_KEY = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY|\bAKIA[0-9A-Z]{16}\b|\bgh[pousr]_[A-Za-z0-9]{36}|\bxox[abprs]-[A-Za-z0-9-]{10,}"
    r"|\b(?:sk|rk|pk)[-_](?:live_|test_|proj-|ant-)?[A-Za-z0-9_-]{20,}|\bAIza[0-9A-Za-z_-]{35}|\bhf_[A-Za-z]{34}"
    r"|\bann_live_[A-Za-z0-9]{20,}|(?<![\w-])eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,}"
)
_KEY_SIGNS = ("PRIVATE KEY", "AKIA", "gh", "xox", "sk-", "sk_", "rk_", "pk_", "AIza", "hf_", "ann_live_", "eyJ")
_DIGITS = re.compile(r"\d")
_SEPARATORS = str.maketrans("", "", " -")


def find_hints(text: str) -> set[Hint]:
    """Return the kinds of personal data that the text seems to contain."""
    found: set[Hint] = set()
    if "@" in text and _EMAIL.search(text):
        found.add(Hint.EMAIL)
    if any(sign in text for sign in _KEY_SIGNS) and _KEY.search(text):
        found.add(Hint.KEY)
    if _DIGITS.search(text):
        found |= _numbers(text)
    return found


def _numbers(text: str) -> set[Hint]:
    found: set[Hint] = set()
    if any(passes_luhn(match.group().translate(_SEPARATORS)) for match in _CARD.finditer(text)):
        found.add(Hint.CARD)
    if any(is_iban(match.group().replace(" ", "")) for match in _IBAN.finditer(text)):
        found.add(Hint.IBAN)
    if any(9 <= sum(c.isdigit() for c in match.group()) <= 15 for match in _PHONE.finditer(text)):
        found.add(Hint.PHONE)
    return found


def passes_luhn(digits: str) -> bool:
    """Return whether 13 to 19 digits end in a valid check digit of a card (ISO/IEC 7812)."""
    if not 13 <= len(digits) <= 19 or len(set(digits)) == 1:
        return False
    doubled = [int(digit) * 2 for digit in digits[-2::-2]]
    return (
        sum(int(digit) for digit in digits[::-2]) + sum(each - 9 if each > 9 else each for each in doubled)
    ) % 10 == 0


def is_iban(text: str) -> bool:
    """Return whether the text has the length and remainder of an IBAN (ISO 13616)."""
    if not 15 <= len(text) <= 34:
        return False
    return int("".join(str(int(character, 36)) for character in text[4:] + text[:4])) % 97 == 1
