"""The watch over unit tests (tests/unit/conftest.py) sees a socket, a process and a pause."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import pytest


def connect() -> None:
    with socket.socket() as one:
        one.connect(("127.0.0.1", 9))


def listen() -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))


@pytest.mark.parametrize(
    "act", [connect, listen, lambda: subprocess.run([sys.executable, "-V"]), os.fork, lambda: time.sleep(0.001)]
)
def test_what_a_unit_test_must_not_do_fails_it(act: Callable[[], object]) -> None:
    with pytest.raises(pytest.fail.Exception, match="tests/integration"):
        act()
