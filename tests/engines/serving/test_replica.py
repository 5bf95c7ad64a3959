"""One replica of real processes, and everything that must not be able to harm it.

The engine starts twice: the tests run in order, the last ones kill it.
"""

import json
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import numpy as np
import pytest

from apps.contracts.serving import DesiredAdapter, EngineCount, LoadState
from gpu_workers.process_tree import Process, is_alive
from tests.engines.serving.adapters import make_arrays, make_files
from tests.engines.serving.control_plane import REPLICA_TOKEN, ControlPlane, wait_until
from tests.engines.serving.replica import Replica, pausing

BASE_MODEL = Path(__file__).resolve().parents[3] / "demo" / "base_model"
SERVED_NAME = "b-demo"


def name_of(word: str) -> str:
    return "a-" + word.ljust(26, "0")


GOOD, OTHER, THIRD = name_of("good"), name_of("other"), name_of("third")
ENDLESS = {"max_tokens": 480, "logit_bias": {"1": -100}}  # 1 ends the text
NAN, BOMB, PREFIX, NOOP = name_of("nan"), name_of("bomb"), name_of("prefix"), name_of("noop")


def make_adapters(plane: ControlPlane) -> dict[str, DesiredAdapter]:
    """Publish three good adapters and one of each bad kind."""
    poisoned = make_arrays(BASE_MODEL)
    next(iter(poisoned.values())).flat[3] = np.nan
    misnamed = {
        name.replace("model.model.", "model.language_model.model."): a for name, a in make_arrays(BASE_MODEL).items()
    }
    idle = {name: a * 0 if ".lora_B." in name else a for name, a in make_arrays(BASE_MODEL).items()}
    files = {
        GOOD: make_files(make_arrays(BASE_MODEL, seed=1)),
        OTHER: make_files(make_arrays(BASE_MODEL, seed=2)),
        THIRD: make_files(make_arrays(BASE_MODEL, seed=3)),
        NAN: make_files(poisoned),
        BOMB: make_files(make_arrays(BASE_MODEL), lora_alpha=1e9),
        PREFIX: make_files(misnamed),
        NOOP: make_files(idle),
        "text": make_files(make_arrays(BASE_MODEL, seed=4)),
    }
    return {name: plane.describe(name, data) for name, data in files.items()}


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    base_model = shutil.copytree(BASE_MODEL, tmp_path_factory.mktemp("base") / "model")
    plane = ControlPlane(base_model_path=str(base_model), served_name=SERVED_NAME)
    yield plane
    plane.close()


@pytest.fixture(scope="module")
def adapters(plane: ControlPlane) -> dict[str, DesiredAdapter]:
    return make_adapters(plane)


@pytest.fixture(scope="module")
def replica(
    plane: ControlPlane, adapters: dict[str, DesiredAdapter], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Replica]:
    plane.want(*adapters.values())
    replica = Replica(tmp_path_factory.mktemp("replica"), plane)
    try:
        replica.wait_until_ready()
        yield replica
    finally:
        left = replica.list_processes()
        replica.stop()
        assert not [p for p in left if is_alive(p)]


# --- what is loaded ------------------------------------------------------------------------------------------------


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


def test_nobody_is_told_what_another_tenant_or_adapter_has_cached(replica: Replica) -> None:
    """A prompt of another tenant is computed anew: neither its count of cached tokens nor its speed tells of it."""
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


def count(replica: Replica, name: str) -> float:
    """Return one of the engine's own series, added up."""
    lines = replica.engine_http.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"vllm:{name}{{"))


