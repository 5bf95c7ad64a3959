"""Ranking of options: the cheapest, the fastest, the recommended one, and those that no other beats."""

from collections.abc import Iterable

import msgspec


class RankedOption(msgspec.Struct, frozen=True, kw_only=True):
    """One option with its expected cost, its expected finish, and the finish that nine cases of ten meet."""

    key: str
    cost_nano: int
    finish_seconds_p50: float
    finish_seconds_p90: float


class Ranking(msgspec.Struct, frozen=True, kw_only=True):
    """Keys of the options. `recommended` is None when none meets the deadline; `front` runs from fast to slow."""

    cheapest: str | None = None
    fastest: str | None = None
    recommended: str | None = None
    front: tuple[str, ...] = ()
    late: frozenset[str] = frozenset()


def rank(choices: Iterable[RankedOption], *, deadline_seconds: float | None = None) -> Ranking:
    """Rank the options.

    The recommended one is the cheapest whose 90th-percentile finish is before the deadline, if there is one. Of equal
    costs the earlier finish wins, of equal finishes the lower cost, then the key.
    """
    listed = list(choices)
    if not listed:
        return Ranking()
    in_time = [choice for choice in listed if meets(choice, deadline_seconds)]
    return Ranking(
        cheapest=min(listed, key=_by_cost).key,
        fastest=min(listed, key=_by_finish).key,
        recommended=min(in_time, key=_by_cost).key if in_time else None,
        front=tuple(choice.key for choice in _front(listed)),
        late=frozenset(choice.key for choice in listed if not meets(choice, deadline_seconds)),
    )


def meets(choice: RankedOption, deadline_seconds: float | None) -> bool:
    """Return whether nine cases of ten meet the deadline; without one, every option does."""
    return deadline_seconds is None or choice.finish_seconds_p90 <= deadline_seconds


def _front(choices: Iterable[RankedOption]) -> list[RankedOption]:
    """Return the options that no other option matches in both speed and cost, from fast to slow."""
    front: list[RankedOption] = []
    for choice in sorted(choices, key=_by_finish):
        if not front or choice.cost_nano < front[-1].cost_nano:
            front.append(choice)
    return front


def _by_cost(choice: RankedOption) -> tuple[float, float, str]:
    return choice.cost_nano, choice.finish_seconds_p50, choice.key


def _by_finish(choice: RankedOption) -> tuple[float, float, str]:
    return choice.finish_seconds_p50, choice.cost_nano, choice.key
