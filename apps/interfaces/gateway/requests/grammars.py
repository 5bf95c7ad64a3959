"""Checks that an engine can compile a schema, before the engine sees it.

An engine compiles the schemas of all tenants, partly in the loop that writes all answers. So the gateway compiles a
schema first in a child process with little processor time and memory. Organizations take turns.
"""

import asyncio
import hashlib
import logging
import sys
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from apps.core.errors import InvalidValue, Unavailable
from apps.interfaces.gateway.fair_queue import FairQueue

logger = logging.getLogger(__name__)

# An organization's schemas get a tenth of a processor: it pauses for so many times what it used.
PAUSE_FACTOR = 9
KILLED_SECONDS = 0.5  # what a schema counts as that ended the child: its limit, and the start of another child
WALL_SECONDS = 30.0  # for a fifth of a second of work in a child that has started: only a stalled machine needs it
VERDICTS_KEPT = 4096
_ROOT = Path(__file__).parents[4]
_LENGTH_BYTES = 4
_LAST_SECONDS = 1.0
_PLACE = ("compiler",)
_AWAY = "Schemas cannot be checked at the moment. Try again shortly."
_TOO_COSTLY = "The schema takes too long to compile. Use fewer alternatives, shorter repetitions or less nesting."


class CheckedSchema(NamedTuple):
    """A schema of a request, and the name of its field."""

    param: str
    schema: dict[str, object]


class SchemaTooCostly(InvalidValue):
    """Compiling the schema took more time or memory than one schema may take."""


class Grammars:
    """Checks schemas in a child process and caches the verdicts. Use inside one event loop; `close` when done."""

    def __init__(self) -> None:
        self._turns = FairQueue(places=1)
        self._verdicts: OrderedDict[bytes, InvalidValue | None] = OrderedDict()  # by hash, most recently used last
        self._asked: dict[bytes, asyncio.Task[InvalidValue | None]] = {}
        self._child: asyncio.subprocess.Process | None = None
        self._pauses_until: dict[str, float] = {}  # by tenant, on the clock of `time.monotonic`

    async def require(self, tenant: str, schemas: Sequence[CheckedSchema]) -> None:
        """Require that an engine can compile the schemas.

        Raises InvalidValue naming the place in the schema, SchemaTooCostly, RateLimited, Unavailable.
        """
        for param, schema in schemas:
            raw = msgspec.json.encode(schema)
            key = hashlib.blake2b(raw, digest_size=16).digest()
            if key in self._verdicts:
                self._verdicts.move_to_end(key)
                refusal = self._verdicts[key]
            else:
                refusal = await self._find_out(tenant, key, raw)
            if refusal is not None:
                raise type(refusal)(refusal.message, param=param)

    async def _find_out(self, tenant: str, key: bytes, raw: bytes) -> InvalidValue | None:
        """Return the verdict on a schema that is not cached. The check continues even if the customer leaves."""
        while (seconds := self._pauses_until.get(tenant, 0.0) - time.monotonic()) > 0:
            await asyncio.sleep(seconds)
        task = self._asked.get(key)
        if task is None:
            task = self._asked[key] = asyncio.create_task(self._compile(tenant, raw))
            task.add_done_callback(lambda done: self._remember(key, done))
        return await asyncio.shield(task)

    def _remember(self, key: bytes, task: "asyncio.Task[InvalidValue | None]") -> None:
        del self._asked[key]
        if task.cancelled() or task.exception() is not None:
            return
        self._verdicts[key] = task.result()
        while len(self._verdicts) > VERDICTS_KEPT:
            self._verdicts.popitem(last=False)

    async def _compile(self, tenant: str, raw: bytes) -> InvalidValue | None:
        place = await self._turns.take(tenant, _PLACE)
        seconds = KILLED_SECONDS
        try:
            reason, where, seconds = await self._exchange(raw)
        except TimeoutError as error:
            await self._end_child()
            raise Unavailable(_AWAY) from error
        except (OSError, asyncio.IncompleteReadError) as error:
            if await self._end_child() < 0:  # ended by a limit
                return SchemaTooCostly(_TOO_COSTLY)
            raise Unavailable(_AWAY) from error
        finally:
            now = time.monotonic()
            self._pauses_until = {one: until for one, until in self._pauses_until.items() if until > now}
            self._pauses_until[tenant] = max(now, self._pauses_until.get(tenant, 0.0)) + PAUSE_FACTOR * seconds
            self._turns.give_back(tenant, place)
        if not reason:
            return None
        at = f" at `{where}`" if where else ""
        return InvalidValue(f"The schema cannot be compiled{at}: {reason}.")

    async def _exchange(self, raw: bytes) -> tuple[str, str, float]:
        """Return the reason, the place and the processor seconds of the child's verdict."""
        child = await self._require_child()
        assert child.stdin is not None and child.stdout is not None
        async with asyncio.timeout(WALL_SECONDS):
            child.stdin.write(len(raw).to_bytes(_LENGTH_BYTES, "big") + raw)
            length = int.from_bytes(await child.stdout.readexactly(_LENGTH_BYTES), "big")
            return msgspec.json.decode(await child.stdout.readexactly(length), type=tuple[str, str, float])

    async def _end_child(self) -> int:
        """Return the exit code of the child. It is negative for a signal, which exceeded limits send."""
        child, self._child = self._child, None
        if child is None:
            return 0
        try:
            async with asyncio.timeout(_LAST_SECONDS):
                ended = await child.wait()
        except TimeoutError:
            _kill(child)
            ended = await child.wait()
        logger.warning("the compiler of schemas ended with %d", ended)
        return ended

    async def _require_child(self) -> asyncio.subprocess.Process:
        """Return the child once it waits for a schema, however long that takes.

        Raises IncompleteReadError if it ends.
        """
        if self._child is None or self._child.returncode is not None:
            self._child = await asyncio.create_subprocess_exec(
                sys.executable, "-B", "-m", "apps.interfaces.gateway.requests.grammar_child",
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
                cwd=_ROOT, env={},
            )  # fmt: skip
            assert self._child.stdout is not None
            await self._child.stdout.readexactly(_LENGTH_BYTES)  # an empty frame: it is ready
        return self._child

    async def close(self) -> None:
        if self._child is not None:
            _kill(self._child)
            await self._child.wait()


def _kill(child: asyncio.subprocess.Process) -> None:
    try:
        child.kill()
    except ProcessLookupError:
        return  # it has just ended