def test_what_is_metered_of_a_replica_is_what_it_reports_of_its_engine(replica: Replica) -> None:
    """A prompt counts once for each choice, cached or not, and the agent's own canaries do not count at all."""

    def reported() -> EngineCount:
        replica.engine_http.post("/v1/completions", json={"model": "nobody", "prompt": "x"})  # refused: counts nothing
        seen = len(replica.plane.observed)
        wait_until(lambda: len(replica.plane.observed) > seen + 2, seconds=60, what="reports with a fresh reading")
        found = replica.plane.observed[-1].counted
        assert found is not None
        return found

    before, read, written = reported(), 0, 0
    for model, fields in [
        (SERVED_NAME, {}),
        (GOOD, {"n": 3, "temperature": 1}),
        (OTHER, {"prompt": ["One", "and two"], "n": 2, "temperature": 1}),
        (GOOD, {"cache_salt": "one"}),
    ]:
        usage = replica.complete(model, **fields).json()["usage"]
        read += usage["prompt_tokens"] * fields.get("n", 1)
        written += usage["completion_tokens"]
    after = reported()

    assert (after.input_tokens - before.input_tokens, after.output_tokens - before.output_tokens) == (read, written)
    assert count(replica, "prompt_tokens_total") > after.input_tokens  # the rest are the agent's own questions


def test_report_says_how_to_reach_the_replica_and_what_it_takes(replica: Replica) -> None:
    observed = replica.plane.observed[-1]

    assert observed.url == f"unix://{replica.listen}"
    assert (observed.capacity, observed.max_lora_rank, observed.nan_requests_total) == (
        6,
        16,
        0,
    )  # eight in the engine's cache, two of them for those that come and go
    assert replica.get_state().generation == observed.engine_generation


# --- the door ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [None, "", 7, ["x"], {}])
def test_missing_or_empty_model_is_an_error_and_never_the_base(replica: Replica, model: object) -> None:
    for body in ({"model": model, "prompt": "Hi"}, {"prompt": "Hi"}):
        for route in ("/v1/completions", "/v1/chat/completions"):
            assert replica.http.post(route, json=body).status_code == 400


@pytest.mark.parametrize(
    "model",
    ["text", "image", "demo", str(BASE_MODEL), "b-other", NAN, NOOP, name_of("unknown"), GOOD + "\n", GOOD[:-1]],
)
def test_unknown_model_is_not_found_and_never_the_base(replica: Replica, model: str) -> None:
    answer = replica.complete(model)

    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"


def test_adapter_named_like_a_modality_does_not_hijack_the_base_model(replica: Replica) -> None:
    parts = [{"type": "text", "text": "Hello"}]
    body = {"model": SERVED_NAME, "messages": [{"role": "user", "content": parts}], "max_tokens": 4}

    answer = replica.http.post("/v1/chat/completions", json=body)

    assert answer.status_code == 200
    assert answer.json()["model"] == SERVED_NAME


