"""The replay of recorded requests on an engine with continuous batching, and the speeds that are fitted to them."""

import random

import msgspec
import pytest

from apps.estimates.physics.engine_replay import percentile, predict, recommend, replay
from apps.estimates.physics.engine_speeds import EngineSpeeds, RecordedRequest, TooFewRequests, fit_speeds

SPEEDS = EngineSpeeds(
    fixed_seconds=0.01, step_seconds=0.02, sequence_seconds=0.001, prompt_token_seconds=0.0001, tokens_per_step=1000
)


def request(at: float, *, prompt: int = 100, output: int = 10) -> RecordedRequest:
    """A request whose times were not observed."""
    return RecordedRequest(at=at, first_token_seconds=0.0, seconds=0.0, prompt_tokens=prompt, output_tokens=output)


def test_a_request_alone_waits_for_one_step():
    assert replay([request(5.0)], SPEEDS, replicas=1) == [pytest.approx(0.01 + 0.02 + 0.001 + 0.01)]


def test_a_long_prompt_takes_several_steps():
    [seconds] = replay([request(0.0, prompt=2500)], SPEEDS, replicas=1)

    assert seconds == pytest.approx(0.01 + 3 * 0.021 + 2500 * 0.0001)


def test_a_request_waits_for_the_step_that_runs():
    first, second = replay([request(0.0), request(0.001)], SPEEDS, replicas=1)

    own_step = 0.02 + 2 * 0.001 + 0.01  # beside a token of the first request
    assert second == pytest.approx(0.01 + (first - 0.01 - 0.001) + own_step)


def test_above_the_engines_places_requests_wait_for_an_end():
    speeds = msgspec.structs.replace(SPEEDS, max_sequences=1)

    first, second = replay([request(0.0, output=11), request(0.0, output=1)], speeds, replicas=1)

    assert second == pytest.approx(first + 10 * 0.021 + 0.031)


def test_more_replicas_share_the_requests_and_the_first_number_that_is_enough_is_recommended():
    day = [request(number / 20, output=40) for number in range(400)]

    estimates = recommend(day, SPEEDS, first_token_p95=0.06, most=10)

    assert [each.replicas for each in estimates] == list(range(1, len(estimates) + 1))
    assert all(each.first_token_p95 > 0.06 for each in estimates[:-1]) and estimates[-1].first_token_p95 <= 0.06
    assert estimates[-1].busy_share < estimates[0].busy_share <= 1.0
    assert len(recommend(day, SPEEDS, first_token_p95=0.001, most=3)) == 3


def observed(day: list[RecordedRequest], speeds: EngineSpeeds) -> list[RecordedRequest]:
    """The day as an engine of these speeds answers it, by a simulation that takes every step by itself."""
    waiting, running, now, ends = sorted(day, key=lambda each: each.at), [], 0.0, {}
    first_tokens: dict[int, float] = {}
    order = {id(each): number for number, each in enumerate(day)}
    left: dict[int, int] = {}
    while waiting or running:
        if not running and waiting[0].at > now:
            now = waiting[0].at
        fresh = [each for each in waiting if each.at <= now][:10]
        waiting = [each for each in waiting if each not in fresh]
        now += speeds.step_seconds + speeds.sequence_seconds * (len(running) + len(fresh))
        now += speeds.prompt_token_seconds * sum(each.prompt_tokens for each in fresh)
        for each in (*running, *fresh):
            number = order[id(each)]
            first_tokens.setdefault(number, now)
            left[number] = left.get(number, each.output_tokens) - 1
            ends[number] = now
        running = [each for each in (*running, *fresh) if left[order[id(each)]]]
    return [
        RecordedRequest(
            at=each.at,
            first_token_seconds=first_tokens[number] - each.at + speeds.fixed_seconds,
            seconds=ends[number] - each.at + speeds.fixed_seconds,
            prompt_tokens=each.prompt_tokens,
            output_tokens=each.output_tokens,
        )
        for number, each in enumerate(day)
    ]


def make_day(rate: float, *, seed: int, count: int = 600) -> list[RecordedRequest]:
    chance, at, day = random.Random(seed), 0.0, []
    for _ in range(count):
        at += chance.expovariate(rate)
        day.append(request(at, prompt=chance.randint(20, 600), output=chance.randint(1, 60)))
    return day


def test_the_speeds_of_a_quiet_day_predict_a_busy_one():
    speeds = fit_speeds(observed(make_day(4.0, seed=1), SPEEDS), tokens_per_step=10_000)
    busy = observed(make_day(9.0, seed=2), SPEEDS)

    predicted = predict(busy, speeds, replicas=1)

    recorded = [each.first_token_seconds for each in busy]
    assert predicted.first_token_p95 == pytest.approx(percentile(recorded, 0.95), rel=0.1)
    assert predicted.first_token_p50 == pytest.approx(percentile(recorded, 0.5), rel=0.1)
    assert speeds.step_seconds == pytest.approx(SPEEDS.step_seconds, rel=0.2)


def test_too_few_or_equal_requests_determine_no_speeds():
    with pytest.raises(TooFewRequests, match="49 requests were recorded, and 50 are needed"):
        fit_speeds(observed(make_day(4.0, seed=1, count=49), SPEEDS))
