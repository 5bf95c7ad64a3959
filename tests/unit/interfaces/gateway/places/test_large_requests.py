"""Requests with many choices: a place for each sequence, neither starved nor starving others, and bounded answers."""

import asyncio
import random

import msgspec
import pytest

from apps.contracts.serving import MAX_CHOICES
from apps.core.errors import InvalidValue, Unavailable
from apps.interfaces.gateway import fair_queue as turning
from apps.interfaces.gateway.fair_queue import FairQueue
from apps.interfaces.gateway.requests.engine_request import MAX_ANSWER_VALUES, EngineRequest
from apps.interfaces.gateway.requests.schema import MAX_STRUCTURED_CHOICES, parse_chat, parse_completion
from apps.interfaces.gateway.surfaces.responses import parse_response
from tests.support.waiting import settle


def ask(turns: FairQueue, tenant: str, count: int, *, replica_ids: tuple[str, ...] = ("r",)) -> "asyncio.Task[str]":
    return asyncio.create_task(turns.take(tenant, replica_ids, count))


async def with_a_large_request() -> tuple[FairQueue, list[str], "asyncio.Task[str]"]:
    """Return a queue of which others hold almost all places, those others, and a request whose turn has come."""
    turns = FairQueue(places=16)  # 14 for all, 2 kept
    others = [await turns.take("busy", ("r",)) and "busy" for _ in range(12)]
    large = ask(turns, "large", 8)
    await settle()
    turns.give_back(others.pop(), "r")
    return turns, others, large


async def test_a_request_takes_a_place_for_each_of_its_sequences():
    turns = FairQueue(places=32)  # 28 for one tenant, 4 kept
    await turns.take("a", ("r1", "r2"), 20)

    assert [await turns.take("a", ("r1", "r2"), 8) for _ in range(4)] == ["r2", "r2", "r2", "r1"]
    assert (turns.count_open("r1"), turns.count_open("r2")) == (28, 24)
    assert turns.take_free("b", ("r1",), 5) is None
    assert turns.take_free("b", ("r1",), 4) == "r1"
    turns.give_back("a", "r1", 20)
    assert turns.count_open("r1") == 28 + 4 - 20


async def test_freed_places_go_to_the_tenant_with_the_fewest_sequences_not_requests():
    turns = FairQueue(places=24)
    await turns.take("large", ("r",), 12)
    for _ in range(9):
        await turns.take("small", ("r",))
    waiting = {tenant: ask(turns, tenant, 3) for tenant in ("large", "small")}
    await settle()

    for _ in range(3):
        turns.give_back("small", "r")
    await settle()

    assert waiting["small"].done() and not waiting["large"].done()
    waiting["large"].cancel()


async def test_a_batch_is_spared_places_by_sequences():
    turns = FairQueue(places=16)
    turns.take_spare("batch", ["r"], 8)

    with pytest.raises(Unavailable):
        turns.require_spare("batch", ["r"])

    turns.give_back("batch", "r", 8)
    turns.require_spare("batch", ["r"], 14)
    assert turns.count_open("r") == 0


async def test_a_batch_leaves_half_of_a_used_replica_free():
    turns = FairQueue(places=256)
    await turns.take("live", ["r"], 96)

    with pytest.raises(Unavailable):
        turns.require_spare("batch", ["r"], 33)

    turns.take_spare("batch", ["r"], 32)
    with pytest.raises(Unavailable):
        turns.require_spare("batch", ["r"], 1)


async def test_no_request_can_get_the_places_that_are_kept_for_others():
    assert [FairQueue(places=places).most_at_once for places in (1, 2, 16, 256)] == [1, 1, 14, 224]


async def _pass_until_stopped(turns: FairQueue, tenant: str, others: list[str]) -> int:
    """Let single sequences of a tenant come and go until one must wait; return how many came before it.

    Those that came are in the list of the places in use, of which the first is given back each time.
    """
    for passed in range(1000):
        one = ask(turns, tenant, 1)
        await settle()
        if not one.done():
            one.cancel()
            await settle()
            return passed
        others.append(tenant)
        turns.give_back(others.pop(0), "r")
        await settle()
    raise AssertionError("nobody ever waited for the large request")


async def test_a_large_request_is_passed_by_as_many_sequences_as_it_has_and_then_gets_its_places():
    turns, others, large = await with_a_large_request()

    assert await _pass_until_stopped(turns, "busy", others) == 8

    while not large.done():
        turns.give_back(others.pop(), "r")
        await settle()
    assert (turns.count_open("r"), len(others)) == (14, 6)  # as soon as they were enough, and none of those kept
    waiting = ask(turns, "busy", 1)
    await settle()
    assert not waiting.done()
    turns.give_back("large", "r", 8)
    await waiting


