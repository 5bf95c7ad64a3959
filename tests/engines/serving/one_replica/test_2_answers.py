"""What a replica loads and answers, and what of it is counted."""

import json
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from apps.contracts.serving import MAX_CHOICES, EngineCount, LoadState
from gpu_workers.engine.health import count_requests
from tests.support.engines.adapters import make_arrays, make_files
from tests.support.engines.models import BASE_MODEL, SERVED_NAME, name_of
from tests.support.engines.replica import CACHED_ADAPTERS, Replica
from tests.support.engines.world import BOMB, ENDLESS, GOOD, NAN, NOOP, OTHER, PREFIX, THIRD, count
from tests.support.waiting import wait_until


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (NAN, "NaN or infinite"),
        (BOMB, "lora_alpha"),
        (PREFIX, "is missing"),
        (NOOP, "exactly as the base model"),
        ("text", "not one of ours"),
    ],
)
def test_bad_adapter_is_reported_with_its_reason_and_unknown_to_the_engine(
    replica: Replica, name: str, reason: str
) -> None:
    row = replica.plane.get_adapter(name)

    assert row is not None and row.state is LoadState.REJECTED and reason in row.reason
    assert name not in replica.list_loaded()


def test_good_adapters_answer_each_in_its_own_way(replica: Replica) -> None:
    assert set(replica.list_loaded()) == {SERVED_NAME, GOOD, OTHER, THIRD}

    texts = [replica.complete(model).json()["choices"][0]["text"] for model in (SERVED_NAME, GOOD, OTHER, THIRD)]

    assert len(set(texts)) == 4


@pytest.mark.slow
def test_nobody_is_told_what_another_tenant_or_adapter_has_cached(replica: Replica) -> None:
    """A prompt of another tenant is computed anew: neither its count of cached tokens nor its speed reveals it."""
    prompt = "The same question of two tenants, long enough for a block of the cache. " * 12

    def cached(model: str, salt: str) -> int:
        usage = replica.complete(model, prompt=prompt, max_tokens=1, cache_salt=salt).json()["usage"]
        return (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    asked = [(SERVED_NAME, "one"), (SERVED_NAME, "two"), (GOOD, "one"), (GOOD, "two"), (OTHER, "one")]
    before = count(replica, "prefix_cache_hits_total")

    assert [cached(*who) for who in asked] == [0] * len(asked)
    assert count(replica, "prefix_cache_hits_total") == before  # what only looks uncached would be answered sooner
    assert all(cached(*who) > 0 for who in asked)
    assert count(replica, "prefix_cache_hits_total") > before


@pytest.mark.slow
def test_what_is_metered_of_a_replica_is_what_it_reports_of_its_engine(replica: Replica) -> None:
    """A prompt counts once for each choice, cached or not, and the agent's own canaries do not count at all."""

    def reported() -> EngineCount:
        replica.engine_http.post("/v1/completions", json={"model": "nobody", "prompt": "x"})  # refused: counts nothing
        seen = len(replica.plane.observed)
        wait_until(lambda: len(replica.plane.observed) > seen + 2, "reports with a fresh reading")
        found = replica.plane.observed[-1].counted
        assert found is not None
        return found

    before, read, written = reported(), 0, 0
    for model, fields in [
        (SERVED_NAME, {}),
        (GOOD, {"n": 3, "temperature": 1}),
        (GOOD, {"n": 20, "temperature": 1}),
        (OTHER, {"prompt": ["One", "and two"], "n": 2, "temperature": 1}),
        (GOOD, {"cache_salt": "one"}),
    ]:
        usage = replica.complete(model, **fields).json()["usage"]
        read += usage["prompt_tokens"] * fields.get("n", 1)
        written += usage["completion_tokens"]
    after = reported()

    assert (after.input_tokens - before.input_tokens, after.output_tokens - before.output_tokens) == (read, written)
    assert count(replica, "prompt_tokens_total") > after.input_tokens  # the rest are the agent's own questions


@pytest.mark.slow
def test_as_many_choices_are_answered_at_once_as_the_gateway_accepts_and_no_more(replica: Replica) -> None:
    asked = ENDLESS | {"n": MAX_CHOICES, "temperature": 1, "max_tokens": 4}

    answer = replica.complete(GOOD, **asked).json()
    refused = replica.complete(GOOD, **asked | {"n": MAX_CHOICES + 1})

    assert [choice["index"] for choice in answer["choices"]] == list(range(MAX_CHOICES))
    assert answer["usage"]["completion_tokens"] == MAX_CHOICES * 4
    assert refused.status_code == 400


def test_report_says_how_to_reach_the_replica_and_what_it_takes(replica: Replica) -> None:
    observed = replica.plane.observed[-1]

    assert observed.url == f"unix://{replica.listen}"
    assert (observed.capacity, observed.max_lora_rank, observed.nan_requests_total) == (
        6,
        16,
        0,
    )  # eight in the engine's cache, two of them for those that come and go
    assert replica.get_state().generation == observed.engine_generation


def test_stream_is_the_whole_answer_and_ends_with_usage(replica: Replica) -> None:
    asked = ENDLESS | {"max_tokens": 24, "temperature": 0}
    body = {"model": GOOD, "prompt": "My card", "stream": True} | asked
    with replica.http.stream("POST", "/v1/completions", json=body) as answer:
        *events, end, rest = answer.read().decode().split("\n\n")

    assert answer.headers["content-type"].startswith("text/event-stream")
    assert (end, rest) == ("data: [DONE]", "")
    pieces = [json.loads(event.removeprefix("data: ")) for event in events]
    assert pieces[-1]["usage"]["completion_tokens"] == 24
    text = "".join(choice["text"] for piece in pieces for choice in piece["choices"])
    assert text == replica.complete(GOOD, **asked).json()["choices"][0]["text"]


def test_a_streams_first_piece_comes_while_the_rest_is_made_and_leaving_ends_it(replica: Replica) -> None:
    body = {"model": GOOD, "prompt": "My card", "stream": True} | ENDLESS
    before = count(replica, "generation_tokens_total")
    with replica.http.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_raw())

    # The engine hands out tokens before it counts the step that made them: until then, no request seems to run.
    wait_until(lambda: count(replica, "generation_tokens_total") > before, "the request to be counted")
    wait_until(lambda: count(replica, "num_requests_running") == 0, "the abandoned request to stop")
    assert count(replica, "generation_tokens_total") - before < ENDLESS["max_tokens"] - 80


