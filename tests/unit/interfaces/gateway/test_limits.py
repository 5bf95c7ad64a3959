"""Requests, tokens and places are limited for each organization and each key on its own."""

import pytest

from apps.core.errors import RateLimited
from apps.interfaces.gateway.admission import limits as limiting
from apps.interfaces.gateway.admission.limits import (
    MAX_ABANDONED_TOKENS,
    MAX_ENGINE_FAILURES,
    OpenRequests,
    OwnerLimits,
    Rates,
    duration,
)


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 1000.0

    monkeypatch.setattr(limiting.time, "monotonic", lambda: Clock.now)
    return Clock


def limits_of(owner_id: str, **limits: int | None) -> OwnerLimits:
    return OwnerLimits(owner_id=owner_id, owner="Your organization", **limits)


def test_a_minutes_requests_pass_and_the_next_waits_for_its_turn(clock):
    rates, one, other = Rates(), limits_of("org_1", requests_per_minute=6), limits_of("org_2", requests_per_minute=6)
    for _ in range(6):
        rates.take_request([one])

    with pytest.raises(RateLimited) as refused:
        rates.take_request([one])
    rates.take_request([other])
    clock.now += 10
    rates.take_request([one])

    assert refused.value.data["retry_after_seconds"] == 10


async def test_a_burst_begins_a_seconds_worth_and_then_as_many_a_second_as_the_limit(clock, monkeypatch):
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(limiting.asyncio, "sleep", sleep)
    rates, one, other = Rates(), limits_of("org_1", requests_per_minute=6000), limits_of("org_2")

    async def begin(owner: OwnerLimits, requests: int) -> int:
        """Return how many of the requests had to wait."""
        waited.clear()
        for _ in range(requests):
            await rates.wait_turn([owner])
        return len(waited)

    assert await begin(one, 300) == 200 and waited[-1] == pytest.approx(2.0)
    assert await begin(other, 300) == 0
    clock.now += 10
    assert await begin(one, 100) == 0
    assert await begin(limits_of("org_3", requests_per_minute=6), 16) == 0


@pytest.mark.parametrize("per_minute", [7, 43, 1000])
def test_who_waits_as_long_as_told_is_let_through(clock, per_minute):
    rates, one = Rates(), limits_of("org_1", requests_per_minute=per_minute)
    for _ in range(per_minute):
        rates.take_request([one])
    with pytest.raises(RateLimited) as refused:
        rates.take_request([one])

    clock.now += refused.value.data["retry_after_seconds"]

    rates.take_request([one])


def test_no_limit_and_a_limit_of_zero(clock):
    rates = Rates()
    rates.take_request([limits_of("org_1")])

    with pytest.raises(RateLimited):
        rates.take_request([limits_of("org_2", requests_per_minute=0)])


def test_a_keys_own_limit_holds_beside_its_organizations_and_takes_nothing_when_refused(clock):
    rates, organization = Rates(), limits_of("org_1", requests_per_minute=60)
    key = limits_of("key_1", requests_per_minute=1)
    rates.take_request([organization, key])

    with pytest.raises(RateLimited):
        rates.take_request([organization, key])

    assert b"x-ratelimit-remaining-requests: 59\r\n" in rates.headers([organization])
    assert b"x-ratelimit-remaining-requests: 0\r\n" in rates.headers([organization, key])


def test_tokens_are_taken_by_estimate_and_corrected_by_use(clock):
    rates, one = Rates(), limits_of("org_1", tokens_per_minute=600)
    rates.take_tokens([one], 500)
    with pytest.raises(RateLimited) as refused:
        rates.take_tokens([one], 200)
    assert refused.value.data["retry_after_seconds"] == 10

    rates.correct([one], taken=500, used=50)
    rates.take_tokens([one], 500)
    rates.correct([one], taken=500, used=900)  # more than foreseen: a debt

    with pytest.raises(RateLimited):
        rates.take_tokens([one], 1)
    clock.now += 60
    rates.take_tokens([one], 100)