async def test_tenants_with_few_places_pass_a_large_request_for_a_while_longer():
    turns, others, large = await with_a_large_request()
    await _pass_until_stopped(turns, "busy", others)

    quiet = [ask(turns, f"quiet-{number}", 1) for number in range(3)]
    await settle()

    assert [one.done() for one in quiet] == [True, True, False]
    for one in (large, *quiet):
        one.cancel()


async def test_each_tenant_of_the_replica_may_take_as_many_places_before_a_large_request_as_it_needs():
    turns = FairQueue(places=16)
    others = [await turns.take(tenant, ("r",)) and tenant for tenant in ["busy"] * 6 + ["other"] * 6]
    large = ask(turns, "large", 8)
    await settle()
    turns.give_back(others.pop(0), "r")

    passed = 0
    for tenant in ["busy", "other"] * 20:
        if turns.take_free(tenant, ("r",)):
            passed += 1
            turns.give_back(tenant, "r")

    assert passed == 2 * 8
    large.cancel()


async def test_after_some_time_nobody_passes_a_large_request_any_more(monkeypatch):
    monkeypatch.setattr(turning, "MAX_PASSED_SECONDS", -1.0)
    monkeypatch.setattr(turning, "MIN_PASSED_SECONDS", -1.0)
    turns, others, large = await with_a_large_request()

    assert await _pass_until_stopped(turns, "busy", others) == 0
    large.cancel()


async def test_places_that_were_kept_for_a_request_that_leaves_go_to_others():
    turns, others, large = await with_a_large_request()
    await _pass_until_stopped(turns, "busy", others)
    waiting = [ask(turns, "busy", 1) for _ in range(2)]
    await settle()
    assert not any(one.done() for one in waiting)

    large.cancel()

    assert await asyncio.wait_for(asyncio.gather(*waiting), 1) == ["r", "r"]
    assert turns.count_open("r") == len(others) + 2


async def test_a_request_that_leaves_as_it_gets_its_places_leaves_none_taken():
    turns = FairQueue(places=16)
    await turns.take("a", ("r",), 12)
    leaving = ask(turns, "b", 8)
    await settle()
    turns.give_back("a", "r", 12)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)

    assert (turns.count_open("r"), turns.count_waiting()) == (0, 0)
    assert await turns.take("c", ("r",), 14) == "r"


async def test_one_replica_keeps_places_for_a_large_request_and_the_others_do_not():
    turns = FairQueue(places=16)
    replicas = ("r1", "r2")
    for replica in replicas:
        await turns.take("busy", (replica,), 6)
        for _ in range(6):
            await turns.take("busy", (replica,))
    large = ask(turns, "large", 8, replica_ids=replicas)
    await settle()
    for replica in replicas:
        turns.give_back("busy", replica)
    for _ in range(20):
        for replica in replicas:
            if turns.take_free("busy", (replica,)):
                turns.give_back("busy", replica)
    assert turns.take_free("busy", ("r1",)) is None
    assert turns.take_free("busy", ("r2",)) == "r2"

    waiting = ask(turns, "busy", 1, replica_ids=("r1",))
    await settle()
    turns.give_back("busy", "r2", 6)
    await settle()

    assert large.result() == "r2"
    assert await asyncio.wait_for(waiting, 1) == "r1"  # nothing is kept there any longer


async def test_large_requests_of_many_tenants_all_get_their_places():
    turns, chance = FairQueue(places=16), random.Random(3)

    async def answer(tenant: str, count: int) -> None:
        replica = await turns.take(tenant, ("r1", "r2"), count)
        await asyncio.sleep(chance.random() / 100)
        turns.give_back(tenant, replica, count)

    sizes = [chance.choice((1, 1, 2, 5, 14)) for _ in range(300)]
    asked = [asyncio.create_task(answer(f"t{place % 7}", size)) for place, size in enumerate(sizes)]
    for one in asked[::11]:
        one.cancel()
    outcomes = await asyncio.gather(*asked, return_exceptions=True)

    assert not [one for one in outcomes if isinstance(one, Exception)]
    assert (turns.count_open("r1"), turns.count_open("r2"), turns.count_waiting()) == (0, 0, 0)


# --- What one answer may hold -----------------------------------------------------------------------------------------


