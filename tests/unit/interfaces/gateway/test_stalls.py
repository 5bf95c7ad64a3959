"""A loop that stands still is seen."""

import pytest

from apps.interfaces.gateway import stalls as stalling
from apps.interfaces.gateway.stalls import Stalls


def test_the_longest_stall_of_the_last_minute_is_told_and_then_forgotten(monkeypatch, caplog):
    now = 1000.0
    monkeypatch.setattr(stalling.time, "monotonic", lambda: now)
    stalls = Stalls()
    for at, seconds in ((0, 0.01), (10, 0.3), (20, 0.1), (30, 0.05)):
        now = 1000.0 + at
        stalls.record(seconds)

    assert stalls.longest_of_last_minute() == 0.3
    now = 1000.0 + 75
    assert stalls.longest_of_last_minute() == 0.1
    now = 1000.0 + 200
    assert stalls.longest_of_last_minute() == 0.0
    assert stalls.longest_seconds == pytest.approx(0.3)
    assert "stood still for 300 ms" in caplog.text
