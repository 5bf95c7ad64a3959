"""Requests per minute and in progress are limited for each organization on its own."""

import pytest

from apps.core.errors import RateLimited
from apps.gateway import limits
from apps.gateway.limits import OpenRequests, RequestRate


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 1000.0

    monkeypatch.setattr(limits.time, "monotonic", lambda: Clock.now)
    return Clock


def test_a_minutes_requests_pass_and_the_next_waits_for_its_turn(clock):
    rate = RequestRate()
    for _ in range(6):
        rate.take("org_1", per_minute=6)

    with pytest.raises(RateLimited) as refused:
        rate.take("org_1", per_minute=6)
    rate.take("org_2", per_minute=6)
    clock.now += 10
    rate.take("org_1", per_minute=6)

    assert refused.value.data["retry_after_seconds"] == 10


def test_no_limit_and_a_limit_of_zero(clock):
    rate = RequestRate()
    rate.take("org_1", per_minute=None)

    with pytest.raises(RateLimited):
        rate.take("org_1", per_minute=0)


def test_places_for_structured_answers_are_few_and_given_back():
    places = OpenRequests()
    with places.one_more("org_1", is_structured=True), places.one_more("org_1", is_structured=True):
        with pytest.raises(RateLimited), places.one_more("org_1", is_structured=True):
            pass
        with places.one_more("org_1", is_structured=False), places.one_more("org_2", is_structured=True):
            pass

    with places.one_more("org_1", is_structured=True):
        pass
