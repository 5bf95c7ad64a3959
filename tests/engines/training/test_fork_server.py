"""Children that are forked behave like those of a new interpreter."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpu_workers.common.config import child_environment
from gpu_workers.common.process_tree import identify
from gpu_workers.trainer.children import fork_server as client
from gpu_workers.trainer.children.executor import SubprocessExecutor
from gpu_workers.trainer.children.fork_server import Forked, ForkServer, ServerGone
from tests.support.waiting import wait_until

CHILD = "tests.support.engines.reporting_child"
LIGHT_SERVER = "tests.support.engines.light_fork_server"


@pytest.fixture
def own_server(monkeypatch):
    """A server that a test may kill, without the libraries of training."""
    monkeypatch.setattr(client, "MODULE", LIGHT_SERVER)
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture
def fork(tmp_path: Path) -> Callable[..., Forked]:
    def start(server: ForkServer, end: str, **options: Any) -> Forked:
        with (tmp_path / "log").open("wb") as log:
            child = server.fork(
                CHILD,
                [str(tmp_path), end],
                log=log.fileno(),
                environment=child_environment(threads=2, extra={"ITS_OWN": "1"}),
                **options,
            )
        with child.stdin as stdin:
            stdin.write(b"a secret\n")
        return child

    return start


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        ("succeed", 0, ""),
        ("fail", 3, ""),
        ("explain", 1, "It explains itself.\n"),
        ("raise", 1, "RuntimeError: This is its fault."),
        ("abort", -6, "reporting"),
    ],
)
def test_its_end_is_reported_as_that_of_an_interpreter(fork_server, fork, tmp_path, end, code, words):
    child = fork(fork_server, end)

    assert child.wait(60) == code
    assert child.poll() == code
    log = (tmp_path / "log").read_text()
    assert log.startswith("It reported.") and words in log
    assert log.endswith("Its thread ended.\nIt cleaned up.\n") is (end != "abort")


def test_it_has_its_own_environment_and_nothing_of_the_agents(fork_server, fork, tmp_path, monkeypatch):
    monkeypatch.setenv("ANNEAL_BROKER_URL", "redis://secret")
    assert fork(fork_server, "succeed", has_network=False).wait(60) == 0

    report = json.loads((tmp_path / "report.json").read_text())
    assert report["secret"] == "a secret\n"
    assert report["environment"]["ITS_OWN"] == "1" and "ANNEAL_BROKER_URL" not in report["environment"]
    assert report["threads"] == 2
    assert report["is_session_leader"] and report["core_bytes"] == 0
    assert report["descriptors"][:3] == [0, 1, 2] and len(report["descriptors"]) == 4  # the last is its look at them
    log = (tmp_path / "log").read_text()
    assert ("This child has no network." in log) != ("This child keeps the network" in log)
    if "This child has no network." in log:
        assert report["interfaces"] == ["lo"]


def test_a_signal_reaches_it_from_the_first_moment(fork_server, tmp_path):
    executor = SubprocessExecutor(CHILD, thread_limit=1, fork_server=fork_server)

    child = executor.start(tmp_path)
    child.kill()

    assert child.poll() == -signal.SIGKILL


def test_it_dies_with_the_server_and_the_next_runs_in_a_new_interpreter(own_server, fork, tmp_path):
    child = fork(own_server, "hang")
    wait_until(lambda: (tmp_path / "report.json").exists(), "a report")

    os.kill(own_server.pid, signal.SIGKILL)

    assert child.wait(60) == -signal.SIGKILL
    wait_until(lambda: identify(child.pid) is None, "the end of the child")
    with pytest.raises(ServerGone):
        fork(own_server, "succeed")
    later = SubprocessExecutor("json.tool", thread_limit=1, command=("true",), fork_server=own_server).start(tmp_path)
    assert later.wait(60) == 0


def test_it_ends_with_an_agent_that_was_killed(tmp_path):
    program = f"""
import os, signal, sys
from pathlib import Path
from gpu_workers.trainer.children import fork_server
from gpu_workers.trainer.children.executor import SubprocessExecutor

fork_server.MODULE = {LIGHT_SERVER!r}
child = SubprocessExecutor({CHILD!r}, thread_limit=1, fork_server=fork_server.ForkServer()).start(Path(sys.argv[1]))
print(child.pid, os.getpid(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True, check=False
    )

    child = int(done.stdout.split()[0])
    wait_until(lambda: identify(child) is None, "the end of the child")
