"""The part of a model's name that its owner chose."""

import re
import unicodedata

from django.utils.translation import gettext

from apps.core.errors import InvalidValue

_MAX_SUFFIX = 64


def plain_suffix(text: str, *, param: str = "suffix") -> str:
    """Return the part of a model's name for a suffix as people write it: "Größe 2" becomes "grosse-2".

    Raises InvalidValue if nothing of it remains, or if it is too long.
    """
    letters = unicodedata.normalize("NFKD", text.casefold()).encode("ascii", "ignore").decode()
    suffix = re.sub(r"[^a-z0-9]+", "-", letters)[:_MAX_SUFFIX].strip("-")
    if len(text) > _MAX_SUFFIX or (text and not suffix):
        message = gettext(
            "%(param)s must have at most %(max_suffix)s characters, at least one of them a letter a-z or a digit."
        ) % {"param": param, "max_suffix": _MAX_SUFFIX}
        raise InvalidValue(message, param=param)
    return suffix
