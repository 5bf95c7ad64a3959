"""Unit tests open no socket, start no process and do not sleep: those that do stand in tests/integration.

The PostgreSQL and the Redis of the tests are there for both. So are the two programs in which the product reads what
strangers wrote, chat templates and Parquet files: to a unit test each is a function call.
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

FORBIDDEN = {
    "socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo",
    "subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system", "pty.spawn",
}  # fmt: skip
READERS = {"apps.contracts.templating.child", "apps.datasets.validation.parquet_child"}
_REDIS = unquote(urlsplit(os.environ["REDIS_URL"]).path)
_is_watching = False


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    """Python's own audit events, of every library and thread."""
    if _is_watching and event in FORBIDDEN and not _is_allowed(event, arguments):
        pytest.fail(f"A unit test does {event}{arguments}: move it to tests/integration.")


def _is_allowed(event: str, arguments: tuple[Any, ...]) -> bool:
    if event == "socket.connect":
        return arguments[1] == _REDIS
    return event == "subprocess.Popen" and not READERS.isdisjoint(map(str, arguments[1]))


sys.addaudithook(_watch)


def _refuse_to_sleep(seconds: float) -> None:
    if seconds:  # 0 lets other threads run
        pytest.fail(f"A unit test sleeps for {seconds} s: move it to tests/integration, or hand it a clock.")


@contextmanager
def _watching(is_ours: bool = True) -> Iterator[None]:
    global _is_watching
    with pytest.MonkeyPatch.context() as patch:
        if is_ours:
            patch.setattr(time, "sleep", _refuse_to_sleep)
        before, _is_watching = _is_watching, is_ours
        try:
            yield
        finally:
            _is_watching = before


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    with _watching():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
    """Watch the fixtures of this folder; those of the whole suite start its services."""
    with _watching(fixturedef.baseid.startswith("tests/unit")):
        return (yield)
