"""The steps that load an adapter into a running engine: its files, the canary engine's verdict, the load, and tests."""

import asyncio
import logging
import time
from pathlib import Path

from apps.contracts.serving import DesiredAdapter, LoadState
from gpu_workers.engine.client import LORA_NAME, Canary, EngineClient, EngineDown, EngineRefused
from gpu_workers.engine.state import EnginePaths, EngineState, ReplicaBase, read_engine_state
from gpu_workers.serving.adapters.host_cache import HostCache
from gpu_workers.serving.adapters.store import AdapterRejected, AdapterStore, AdapterUnavailable, BaseIdentity
from gpu_workers.serving.traffic.front_door import FrontDoor
from gpu_workers.serving.traffic.number_watch import NumberWatch
from gpu_workers.serving.trials.adapter_trial import NOT_LOADABLE, NOT_LOADED_YET, Refusals, Verdict, try_adapter
from gpu_workers.serving.trials.canary_engine import CanaryEngine
from gpu_workers.serving.trials.parity_check import CannotSay
from gpu_workers.serving.trials.verdicts import Trials

log = logging.getLogger("anneal.serving")


class EngineSession:
    """One run of the engine since it first answered, and the adapters that this agent loaded into it."""

    def __init__(self, state: EngineState, base_canary: Canary, *, version: str, base_sha256: str) -> None:
        self.state = state
        self.version = version  # of vLLM
        self.base_sha256 = base_sha256  # of the base model's weights at its start, "" if unknown
        self.base_canary = base_canary
        self.cache = HostCache(state.max_cpu_loras)
        self.loaded: set[str] = set()
        self.leaving: dict[str, Path] = {}  # unloaded, but an answer may still be running
        self.is_lost = False

    def give_up(self) -> None:
        """Mark the session as ended or unusable."""
        self.is_lost = True
        self.loaded.clear()

    @property
    def base(self) -> BaseIdentity:
        state = self.state
        return BaseIdentity(path=state.model_path, served_name=state.served_name, max_lora_rank=state.max_lora_rank)


