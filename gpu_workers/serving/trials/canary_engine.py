"""A separate engine that loads a new adapter version before the engine of all customers does.

`python -m gpu_workers.engine.launcher canary` runs beside the replica's own launcher. It waits until this module writes
the model to serve into its folder, and waits again after its engine has ended. So the engine runs only during tests and
for a short time afterwards. A version that kills the engine or corrupts its numbers harms no customer.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

import msgspec

from gpu_workers.common.files import PRIVATE, replace_file
from gpu_workers.engine.client import Canary, EngineClient, EngineDown, EngineRefused
from gpu_workers.engine.state import EnginePaths, EngineState, ReplicaBase, read_engine_state
from gpu_workers.serving.trials.adapter_trial import (
    INVALID_NUMBERS,
    NOT_LOADABLE,
    NOT_LOADED_YET,
    Refusals,
    Verdict,
    try_adapter,
)
from gpu_workers.serving.trials.parity_check import CannotSay

log = logging.getLogger("anneal.canary")

IDLE_SECONDS = 60.0  # several versions in a row share one engine start
START_SECONDS = 900.0  # allows for a large base model on a slow disk
MAX_DEATHS = 2  # the machine may have caused the first one
DEADLY = "The canary engine ended twice while it tried the adapter."


class _Wish(msgspec.Struct):
    """A version to test, and the number of times that the engine died during its test."""

    lora_name: str
    folder: Path
    base: ReplicaBase
    deaths: int = 0


class CanaryEngine:
    """Runs in one event loop: call `ask` until it returns a verdict, `step` repeatedly, and `close` at the end."""

    def __init__(self, work_dir: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        work_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._paths = EnginePaths(work_dir)
        self._engine = EngineClient(self._paths.socket)
        self._clock = clock
        self._queue: dict[str, _Wish] = {}
        self._verdicts: dict[str, tuple[Path, Verdict]] = {}
        self._troubles: dict[str, str] = {}
        self._state: EngineState | None = None
        self._base_canary: Canary | None = None
        self._refusals = Refusals()
        self._corrupted_before = 0
        self._ended_generation = ""
        self._wanted_at = self._used_at = clock()

    def ask(self, lora_name: str, folder: Path, base: ReplicaBase) -> Verdict | None:
        """Return the verdict on the files; None while they wait. Raises CannotSay once for each failed test."""
        if trouble := self._troubles.pop(lora_name, ""):
            raise CannotSay(trouble)
        tried, verdict = self._verdicts.get(lora_name, (None, None))
        if tried == folder:
            return verdict
        if lora_name not in self._queue:
            self._queue[lora_name] = _Wish(lora_name, folder, base)
        return None

    def keep_only(self, names: Collection[str]) -> None:
        """Forget every other version."""
        for known in (self._queue, self._verdicts, self._troubles):
            for name in known.keys() - set(names):
                del known[name]

    async def step(self) -> None:
        """Test the version that has waited longest, or end the engine if none has come for a while."""
        wish = next(iter(self._queue.values()), None)
        if wish is None:
            # An engine without a request file was requested by an earlier agent that was killed.
            if not self._paths.replica.exists() or self._clock() - self._used_at >= IDLE_SECONDS:
                self.end()
            return
        try:
            state = await self._meet(wish.base)
        except (EngineDown, EngineRefused) as error:
            self._give_up_when_overdue(error)
            return
        try:
            self._settle(wish, await self._judge(wish, state))
        except EngineDown as error:
            self._note_death(wish, error)
        except (CannotSay, EngineRefused) as trouble:
            self._drop(wish, f"The canary engine could not try the adapter: {trouble}"[:200])
        self._used_at = self._clock()

    def end(self) -> None:
        """End the engine if there is one; its launcher waits for the next model."""
        self._paths.replica.unlink(missing_ok=True)
        self._state = None
        state = read_engine_state(self._paths)
        if state is not None and state.generation != self._ended_generation:
            log.info("canary engine %s is ended", state.generation)
            self._ended_generation = state.generation
            self._paths.restart_request.write_text(state.generation)

    async def close(self) -> None:
        """End the engine and close its only client."""
        self.end()
        await self._engine.close()

    # --- the engine's life ------------------------------------------------------------------------------------------

    async def _meet(self, base: ReplicaBase) -> EngineState:
        """Return the engine that serves this base model; request its start if needed. Raises EngineDown."""
        wish = msgspec.json.encode(base)
        try:
            is_wanted = self._paths.replica.read_bytes() == wish
        except FileNotFoundError:
            is_wanted = False
        if not is_wanted:
            self.end()
            replace_file(self._paths.replica, wish, mode=PRIVATE)
            self._wanted_at = self._clock()
        state = read_engine_state(self._paths)
        if state is None or state.generation == self._ended_generation:
            raise EngineDown("starting")
        models = {model.id for model in await self._engine.list_models()}
        if read_engine_state(self._paths) != state or base.served_name not in models or state.model_path != base.path:
            raise EngineDown("starting")
        if state != self._state:
            self._corrupted_before = await self._engine.count_corrupted_requests()
            self._base_canary = await self._engine.ask_canary(base.served_name)
            if not self._base_canary.is_finite():
                raise EngineDown("the base model gives invalid numbers")
            self._state = state
            log.info("canary engine %s answers", state.generation)
        return state

    def _give_up_when_overdue(self, error: Exception) -> None:
        if self._clock() - self._wanted_at < START_SECONDS:
            return
        log.error("the canary engine does not start: %s", error)
        for wish in list(self._queue.values()):
            self._drop(wish, "The canary engine does not start.")
        self.end()

    # --- one version ------------------------------------------------------------------------------------------------

    async def _judge(self, wish: _Wish, state: EngineState) -> Verdict:
        await self._engine.unload_adapter(wish.lora_name)  # loaded only if an agent was killed in between
        try:
            await self._engine.load_adapter(wish.lora_name, wish.folder)
        except EngineRefused as refusal:
            await self._require_same_engine(state)
            log.warning("canary engine refuses %s: %s", wish.lora_name, refusal)
            if self._refusals.is_final(wish.lora_name, refusal):
                return Verdict(NOT_LOADABLE)
            raise CannotSay(NOT_LOADED_YET) from refusal
        self._refusals.forget(wish.lora_name)
        verdict = await try_adapter(
            self._engine,
            wish.folder,
            lora_name=wish.lora_name,
            base_name=state.served_name,
            base_canary=self._base_canary,
            corrupted_before=self._corrupted_before,
            require_same_engine=partial(self._require_same_engine, state),
        )
        await self._engine.unload_adapter(wish.lora_name)
        if await self._engine.count_corrupted_requests() > self._corrupted_before:
            self.end()  # the next version must not be blamed for what is left in its caches
            return Verdict(verdict.reason or INVALID_NUMBERS, verdict.parity)
        return verdict

    async def _require_same_engine(self, state: EngineState) -> None:
        await asyncio.sleep(0.5)  # a dying engine may refuse before it ends
        await self._engine.list_models()
        if read_engine_state(self._paths) != state:
            raise EngineDown("restarting")

    def _settle(self, wish: _Wish, verdict: Verdict) -> None:
        log.info("%s: %s", wish.lora_name, verdict.reason or "passed")
        self._queue.pop(wish.lora_name, None)
        self._verdicts[wish.lora_name] = (wish.folder, verdict)

    def _drop(self, wish: _Wish, trouble: str) -> None:
        self._queue.pop(wish.lora_name, None)
        self._troubles[wish.lora_name] = trouble

    def _note_death(self, wish: _Wish, error: EngineDown) -> None:
        """Reject the tested version after a second death. Test the others before its second attempt."""
        log.warning("the canary engine ended while it tried %s: %s", wish.lora_name, error)
        self.end()  # it may also hang
        wish.deaths += 1
        if wish.deaths >= MAX_DEATHS:
            self._settle(wish, Verdict(DEADLY))
        elif self._queue.pop(wish.lora_name, None) is not None:
            self._queue[wish.lora_name] = wish
