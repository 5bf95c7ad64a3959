"""Texts that a page shows in the reader's language, although they were made earlier or are stored in English.

Code that runs for a reader calls `gettext`. Code that runs at import uses `later`. Sentences that are stored, or made
without Django, stay in English, as in the API. Pages show them through `translated`.
"""

import calendar
import re
from collections.abc import Iterator
from functools import cache, lru_cache
from typing import NamedTuple, cast

from django.conf import settings
from django.utils.translation import get_language, gettext, gettext_lazy, trans_real

_VALUE = re.compile(r"%\((\w+)\)s")
_BETWEEN_SENTENCES = re.compile(r"(?<=[.?!]) (?=[A-Z`'])")
_MONTH = re.compile(rf"({'|'.join(calendar.month_name[1:])}) (\d{{4}})")
_LEAST_LETTERS = 4  # of a text around its values: one with fewer would fit anything
_MOST_CHARACTERS = 2_000  # stored texts are shorter


def later(text: str) -> str:
    """Return a text that is translated each time a template, an f-string or a form shows it.

    It is not a real string. Code that needs one, such as `join` or a pattern, must use `str`.
    """
    return cast(str, gettext_lazy(text))


def translated(text: str) -> str:
    """Return stored English text in the reader's language: each sentence in it that the catalogue has.

    Values in a sentence are kept; those that are sentences themselves are translated too.
    """
    language = get_language()
    if not language or language == settings.LANGUAGE_CODE:
        return text
    return _translated(language, str(text))


@lru_cache(maxsize=4_096)
def _translated(language: str, text: str) -> str:
    words = text.strip()
    if not words or len(text) > _MOST_CHARACTERS:
        return text
    if words != text:
        return text.replace(words, _translated(language, words))
    if (found := _whole(language, text)) is not None:
        return found
    if len(sentences := _BETWEEN_SENTENCES.split(text)) > 1:
        return " ".join(_translated(language, sentence) for sentence in sentences)
    return ": ".join(_whole(language, part) or part for part in text.split(": "))


def _whole(language: str, text: str) -> str | None:
    """Return the translation of a text that the catalogue has as a whole, with or without values; else None."""
    if (plain := gettext(text)) != text:
        return plain
    if month := _MONTH.fullmatch(text):
        return f"{gettext(month[1])} {month[2]}"
    for pattern in _patterns(language):
        if values := pattern.values(text):
            shown = {name: _translated(language, value) if " " in value else value for name, value in values.items()}
            return gettext(pattern.text) % shown
    return None


class _Pattern(NamedTuple):
    """A text of the catalogue with values: their names, and the text before, between and after them."""

    text: str
    names: tuple[str, ...]
    literals: tuple[str, ...]

    def values(self, text: str) -> dict[str, str] | None:
        """Return the values with which this text becomes the given one; None if there are none. Takes linear time."""
        first, *others = self.literals
        last = others.pop()
        if not text.startswith(first) or not text.endswith(last):
            return None
        begin, end = len(first), len(text) - len(last)
        found: dict[str, str] = {}
        for name, literal in zip(self.names, [*others, None], strict=True):
            at = end if literal is None else text.find(literal, begin, end)
            value = text[begin:at]
            if at < begin or found.setdefault(name, value) != value or _is_cut_off(value):
                return None
            begin = at + len(literal or "")
        return found


def _is_cut_off(value: str) -> bool:
    """Return whether a value has more than one sentence and its last one continues after the value."""
    return _BETWEEN_SENTENCES.search(value) is not None and not value.endswith((".", "?", "!"))


@cache
def _patterns(language: str) -> tuple[_Pattern, ...]:
    """Return the texts with values of a language's catalogue, those with the most fixed text first."""
    found = [pattern for text in _texts(language) if (pattern := _pattern(text))]
    return tuple(sorted(found, key=lambda pattern: -sum(map(len, pattern.literals))))


def _texts(language: str) -> Iterator[str]:
    catalogue = trans_real.translation(language)._catalog  # type: ignore[attr-defined]  # no public way
    yield from (key for key, words in catalogue.items() if words and isinstance(key, str) and _VALUE.search(key))


def _pattern(text: str) -> _Pattern | None:
    parts = _VALUE.split(text)
    literals = tuple(part.replace("%%", "%") for part in parts[::2])
    is_clear = all(literals[1:-1]) and sum(each.isalpha() for part in literals for each in part) >= _LEAST_LETTERS
    return _Pattern(text, tuple(parts[1::2]), literals) if is_clear else None
