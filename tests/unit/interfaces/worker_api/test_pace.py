"""One machine's calls do not crowd out the others'."""

import pytest

from apps.core.errors import RateLimited
from apps.interfaces.worker_api.pace import CALLS_A_SECOND, CALLS_AT_ONCE, Pace


def take_all(pace: Pace, credential: str) -> int:
    taken = 0
    while taken < 10**6:
        try:
            pace.take(credential)
        except RateLimited:
            return taken
        taken += 1
    raise AssertionError("there is no limit")


def test_a_machine_that_calls_without_end_is_slowed_down_and_another_is_not():
    now = [100.0]
    pace = Pace(lambda: now[0])

    assert take_all(pace, "annw_loud") == CALLS_AT_ONCE
    pace.take("annw_quiet")
    now[0] += 2
    assert take_all(pace, "annw_loud") == 2 * CALLS_A_SECOND
    now[0] += 3600
    assert take_all(pace, "annw_loud") == CALLS_AT_ONCE


def test_made_up_credentials_are_forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("apps.interfaces.worker_api.pace._MAX_KNOWN", 5)
    now = [0.0]
    pace = Pace(lambda: now[0])

    for number in range(1_000):
        now[0] += 11.0
        pace.take(f"annw_{number}")

    assert len(pace._left) <= 6
