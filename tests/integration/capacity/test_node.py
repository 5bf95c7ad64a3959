"""A node that serves: the order in which its engine and its agent start, end and start again."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from gpu_workers.common.config import REPOSITORY, ConfigError
from gpu_workers.serving.node import find_address
from tests.services.ports import free_port, has_ipv6
from tests.support.waiting import wait_until

_PART = """
import os, pathlib, signal, sys, time
log = pathlib.Path({log!r})
def note(what):
    with log.open("a") as lines:
        lines.write(f"{name} {{what}} {{os.getpid()}}\\n")
def stop(*_):
    time.sleep({seconds})
    note("ended")
    os._exit(0)
signal.signal(signal.SIGTERM, stop)
note("began")
while True:
    time.sleep(1)
"""
_NODE = """
import sys
from gpu_workers.serving import node
node.AGENT, node.ENGINE = "scripted_agent", "scripted_engine"
sys.exit(node.main())
"""


class Node:
    """A real node whose engine and agent only note when they begin and end; the agent takes a second to end."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "log"
        self._log.touch()
        for name, seconds in (("agent", 1), ("engine", 0)):
            (folder / f"scripted_{name}.py").write_text(_PART.format(log=str(self._log), name=name, seconds=seconds))
        settings = {
            "ANNEAL_INTERNAL_URL": "http://127.0.0.1:9", "ANNEAL_NODE_ADDRESS": "127.0.0.1",
            "ANNEAL_WORK_DIR": str(folder), "PYTHONPATH": f"{folder}:{REPOSITORY}",
        }  # fmt: skip
        self.process = subprocess.Popen([sys.executable, "-c", _NODE], env=os.environ | settings, cwd=REPOSITORY)

    def events(self) -> list[str]:
        return [line.rpartition(" ")[0] for line in self._log.read_text().splitlines()]

    def pid(self, name: str) -> int:
        """Return the process id of the last that began."""
        began = [line.split() for line in self._log.read_text().splitlines() if line.startswith(f"{name} began")]
        return int(began[-1][2])

    def wait_for(self, *events: str) -> None:
        wait_until(lambda: sorted(self.events()) == sorted(events), lambda: str(self.events()))


@pytest.fixture
def node(tmp_path: Path):
    node = Node(tmp_path)
    node.wait_for("agent began", "engine began")
    yield node
    node.process.kill()
    node.process.wait()


@pytest.mark.slow
def test_the_engine_stays_until_the_agent_has_finished_its_answers(node: Node) -> None:
    node.process.send_signal(signal.SIGTERM)
    assert node.process.wait(20) == 0
    assert node.events()[2:] == ["agent ended", "engine ended"]


@pytest.mark.slow
def test_an_engine_that_ends_starts_again_and_the_node_ends_with_its_agent(node: Node) -> None:
    os.kill(node.pid("engine"), signal.SIGKILL)
    node.wait_for("agent began", "engine began", "engine began")
    os.kill(node.pid("agent"), signal.SIGKILL)
    assert node.process.wait(20) != 0
    assert node.events()[-1] == "engine ended"


@pytest.mark.slow
def test_a_killed_node_leaves_no_process(node: Node) -> None:
    node.process.kill()
    node.wait_for("agent began", "engine began", "agent ended", "engine ended")


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_a_replica_is_reached_where_it_listens_on_ipv6() -> None:
    six = find_address("::1")

    assert six["ANNEAL_REPLICA_LISTEN"].startswith("::1:")
    assert httpx.URL(six["ANNEAL_REPLICA_URL"]).host == "::1"


def test_a_replica_is_reached_where_it_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (find_address("127.0.0.1") for _ in range(2))
    assert first["ANNEAL_REPLICA_URL"] == f"http://{first['ANNEAL_REPLICA_LISTEN']}"
    assert first != second, "two replicas on one machine"
    port = free_port()
    assert find_address("localhost", port=port)["ANNEAL_REPLICA_LISTEN"].endswith(f":{port}")
    own_name = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    asked = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda name, *_, **of: own_name if name == "n7" else asked(name, *_, **of)
    )
    for internal_url, host in (("http://127.0.0.1:9", "127.0.0.1"), ("unix:/run/internal.sock", "127.0.1.1")):
        assert find_address("n7", internal_url=internal_url)["ANNEAL_REPLICA_LISTEN"].startswith(f"{host}:")
    with pytest.raises(ConfigError, match="ANNEAL_NODE_ADDRESS is not set"):
        find_address("")
    with pytest.raises(OSError):
        find_address("192.0.2.1")
