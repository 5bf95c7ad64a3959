"""A child that trains has no network where the kernel allows that, and says in its log which of the two it is."""

import os
import socket
import sys
import textwrap
from pathlib import Path

import pytest

from gpu_workers.common.events import LOG_FILE
from gpu_workers.trainer.children.executor import SubprocessExecutor

CHILD = textwrap.dedent(
    """
    import getpass, os, socket, sys
    def reach(address):
        with socket.socket() as one:
            one.settimeout(5)
            return one.connect_ex(address)
    server = socket.create_server(("127.0.0.1", 0))
    interfaces = sorted(name for _, name in socket.if_nameindex())
    print("at home", reach(server.getsockname()), "outside", reach(("127.0.0.1", int(sys.argv[1]))), *interfaces)
    print("who", os.getuid(), getpass.getuser())
    """
)


def run(work_dir: Path, port: int, *, has_network: bool) -> str:
    command = (sys.executable, "-c", CHILD, str(port))
    child = SubprocessExecutor(thread_limit=1, command=command).start(work_dir, has_network=has_network)
    assert child.wait(60) == 0, (work_dir / LOG_FILE).read_text()
    return (work_dir / LOG_FILE).read_text()


@pytest.fixture
def outside():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_without_a_network_it_reaches_itself_alone_and_is_who_it_was(tmp_path, outside):
    log = run(tmp_path, outside, has_network=False)

    assert f"who {os.getuid()} " in log
    if "keeps the network" in log:
        pytest.skip("this user may make no network namespace, and the log says so")
    assert "This child has no network." in log
    assert "at home 0" in log and "outside 0" not in log
    assert log.split("outside")[1].split()[1:2] == ["lo"]


def test_with_one_it_reaches_others(tmp_path, outside):
    assert "outside 0" in run(tmp_path, outside, has_network=True)


def test_no_python_runs_in_it_before_its_own(tmp_path, outside):
    """It would wait for ever for a lock that another thread of the worker held at the fork."""
    is_forking = True
    os.register_at_fork(after_in_child=lambda: os._exit(99) if is_forking else None)
    try:
        assert "outside 0" in run(tmp_path, outside, has_network=True)
    finally:
        is_forking = False
