"""Texts that a page shows in the reader's language, of modules that are imported before anybody reads."""

from typing import cast

from django.utils.translation import gettext_lazy


def later(text: str) -> str:
    """Return a text that is translated each time it is shown: by a template, an f-string or a form.

    It is no real string: what needs one, such as `join` or a pattern, takes `str` of it.
    """
    return cast(str, gettext_lazy(text))