class AdapterLoader:
    """Loads adapters inside one event loop, one at a time, and records each result in `trials`."""

    def __init__(
        self,
        *,
        engine: EngineClient,
        paths: EnginePaths,
        door: FrontDoor,
        store: AdapterStore,
        canary: CanaryEngine | None,
        trials: Trials,
        numbers: NumberWatch,
    ) -> None:
        self._engine = engine
        self._paths = paths
        self._door = door
        self._store = store
        self._canary = canary
        self._trials = trials
        self._numbers = numbers
        self._refusals = Refusals()
        self.has_stale_urls = False  # a fetch failed: its signed URL may have expired

    async def fetch(self, adapter: DesiredAdapter, met: EngineSession, *, capacity: int) -> Path | None:
        """Return the folder with the checked files of an adapter; None if it must not be loaded now."""
        name = adapter.lora_name
        if LORA_NAME.fullmatch(name) is None:
            self._trials.reject(name, "The engine name is not one of ours.")
        elif len(met.loaded) >= capacity:
            self._trials.postpone(name, "The replica holds as many adapters as it can.")
        else:
            try:
                path = await asyncio.to_thread(self._store.ensure, adapter, met.base)
                return path if self._is_cleared(adapter, path, met.base) else None
            except AdapterRejected as rejection:
                self._trials.reject(name, str(rejection))
            except AdapterUnavailable as trouble:
                self.has_stale_urls = True
                self._trials.postpone(name, str(trouble))
        return None

    def _is_cleared(self, adapter: DesiredAdapter, path: Path, base: BaseIdentity) -> bool:
        """Return whether the customers' engine may load the adapter. The canary engine tests a new version first."""
        name = adapter.lora_name
        if self._canary is None or adapter.is_tried or self._trials.has_passed(name, path.name):
            return True
        try:
            verdict = self._canary.ask(name, path, ReplicaBase(served_name=base.served_name, path=base.path))
        except CannotSay as trouble:
            self._trials.postpone(name, str(trouble))
            return False
        if verdict is None:
            self._trials.settle(name, LoadState.LOADING, "A canary engine tries it first.")
            return False
        self._trials[name].parity = verdict.parity
        if verdict.reason:
            self._trials.reject(name, verdict.reason)
            return False
        self._trials.record_passed(name, path.name)
        return True

    async def load(self, adapter: DesiredAdapter, path: Path, met: EngineSession) -> None:
        """Load the fetched adapter, and admit it if its numbers are good. Raises EngineDown."""
        name = adapter.lora_name
        await self._spare_the_served(met)
        met.cache.touch(f"{name} {path}", used_at=time.monotonic())
        try:
            await self._engine.load_adapter(name, path)
        except EngineRefused as refusal:
            await self._require_same_engine(met)
            log.warning("engine refuses %s: %s", name, refusal)
            if self._refusals.is_final(name, refusal):
                return self._trials.reject(name, NOT_LOADABLE)
            return self._trials.postpone(name, NOT_LOADED_YET)
        self._refusals.forget(name)
        return await self.try_out(adapter, met)

    async def _spare_the_served(self, met: EngineSession) -> None:
        """Make sure, before a load, that the engine's cache will evict an adapter that is no longer served."""
        models = {model.id: model.root for model in await self._engine.list_models()}
        served = {name: f"{name} {models[name]}" for name in met.loaded if name in models}
        for name, used_at in self._door.list_last_uses().items():
            if name in served:
                met.cache.touch(served[name], used_at=used_at)
        names = {key: name for name, key in served.items()}
        for key in met.cache.find_victims(names.keys()):
            await self._engine.touch(names[key])
            met.cache.touch(key, used_at=time.monotonic())

    async def try_out(self, adapter: DesiredAdapter, met: EngineSession) -> None:
        """Admit customers only if the adapter answers with finite numbers that differ from the base model's."""
        name = adapter.lora_name
        async with self._numbers.lock:  # bad numbers seen meanwhile are attributed to this adapter
            verdict = await self._ask(adapter, met)
            if verdict is None:
                return
            if verdict.parity is not None:
                self._trials[name].parity = verdict.parity
                self._trials[name].compared = self._compared(adapter, met)
            if verdict.reason:
                self._trials.reject(name, verdict.reason)
                await self._engine.unload_adapter(name)
                await self._numbers.judge(culprit=name)
                return
        met.loaded.add(name)
        self._trials.settle(name, LoadState.LOADED, "")
        log.info("%s is loaded", name)

    async def _ask(self, adapter: DesiredAdapter, met: EngineSession) -> Verdict | None:
        """Return the verdict on the adapter, or None if it cannot be tested now."""
        if met.is_lost:
            return None
        trial = self._trials[adapter.lora_name]
        is_known = trial.compared == self._compared(adapter, met) and not trial.suspicions
        try:
            return await try_adapter(
                self._engine,
                self._store.get_path(adapter, met.base),
                lora_name=adapter.lora_name,
                base_name=met.state.served_name,
                base_canary=met.base_canary,
                corrupted_before=self._numbers.baseline,
                require_same_engine=lambda: self._require_same_engine(met),
                known=trial.parity if is_known else None,
            )
        except CannotSay as trouble:
            self._trials.postpone(adapter.lora_name, str(trouble))
            return None

    def _compared(self, adapter: DesiredAdapter, met: EngineSession) -> tuple[object, ...]:
        """Return what decides the numbers of an adapter: its files, the base model, the engine and its settings."""
        engine = (met.version, met.state.settings_sha256)
        return self._store.get_path(adapter, met.base), met.base, met.base_sha256, *engine

    async def _require_same_engine(self, met: EngineSession) -> None:
        """Raise EngineDown if the engine died meanwhile. Then its refusal is no evidence against the adapter."""
        await asyncio.sleep(0.5)
        await self._engine.list_models()
        if met.is_lost or read_engine_state(self._paths) != met.state:
            raise EngineDown("restarting")
