"""A form field for a quantity with its unit, such as "20 GB", "100 hours" or "2 million tokens".

Units are read and shown in the reader's language, and always read in English. A decimal comma is read as such. "1,500"
is 1500 to an English reader, as pages show it. To others it may be 1.5, so they are asked.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal

from django import forms
from django.utils.translation import get_language, gettext, gettext_noop

from apps.core.http.forms import LARGEST_BIG_INTEGER, LARGEST_INTEGER
from apps.core.messages.translation import later
from apps.core.templatetags.ui import duration

_NUMBER = re.compile(r"([0-9][0-9.,]*)\s*(.*)", re.DOTALL)
_GROUPED = re.compile(
    r"[1-9][0-9]{0,2}(?:,[0-9]{3})+(?:\.[0-9]+)?"  # 1,234 or 1,234.5
    r"|[1-9][0-9]{0,2}(?:\.[0-9]{3})+,[0-9]+|[1-9][0-9]{0,2}(?:\.[0-9]{3}){2,}"  # 1.234,5 or 1.234.567
)
_PLAIN = re.compile(r"[0-9]+(?:[.,][0-9]+)?")
_UNCLEAR = re.compile(r"[1-9][0-9]{0,2}[.,][0-9]{3}")  # 0.125 is clear
# The words of units, which people may write in their language.
_WORDS = (
    gettext_noop("hours"), gettext_noop("hour"), gettext_noop("minutes"), gettext_noop("minute"),
    gettext_noop("seconds"), gettext_noop("second"), gettext_noop("days"), gettext_noop("day"), gettext_noop("bytes"),
    gettext_noop("byte"), gettext_noop("jobs"), gettext_noop("job"), gettext_noop("requests"), gettext_noop("request"),
    gettext_noop("tokens"), gettext_noop("token"), gettext_noop("thousand"), gettext_noop("million"),
    gettext_noop("millions"), gettext_noop("billion"), gettext_noop("billions"),
)  # fmt: skip
_MULTIPLES = {"": 1, "k": 10**3, "thousand": 10**3, "m": 10**6, "million": 10**6, "b": 10**9, "billion": 10**9}


@dataclass(frozen=True)
class Units:
    """How a quantity is written.

    `shown` has units from large to small, each with its size in what is stored; `read` has those that are understood,
    in lower case and singular. After the unit, one of the phrases `tails` may follow.
    """

    shown: Mapping[str, int]
    read: Mapping[str, int]
    example: str
    tails: tuple[str, ...] = ()
    largest: int = LARGEST_BIG_INTEGER

    def words(self, value: int) -> str:
        """Return a quantity in the largest unit that needs few decimals."""
        smallest = list(self.shown)[-1]
        parts = 1000 if _is_english() else 100  # "1,234 KB" would be unclear
        units = (each for each, size in self.shown.items() if size <= value and value * parts % size == 0)
        unit = next(units, smallest)
        count = Decimal(value) / self.shown[unit]
        shown = gettext(unit if count != 1 else unit.removesuffix("s"))
        return f"{count:,f} {shown}" if _is_english() else f"{f'{count:f}'.replace('.', ',')} {shown}"

    def parse(self, text: str) -> int:
        """Return the quantity. Raises ValidationError."""
        found = _NUMBER.fullmatch(text.lower().replace("gpu-", "gpu ").strip())
        if found is None:
            raise forms.ValidationError(
                gettext("Write a number with its unit, such as %(example)s.") % {"example": self.example}
            )
        number, unit = self._number(found[1]), " ".join(found[2].split())
        for tail in self.tails:
            unit = unit.removesuffix(tail).removesuffix(gettext(tail).lower()).rstrip()
        english = {gettext(word).lower(): word for word in _WORDS}
        if "billion" not in english:  # in other languages, a word like it is 10^12
            english |= {"billion": "?", "billions": "?"}
        words = (english.get(word, word) for word in unit.split())
        size = self.read.get(" ".join(word.removesuffix("s") or word for word in words))
        if size is None:
            unknown = (
                gettext("%(unit)s is not a unit here") % {"unit": repr(unit)}
                if unit
                else gettext("The unit is missing")
            )
            raise forms.ValidationError(
                gettext("%(unknown)s: write it like %(example)s.") % {"unknown": unknown, "example": self.example}
            )
        value = number * size
        if value > self.largest:
            raise forms.ValidationError(gettext("Write at most %(largest)s.") % {"largest": self.words(self.largest)})
        if value != int(value) and size == 1:
            raise forms.ValidationError(
                gettext("Write a whole number, such as %(example)s.") % {"example": self.example}
            )
        return int(value)

    def _number(self, text: str) -> Decimal:
        """Return a number with a decimal point or comma. Raises ValidationError."""
        if not _is_english() and _UNCLEAR.fullmatch(text):
            whole, part = re.split("[.,]", text)
            raise forms.ValidationError(
                gettext("%(text)s can mean two numbers: write %(large)s or %(small)s.")
                % {"text": text, "large": whole + part, "small": f"{whole},{part.rstrip('0') or '0'}"}
            )
        if _GROUPED.fullmatch(text):
            decimal = max(".,", key=text.rfind) if "." in text and "," in text else ""
            whole, _, part = text.rpartition(decimal) if decimal else (text, "", "")
            return Decimal(f"{re.sub('[.,]', '', whole)}.{part or 0}")
        if _PLAIN.fullmatch(text):
            return Decimal(text.replace(",", "."))
        raise forms.ValidationError(
            gettext("Write a number with its unit, such as %(example)s.") % {"example": self.example}
        )


def _is_english() -> bool:
    return (get_language() or "en").startswith("en")


def count_of(noun: str, *, example: str, tails: tuple[str, ...]) -> Units:
    """Return the units of a count of things. Their name may be left out."""
    one = noun.removesuffix("s").lower()
    read = {f"{multiple} {each}".strip(): size for multiple, size in _MULTIPLES.items() for each in ("", one)}
    return Units({noun: 1}, read, example, tails, LARGEST_INTEGER)


BYTES = Units(
    shown={"TB": 10**12, "GB": 10**9, "MB": 10**6, "KB": 10**3, "bytes": 1},
    read={"tb": 10**12, "gb": 10**9, "mb": 10**6, "kb": 10**3, "b": 1, "byte": 1}
    | {"tib": 2**40, "gib": 2**30, "mib": 2**20, "kib": 2**10},
    example="20 GB",
)
_SECONDS = {"day": 86_400, "d": 86_400, "hour": 3600, "h": 3600, "minute": 60, "min": 60, "second": 1, "s": 1}
GPU_TIME = Units(
    shown={"hours": 3600, "minutes": 60, "seconds": 1},
    read=_SECONDS | {f"gpu {unit}": size for unit, size in _SECONDS.items()},
    example=later("100 hours"),
    tails=(gettext_noop("a month"), gettext_noop("per month")),
)


def gpu_time(seconds: float) -> str:
    """Return used GPU time: in hours, from one hour on."""
    return duration(seconds) if seconds < 3600 else gettext("%(seconds)s hours") % {"seconds": f"{seconds / 3600:,.1f}"}


class QuantityField(forms.CharField):
    """Text such as "20 GB" that is cleaned to an integer; None if it is empty."""

    def __init__(self, units: Units, *, label: str) -> None:
        super().__init__(required=False, max_length=60, label=label)
        self.units = units

    def prepare_value(self, value: object) -> object:
        return self.units.words(value) if isinstance(value, int) else value

    def clean(self, value: object) -> int | None:
        text = super().clean(value)
        return self.units.parse(text) if text else None
