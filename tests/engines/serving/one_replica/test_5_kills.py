"""What ends an engine: invalid numbers, kill -9 of each process, SIGTERM. These come last."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

from apps.contracts.serving import DesiredAdapter
from gpu_workers.common.process_tree import Process, is_alive
from gpu_workers.engine.health import count_requests
from tests.support.engines.adapters import make_arrays, make_files
from tests.support.engines.models import BASE_MODEL, SERVED_NAME, name_of
from tests.support.engines.replica import Replica, pausing
from tests.support.engines.world import ENDLESS, GOOD, OTHER
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow  # as a whole: each test goes on with what the one before left
GATEWAYS_READ_ROUTES_SECONDS = 1.0  # apps.interfaces.gateway.engines.routes


def test_invalid_numbers_in_the_engine_close_the_door_and_restart_it(
    replica: Replica, adapters: dict[str, DesiredAdapter], tmp_path: Path
) -> None:
    """An intruder loads a NaN adapter past the agent: the guard that is left is the engine's own count."""
    replica.plane.want(adapters[GOOD], adapters[OTHER])
    wait_until(lambda: replica.complete(OTHER).status_code == 200, "both adapters to be loaded")
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
    wait_until(lambda: replica.plane.observed[-1].nan_requests_total > 0, "the report")

    assert not replica.plane.observed[-1].is_ready
    assert "quarantine" in replica.plane.get_adapter(GOOD).reason  # used meanwhile; tried again in the next engine
    answer = replica.complete(SERVED_NAME)
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
    wait_until(lambda: not any(map(is_alive, processes)), "the poisoned engine to be gone", seconds=10)
    replica.wait_for_new_engine(old.generation)


def kill(process: Process) -> None:
    os.kill(process.pid, signal.SIGKILL)


@pytest.mark.chaos
@pytest.mark.parametrize("victim", ["engine_core", "launcher"])
def test_kill_9_during_the_start_leaves_no_orphan_for_10_seconds(replica: Replica, victim: str) -> None:
    engine_core = replica.wait_for_title("VLLM::EngineCor")
    state, processes = replica.get_state(), replica.list_processes()
    assert len(processes) > 4

    kill(engine_core if victim == "engine_core" else state.launcher)

    wait_until(lambda: not any(map(is_alive, processes)), "every process to be gone", seconds=10)
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


def test_sigterm_ends_routing_first_then_answers_then_the_agent(replica: Replica) -> None:
    """The engine stands still until the door has closed, so that nothing ends by itself."""
    engine_core = replica.wait_for_title("VLLM::EngineCor").pid
    body = {"model": GOOD, "prompt": "My card", "stream": True} | ENDLESS | {"max_tokens": 64}
    os.kill(engine_core, signal.SIGSTOP)
    with ThreadPoolExecutor(2) as threads:
        try:
            answer = threads.submit(replica.http.post, "/v1/completions", json=body)
            wait_until(lambda: count_requests(replica.paths.socket) == 1, "the request")
            with replica.plane.keeping_not_ready_waiting():
                replica.agent.send_signal(signal.SIGTERM)
                wait_until(lambda: not replica.plane.observed[-1].is_ready, "the report")
                late = threads.submit(replica.complete, GOOD)  # by a gateway that has not read it yet
                wait_until(lambda: count_requests(replica.paths.socket) == 2, "the late request")
                wait_for_passes(replica, 4)
                assert not is_closed(replica)  # until it has been heard
                told_at = time.monotonic()
            wait_until(lambda: is_closed(replica), "the door to close")
            assert time.monotonic() - told_at > 2 * GATEWAYS_READ_ROUTES_SECONDS
            wait_for_passes(replica, 2)
            assert is_closed(replica)  # and stays so
        finally:
            os.kill(engine_core, signal.SIGCONT)

    assert answer.result().content.endswith(b"data: [DONE]\n\n")
    assert late.result().json()["choices"][0]["finish_reason"] == "length"
    assert replica.agent.wait(60) == 0


def test_the_next_agent_takes_the_engine_as_it_runs(replica: Replica) -> None:
    state, loaded = replica.get_state(), replica.list_loaded()

    replica.start_agent()
    replica.wait_until_ready()

    assert replica.plane.observed[-1].engine_generation == state.generation == replica.get_state().generation
    assert replica.list_loaded() == loaded
    assert replica.complete(GOOD).status_code == 200


def test_kill_9_of_the_api_process_breaks_streams_closes_the_door_and_leaves_no_orphan(replica: Replica) -> None:
    replica.start_no_engine_again()
    processes = replica.list_processes()
    engine_core = replica.wait_for_title("VLLM::EngineCor")
    api = parent_of(engine_core, processes)
    body = {"model": GOOD, "prompt": "My card", "stream": True} | ENDLESS

    with pytest.raises(httpx.TransportError), replica.http.stream("POST", "/v1/completions", json=body) as answer:
        for number, _ in enumerate(answer.iter_raw()):
            if number == 1:
                kill(api)

    wait_until(lambda: not any(map(is_alive, processes)), "every process to be gone", seconds=10)
    assert replica.complete(GOOD).status_code == 503
    wait_until(lambda: not replica.plane.observed[-1].is_ready, "the report", seconds=10)


def wait_for_passes(replica: Replica, passes: int) -> None:
    """Let the agent look at its engine some more times, a second apart."""
    before = replica.plane.desired_reads
    wait_until(lambda: replica.plane.desired_reads > before + passes, f"{passes} more passes")


def is_closed(replica: Replica) -> bool:
    """Ask for an adapter that is not there: an open door says so."""
    answer = replica.complete(name_of("nobody"))
    assert answer.status_code in (404, 503)
    return answer.status_code == 503


def parent_of(child: Process, processes: list[Process]) -> Process:
    pid = int(Path(f"/proc/{child.pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    return next(process for process in processes if process.pid == pid)