def test_a_request_above_a_minutes_tokens_waits_for_a_full_bucket_and_passes(clock):
    rates, one = Rates(), limits_of("org_1", tokens_per_minute=100)
    rates.take_tokens([one], 5000)
    with pytest.raises(RateLimited):
        rates.take_tokens([one], 5000)
    clock.now += 60
    rates.take_tokens([one], 5000)


def test_headers_are_the_standard_ones(clock):
    rates, one = Rates(), limits_of("org_1", requests_per_minute=60, tokens_per_minute=1200)
    rates.take_request([one])
    rates.take_tokens([one], 30)

    assert rates.headers([one]).decode().splitlines() == [
        "x-ratelimit-limit-requests: 60",
        "x-ratelimit-remaining-requests: 59",
        "x-ratelimit-reset-requests: 1s",
        "x-ratelimit-limit-tokens: 1200",
        "x-ratelimit-remaining-tokens: 1170",
        "x-ratelimit-reset-tokens: 1.5s",
    ]
    assert [duration(seconds) for seconds in (0.02, 1.5, 360)] == ["20ms", "1.5s", "6m0s"]
    assert [duration(seconds) for seconds in (0.9996, 59.96, 59.996, 119.6)] == ["1s", "59.96s", "1m0s", "2m0s"]


def test_an_organization_on_whose_requests_engines_fail_waits_and_others_do_not(clock):
    rates, one, other = Rates(), [limits_of("org_1")], [limits_of("org_2")]
    for _ in range(MAX_ENGINE_FAILURES + 1):
        rates.require_few_wasted(one)
        rates.record_failure(one)

    with pytest.raises(RateLimited) as refused:
        rates.require_few_wasted(one)
    rates.require_few_wasted(other)

    clock.now += refused.value.data["retry_after_seconds"]
    rates.require_few_wasted(one)


def test_an_organization_that_gives_up_many_read_prompts_waits_and_others_do_not(clock):
    """They are free, because their engines counted no tokens."""
    rates, one, other = Rates(), [limits_of("org_1")], [limits_of("org_2")]
    rates.record_abandoned(one, MAX_ABANDONED_TOKENS)  # one long prompt
    rates.require_few_wasted(one)
    for _ in range(500):
        rates.record_abandoned(one, MAX_ABANDONED_TOKENS)

    with pytest.raises(RateLimited) as refused:
        rates.require_few_wasted(one)
    rates.require_few_wasted(other)
    assert refused.value.data["retry_after_seconds"] == 300
    clock.now += 300
    rates.require_few_wasted(one)


def test_what_a_body_was_counted_as_stays_taken_when_its_request_is_refused(clock):
    rates, one = Rates(), [limits_of("org_1", tokens_per_minute=100)]
    rates.take_tokens(one, 60)
    rates.take_all_tokens(one, 90, taken=60)  # in its place, not beside it
    rates.correct(one, taken=90, used=50)

    rates.take_tokens(one, 20)
    with pytest.raises(RateLimited):
        rates.take_all_tokens(one, 60, taken=20)
    rates.take_tokens(one, 30)
    with pytest.raises(RateLimited):
        rates.take_tokens(one, 1)


def test_places_for_structured_answers_are_few_and_given_back():
    places, one, other = OpenRequests(), [limits_of("org_1")], [limits_of("org_2")]
    with places.one_more_structured(one), places.one_more_structured(one):
        with pytest.raises(RateLimited), places.one_more_structured(one):
            pass
        with places.one_more(one), places.one_more_structured(other):
            pass

    with places.one_more_structured(one):
        pass


def test_a_key_may_have_fewer_at_once_than_its_organization():
    places = OpenRequests()
    organization, key = limits_of("org_1", concurrent_requests=3), limits_of("key_1", concurrent_requests=1)
    other_key = limits_of("key_2")
    with places.one_more([organization, key]):
        with pytest.raises(RateLimited), places.one_more([organization, key]):
            pass
        with places.one_more([organization, other_key]):
            pass
