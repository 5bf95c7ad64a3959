"""The parent's side of the process that runs chat templates: one child for all templates, started on demand."""

import atexit
import math
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import msgspec

_ROOT = Path(__file__).parents[3]
_LENGTH_BYTES = 4
MEMORY_BYTES = 768 * 1024 * 1024
REPLY_BYTES = 192 * 1024 * 1024
CPU_SECONDS = 10.0
WALL_SECONDS = 180.0  # only a stalled machine needs this long for ten seconds of work
TEMPLATES_KEPT = 64
PAGE_SECONDS = 2.0  # of processor time, for one row of a page
_most_seconds: ContextVar[float] = ContextVar("most_seconds", default=math.inf)


class TemplateKilled(Exception):
    """The template exceeded its time or memory."""


class TemplateInvalid(Exception):
    """The template does not compile."""


@contextmanager
def renders_within(cpu_seconds: float) -> Iterator[None]:
    """Let each request in the block take less processor time, for a page: others wait for the child meanwhile."""
    token = _most_seconds.set(cpu_seconds)
    try:
        yield
    finally:
        _most_seconds.reset(token)


class TemplateProcess:
    """A child that renders, for one caller at a time. A fork gets a separate child."""

    def __init__(self, *, cpu_seconds: float = CPU_SECONDS, memory_bytes: int = MEMORY_BYTES) -> None:
        self._cpu_seconds, self._memory_bytes = cpu_seconds, memory_bytes
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._loaded: set[str] = set()
        self._owner = 0

    def ask(self, key: str, source: tuple[object, ...], do: str, *arguments: object) -> Any:
        """Have the child do `do` with the template of this key. Raises TemplateKilled or TemplateInvalid."""
        with self._lock:
            self._require_child()
            if key not in self._loaded:
                reply = self._exchange({"key": key, "do": "load", "arguments": source})
                if "invalid" in reply:
                    raise TemplateInvalid(reply["invalid"])
                self._loaded.add(key)
            if do == "load":
                return None
            reply = self._exchange({"key": key, "do": do, "arguments": arguments})
        if "too_long" in reply:
            raise TemplateKilled("the rendered text is too long")
        return reply["done"]

    def stop(self) -> None:
        """Stop the child, if there is one; the next request starts another."""
        child, self._child = self._child, None
        self._loaded.clear()
        if child is not None and self._owner == os.getpid():
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    pipe.close()

    def _require_child(self) -> None:
        is_mine = self._owner == os.getpid()
        if is_mine and self._child is not None and self._child.poll() is None and len(self._loaded) < TEMPLATES_KEPT:
            return
        self.stop()
        self._owner = os.getpid()
        limits = (self._memory_bytes, REPLY_BYTES)
        self._child = subprocess.Popen(
            [sys.executable, "-B", "-m", "apps.contracts.templating.child", *map(str, limits)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            cwd=_ROOT, env={}, close_fds=True,
        )  # fmt: skip

    def _exchange(self, request: dict[str, object]) -> Any:
        seconds = min(self._cpu_seconds, _most_seconds.get())
        frame = msgspec.msgpack.encode(request | {"cpu_seconds": seconds})
        try:
            return msgspec.msgpack.decode(self._send(len(frame).to_bytes(_LENGTH_BYTES, "big") + frame))
        except (BrokenPipeError, EOFError, TimeoutError) as error:
            self.stop()
            raise TemplateKilled("it takes too long or needs too much memory") from error

    def _send(self, frame: bytes) -> bytes:
        child = self._child
        assert child is not None and child.stdin is not None and child.stdout is not None
        deadline = time.monotonic() + WALL_SECONDS
        child.stdin.write(frame)
        child.stdin.flush()
        length = int.from_bytes(self._read(child.stdout.fileno(), _LENGTH_BYTES, deadline), "big")
        return self._read(child.stdout.fileno(), length, deadline)

    def _read(self, descriptor: int, size: int, deadline: float) -> bytes:
        parts: list[bytes] = []
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while size:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError
                part = os.read(descriptor, min(size, 1 << 20))
                if not part:
                    raise EOFError
                parts.append(part)
                size -= len(part)
        return b"".join(parts)


shared_process = TemplateProcess()
atexit.register(shared_process.stop)