@pytest.mark.slow
def test_cold_adapter_gets_its_turn_between_two_hot_ones(replica: Replica) -> None:
    """Each hot one has three answers under way that end in turns, so that the engine itself would never let it go."""
    stop = threading.Event()
    cold_asked_at: list[float] = []

    def has_been_hot_enough(answers: int) -> bool:
        """Much longer than a turn takes: without turns the cold one is answered only now."""
        return bool(cold_asked_at) and answers >= 6 and time.monotonic() - cold_asked_at[0] > 12

    def keep_busy(model: str, max_tokens: int) -> None:
        answers = 0
        while not stop.is_set() and not has_been_hot_enough(answers):
            assert replica.complete(model, **ENDLESS | {"max_tokens": max_tokens}).status_code == 200
            max_tokens = 48
            answers += bool(cold_asked_at)

    threads = [
        threading.Thread(target=keep_busy, args=(model, tokens)) for model in (GOOD, OTHER) for tokens in (16, 32, 48)
    ]
    try:
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        cold_asked_at.append(time.monotonic())
        answer = replica.complete(THIRD, max_tokens=1)
        is_still_hot = all(thread.is_alive() for thread in threads)
    finally:
        stop.set()
        for thread in threads:
            thread.join()

    assert answer.status_code == 200
    assert is_still_hot


@pytest.mark.slow
def test_what_an_abandoned_stream_said_it_used_is_what_the_engine_counted(replica: Replica) -> None:
    def count_generated() -> float:
        return count(replica, "generation_tokens_total")

    engine_core = replica.wait_for_title("VLLM::EngineCor").pid
    before, said = count_generated(), 0
    body = {"model": GOOD, "prompt": "My card", "stream": True} | ENDLESS
    try:
        with (
            suppress(httpx.ReadTimeout),  # it says no more, and the client leaves
            replica.http.stream("POST", "/v1/completions", json=body, timeout=httpx.Timeout(60, read=10)) as answer,
        ):
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    said = json.loads(line[6:])["usage"]["completion_tokens"]
                if said >= 12:
                    os.kill(engine_core, signal.SIGSTOP)  # or it would write on until it hears that the client left
        wait_until(lambda: count_requests(replica.paths.socket) == 0, "the leaving to be heard")
    finally:
        os.kill(engine_core, signal.SIGCONT)
    wait_until(lambda: count(replica, "num_requests_running") == 0, "the abandoned request to stop")

    assert 0 <= count_generated() - before - said <= 2  # what was under way when the client left


@pytest.mark.slow
def test_adapters_that_come_and_go_meanwhile_change_no_answer(replica: Replica, tmp_path: Path) -> None:
    """More are loaded than the engine's cache holds: those being served are pushed out and read again from disk."""
    greedy = {"max_tokens": 64, "ignore_eos": True, "temperature": 0}
    wanted = {model: replica.complete(model, **greedy).json()["choices"][0]["text"] for model in (GOOD, OTHER)}
    for name, data in make_files(make_arrays(BASE_MODEL, seed=5)).items():
        (tmp_path / name).write_bytes(data)
    stop = threading.Event()
    loads: list[int] = []

    def churn() -> None:
        while len(loads) < 400 and not stop.wait(0.1):  # more during an answer than the cache holds
            body = {"lora_name": name_of(f"churn{len(loads):03}"), "lora_path": str(tmp_path)}
            loads.append(replica.engine_http.post("/v1/load_lora_adapter", json=body).status_code)

    thread = threading.Thread(target=churn)
    thread.start()
    wait_until(lambda: len(loads) > CACHED_ADAPTERS, "more strangers than the cache holds")
    answers = [(model, replica.complete(model, **greedy)) for model in (GOOD, OTHER) * 2]
    stop.set()
    thread.join()

    assert set(loads) == {200}
    assert [answer.status_code for _, answer in answers] == [200] * 4
    assert [answer.json()["choices"][0]["text"] for _, answer in answers] == [wanted[model] for model, _ in answers]
    known = {SERVED_NAME, GOOD, OTHER, THIRD}
    wait_until(lambda: set(replica.list_loaded()) == known, "the agent to clear the strangers")
