"""Errors for input that cannot be answered, with the option at fault and the names probably meant."""

import difflib
from collections.abc import Iterable

_CLOSE_ENOUGH = 0.4
_MOST_NEAR = 4


class BadOption(Exception):
    """An option has a wrong value. `option` is its spelling, such as "--gpu"; `near` are similar names that exist."""

    def __init__(self, option: str, message: str, *, near: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.option = option
        self.message = message
        self.near = tuple(near)


def near_names(name: str, known: Iterable[str]) -> tuple[str, ...]:
    """Return the known names most like this one: those that contain it, then those with similar spelling."""
    wanted, by_lower = name.lower(), {each.lower(): each for each in known}
    containing = sorted(each for each in by_lower if wanted and wanted in each)
    alike = difflib.get_close_matches(wanted, list(by_lower), n=_MOST_NEAR, cutoff=_CLOSE_ENOUGH)
    return tuple(by_lower[each] for each in dict.fromkeys((*containing, *alike)))[:_MOST_NEAR]