def chat(**fields: object) -> EngineRequest:
    return parse_chat(msgspec.json.encode({"model": "m", "messages": [{"role": "user", "content": "Hi"}]} | fields))


def completion(**fields: object) -> EngineRequest:
    return parse_completion(msgspec.json.encode({"model": "m", "prompt": "Hi"} | fields))


def test_the_places_and_tokens_of_a_request_count_each_choice_of_each_prompt():
    asked = completion(prompt=["one", "two"], n=20, max_tokens=50)

    assert asked.sequence_count == 40
    assert asked.output_tokens_bound(512) == 40 * 50
    assert asked.tokens_estimate() - asked.prompt_tokens_estimate() == 40 * 50
    assert chat(n=MAX_CHOICES).output_tokens_bound(512) == MAX_CHOICES * 512


def test_prompts_times_choices_are_bounded():
    assert completion(prompt=["x"] * 8, n=16).sequence_count == MAX_CHOICES
    with pytest.raises(InvalidValue, match="8 prompts with 17 choices") as refused:
        completion(prompt=["x"] * 8, n=17)
    assert refused.value.param == "n"


def test_a_request_with_more_sequences_than_a_replica_takes_is_refused():
    chat(n=14).require_few_sequences(14)
    with pytest.raises(InvalidValue, match="at most 14") as refused:
        chat(n=15).require_few_sequences(14)
    assert refused.value.param == "n"


def test_choices_with_a_grammar_are_few():
    tools = [{"type": "function", "function": {"name": "f"}}]
    for fields in ({"response_format": {"type": "json_object"}}, {"tools": tools}):
        chat(n=MAX_STRUCTURED_CHOICES, **fields)
        with pytest.raises(InvalidValue) as refused:
            chat(n=MAX_STRUCTURED_CHOICES + 1, **fields)
        assert refused.value.param == "n"


@pytest.mark.parametrize(
    ("fields", "most_tokens"),
    [
        ({"n": 128}, 16_384),
        ({"n": 128, "logprobs": True}, 8_192),
        ({"n": 128, "logprobs": True, "top_logprobs": 20}, 744),
        ({"n": 1, "logprobs": True, "top_logprobs": 20}, 95_325),
    ],
)
def test_an_answer_holds_a_bounded_number_of_tokens_and_log_probabilities(fields, most_tokens):
    chat(**fields, max_tokens=most_tokens).require_answer_fits(2**20)
    with pytest.raises(InvalidValue, match=f"`max_tokens` of at most {most_tokens:,}") as refused:
        chat(**fields, max_tokens=most_tokens + 1).require_answer_fits(2**20)
    assert refused.value.param == "max_tokens"


@pytest.mark.parametrize("context_length", [16_384, 16_385])
def test_without_max_tokens_the_answers_end_at_the_most_that_they_may_have(context_length):
    unlimited = chat(n=128)
    unlimited.require_answer_fits(context_length)

    limited = unlimited.with_limit(context_length)

    expected = None if context_length == 16_384 else 16_384
    assert (limited.max_tokens, limited.fields.get("max_tokens")) == (expected, expected)
    assert limited.output_tokens_bound(context_length) == 128 * 16_384


def test_completions_are_bounded_alike():
    most = MAX_ANSWER_VALUES // (8 * 16 * 7)
    completion(prompt=["x"] * 8, n=16, logprobs=5, max_tokens=most).require_answer_fits(2**20)
    with pytest.raises(InvalidValue, match="lower `n` or `logprobs`"):
        completion(prompt=["x"] * 8, n=16, logprobs=5, max_tokens=most + 1).require_answer_fits(2**20)


@pytest.mark.parametrize("ask", [chat, completion])
def test_streamed_answers_that_nobody_holds_are_unbounded(ask):
    streamed = ask(n=128, stream=True, max_tokens=2**20)

    streamed.require_answer_fits(2**20)
    assert ask(n=128, stream=True).with_limit(2**20) == ask(n=128, stream=True)


def test_streamed_answers_that_are_stored_or_repeated_at_their_end_are_bounded():
    stored = chat(n=128, stream=True, store=True)
    response = parse_response(msgspec.json.encode({"model": "m", "input": "Hi", "stream": True, "top_logprobs": 20}))

    for request, most in ((stored, 16_384), (response, 95_325)):
        limited = request.with_limit(2**20)
        assert limited.max_tokens == most
        with pytest.raises(InvalidValue):
            msgspec.structs.replace(request, max_tokens=most + 1).require_answer_fits(2**20)