DENIED = [
    ("GET", "/v1/models"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
    ("POST", "/adapters"),
    ("DELETE", f"/adapters/{GOOD}"),
    ("POST", "/invocations"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/generative_scoring"),
    ("POST", "/scale_elastic_ep"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/embeddings"),
    ("POST", "/v1/chat/completions/batch"),
    ("POST", "/v1/completions/render"),
    ("POST", "/inference/v1/generate"),
    ("GET", "/metrics"),
    ("GET", "/health"),
    ("GET", "/load"),
    ("GET", "/version"),
    ("GET", "/v1/completions"),
    ("POST", "//v1/completions"),
    ("POST", "/V1/completions"),
    ("POST", "/x/../v1/completions"),
    ("POST", "/v1/%63ompletions"),
    ("POST", "/v1/completions/"),
    ("POST", "/v1/completions?x=1"),
]


@pytest.mark.parametrize("token", ["with", "without"])
@pytest.mark.parametrize(("method", "path"), DENIED)
def test_every_other_route_is_not_found(replica: Replica, method: str, path: str, token: str) -> None:
    body = {"model": GOOD, "prompt": "Hi", "name": "x", "lora_name": GOOD, "src": "/tmp", "lora_path": "/tmp"}

    status = send_raw(replica.listen, method, path, body=body, has_token=token == "with")

    assert status == 404
    assert set(replica.list_loaded()) == {SERVED_NAME, GOOD, OTHER, THIRD}


def send_raw(socket_path: Path, method: str, path: str, *, body: dict[str, str], has_token: bool) -> int:
    """Send the path as it is written, which HTTP libraries do not; returns the status."""
    data = json.dumps(body).encode()
    token = f"Authorization: Bearer {REPLICA_TOKEN}\r\n" if has_token else ""
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\n{token}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(socket_path))
        connection.sendall(head.encode() + data)
        return int(connection.makefile("rb").readline().split()[1])


@pytest.mark.parametrize("credential", ["", "Bearer", "Bearer wrong", "Basic replica-token-of-this-test"])
def test_allowed_routes_need_the_replica_token(replica: Replica, credential: str) -> None:
    body = {"model": GOOD, "prompt": "Hi"}

    answer = replica.http.post("/v1/completions", json=body, headers={"Authorization": credential})

    assert answer.status_code == 401


def test_stream_arrives_piece_by_piece_with_usage(replica: Replica) -> None:
    body = {"model": GOOD, "prompt": "My card", "stream": True} | ENDLESS | {"max_tokens": 24}
    with replica.http.stream("POST", "/v1/completions", json=body) as answer:
        chunks = [chunk for chunk in answer.iter_raw() if chunk]

    assert answer.headers["content-type"].startswith("text/event-stream")
    assert len(chunks) > 5
    assert b'"usage"' in chunks[-1] + chunks[-2]
    assert chunks[-1].endswith(b"data: [DONE]\n\n")


def test_fields_outside_the_list_do_not_reach_the_engine(replica: Replica) -> None:
    answer = replica.complete(GOOD, prompt_logprobs=1, return_token_ids=True, priority=5, request_id="mine")

    assert answer.status_code == 200
    choice = answer.json()["choices"][0]
    assert choice.get("prompt_logprobs") is None and choice.get("token_ids") is None


def test_an_engine_of_a_model_that_writes_text_makes_no_embeddings(replica: Replica) -> None:
    """Why the gateway refuses them itself: the engine has no such route, and its 404 has no error object."""
    answer = replica.engine_http.post("/v1/embeddings", json={"model": SERVED_NAME, "input": "Hi"})

    assert (answer.status_code, answer.json()) == (404, {"detail": "Not Found"})


def test_client_that_leaves_stops_the_generation(replica: Replica) -> None:
    body = {"model": GOOD, "prompt": "My card", "stream": True} | ENDLESS
    before = count(replica, "generation_tokens_total")
    with replica.http.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_raw())
        assert count(replica, "num_requests_running") >= 1

    wait_until(lambda: count(replica, "num_requests_running") == 0, seconds=60, what="the abandoned request to stop")
    assert count(replica, "generation_tokens_total") - before < ENDLESS["max_tokens"] - 80


def test_cold_adapter_gets_its_turn_between_two_hot_ones(replica: Replica) -> None:
    stop = threading.Event()
    taken: list[float] = []  # seconds of each answer of the hot ones

    def keep_busy(model: str) -> None:
        while not stop.is_set():
            asked_at = time.monotonic()
            assert replica.complete(model, **ENDLESS | {"max_tokens": 48}).status_code == 200
            taken.append(time.monotonic() - asked_at)

    threads = [threading.Thread(target=keep_busy, args=(model,)) for model in (GOOD, OTHER) * 2]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    started_at = time.monotonic()
    answer = replica.complete(THIRD, max_tokens=1)
    waited = time.monotonic() - started_at
    is_still_hot = all(thread.is_alive() for thread in threads)
    stop.set()
    for thread in threads:
        thread.join()

    assert answer.status_code == 200
    assert is_still_hot
    assert waited < 10 + 3 * max(taken)  # 1.5 s of quantum and one answer, however slow this machine is


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
        time.sleep(3)  # until that has come to its door
    finally:
        os.kill(engine_core, signal.SIGCONT)
    wait_until(lambda: count(replica, "num_requests_running") == 0, seconds=60, what="the abandoned request to stop")

    assert 0 <= count_generated() - before - said <= 2  # what was under way when the client left


def test_adapters_that_come_and_go_meanwhile_change_no_answer(replica: Replica) -> None:
    """More are loaded than the engine's cache holds: those being served are pushed out and read again from disk."""
    greedy = {"max_tokens": 64, "ignore_eos": True, "temperature": 0}
    wanted = {model: replica.complete(model, **greedy).json()["choices"][0]["text"] for model in (GOOD, OTHER)}
    folder = replica.list_loaded()[THIRD]
    stop = threading.Event()

    def churn() -> None:
        for number in range(200):
            if stop.is_set():
                return
            name = name_of(f"churn{number}")
            replica.engine_http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": folder})

    thread = threading.Thread(target=churn)
    thread.start()
    answers = [(model, replica.complete(model, **greedy)) for model in (GOOD, OTHER) * 3]
    stop.set()
    thread.join()

    assert [answer.json()["choices"][0]["text"] for _, answer in answers] == [wanted[model] for model, _ in answers]
    known = {SERVED_NAME, GOOD, OTHER, THIRD}
    wait_until(lambda: set(replica.list_loaded()) == known, seconds=60, what="the agent to clear the strangers")


# --- files ---------------------------------------------------------------------------------------------------------


def test_unwanted_adapter_is_unloaded_but_its_files_stay_while_the_engine_lives(
    replica: Replica, adapters: dict[str, DesiredAdapter]
) -> None:
    folder = Path(replica.list_loaded()[THIRD])

    replica.plane.want(*(a for name, a in adapters.items() if name != THIRD))
    wait_until(lambda: THIRD not in replica.list_loaded(), seconds=60, what="the adapter to be unloaded")

    assert replica.complete(THIRD).status_code == 404
    assert (folder / "adapter_model.safetensors").exists()
    with pytest.raises(PermissionError) if os.geteuid() else pytest.raises(FileExistsError):
        folder.mkdir()


def test_other_weights_under_an_old_name_get_their_own_folder_and_are_never_swapped_in_place(
    replica: Replica, adapters: dict[str, DesiredAdapter]
) -> None:
    before = replica.list_loaded()[OTHER]
    changed = replica.plane.describe(OTHER, make_files(make_arrays(BASE_MODEL, seed=9)))

    replica.plane.want(adapters[GOOD], changed)
    wait_until(lambda: replica.list_loaded().get(OTHER, before) != before, seconds=60, what="the new folder")

    assert Path(before, "adapter_model.safetensors").exists()
    folder = replica.list_loaded()[OTHER]
    again = replica.engine_http.post("/v1/load_lora_adapter", json={"lora_name": OTHER, "lora_path": before})
    assert again.status_code == 400  # so a load as the agent sends it (test_engine_client.py) can never swap weights
    assert replica.list_loaded()[OTHER] == folder


def test_rejected_adapter_is_never_tried_again(replica: Replica, adapters: dict[str, DesiredAdapter]) -> None:
    replica.plane.want(adapters[GOOD], adapters[NAN])
    wait_until(lambda: replica.plane.get_adapter(NAN), seconds=60, what="the verdict to be repeated")

    row = replica.plane.get_adapter(NAN)

    assert row.state is LoadState.REJECTED and "NaN" in row.reason
    log = (replica.paths.work_dir / "serving_agent.log").read_text()
    assert log.count(f"{NAN} is rejected") == 1


# --- numbers and kills ---------------------------------------------------------------------------------------------


def test_invalid_numbers_in_the_engine_close_the_door_and_restart_it(
    replica: Replica, adapters: dict[str, DesiredAdapter], tmp_path: Path
) -> None:
    """An intruder loads a NaN adapter past the agent: the guard that is left is the engine's own count."""
    replica.plane.want(adapters[GOOD], adapters[OTHER])
    wait_until(lambda: replica.complete(OTHER).status_code == 200, seconds=60, what="both adapters to be loaded")
    old = replica.get_state()
    processes = replica.list_processes()
    poison = make_arrays(BASE_MODEL)
    for array in poison.values():
        array[:] = np.nan
    for name, data in make_files(poison).items():
        (tmp_path / name).write_bytes(data)
    with pausing(replica.agent):
        loaded = replica.engine_http.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": str(tmp_path)})
        body = {"model": "x", "prompt": "a b c " * 30, "max_tokens": 4}
        poisoned = replica.engine_http.post("/v1/completions", json=body)
    assert (loaded.status_code, poisoned.status_code) == (200, 200)

    replica.complete(GOOD)
    wait_until(lambda: replica.plane.observed[-1].nan_requests_total > 0, seconds=60, what="the report")

    assert not replica.plane.observed[-1].is_ready
    assert "quarantine" in replica.plane.get_adapter(GOOD).reason  # used meanwhile; tried again in the next engine
    answer = replica.complete(SERVED_NAME)
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
    wait_until(lambda: not any(map(is_alive, processes)), seconds=10, what="the poisoned engine to be gone")
    replica.wait_for_new_engine(old.generation)


def kill(process: Process) -> None:
    os.kill(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("victim", ["engine_core", "launcher"])
def test_kill_9_during_the_start_leaves_no_orphan_for_10_seconds(replica: Replica, victim: str) -> None:
    engine_core = replica.wait_for_title("VLLM::EngineCor")
    state, processes = replica.get_state(), replica.list_processes()
    assert len(processes) > 4

    kill(engine_core if victim == "engine_core" else state.launcher)

    wait_until(lambda: not any(map(is_alive, processes)), seconds=10, what="every process to be gone")
    replica.wait_for_new_engine(state.generation)


def test_agent_reloads_everything_into_the_next_engine_and_then_clears_old_files(
    replica: Replica, adapters: dict[str, DesiredAdapter]
) -> None:
    replica.wait_until_ready()

    loaded = replica.list_loaded()
    assert set(loaded) == {SERVED_NAME, GOOD, OTHER}
    assert replica.plane.observed[-1].engine_generation == replica.get_state().generation
    folders = {str(path) for path in (replica.paths.work_dir / "adapters").glob("sha256-*")}
    assert folders == {loaded[GOOD], loaded[OTHER]}
    assert replica.complete(GOOD).json()["choices"][0]["text"] != replica.complete(OTHER).json()["choices"][0]["text"]


def test_kill_9_of_the_api_process_breaks_streams_closes_the_door_and_leaves_no_orphan(replica: Replica) -> None:
    processes = replica.list_processes()
    engine_core = replica.wait_for_title("VLLM::EngineCor")
    api = parent_of(engine_core, processes)
    body = {"model": GOOD, "prompt": "My card", "stream": True} | ENDLESS

    with pytest.raises(httpx.TransportError), replica.http.stream("POST", "/v1/completions", json=body) as answer:
        for number, _ in enumerate(answer.iter_raw()):
            if number == 1:
                kill(api)

    wait_until(lambda: not any(map(is_alive, processes)), seconds=10, what="every process to be gone")
    assert replica.complete(GOOD).status_code == 503
    wait_until(lambda: not replica.plane.observed[-1].is_ready, seconds=10, what="the report")


def test_sigterm_ends_routing_first_then_answers_then_the_agent(replica: Replica) -> None:
    replica.wait_until_ready()
    body = {"model": GOOD, "prompt": "My card", "stream": True} | ENDLESS
    with replica.http.stream("POST", "/v1/completions", json=body) as answer:
        chunks = answer.iter_raw()
        next(chunks)
        replica.agent.send_signal(signal.SIGTERM)
        wait_until(lambda: not replica.plane.observed[-1].is_ready, seconds=5, what="the report")
        assert replica.complete(GOOD).status_code == 200  # a gateway that has not read it yet is answered
        rest = b"".join(chunks)

    assert rest.endswith(b"data: [DONE]\n\n")
    assert replica.agent.wait(30) == 0


def parent_of(child: Process, processes: list[Process]) -> Process:
    pid = int(Path(f"/proc/{child.pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    return next(process for process in processes if process.pid == pid)
