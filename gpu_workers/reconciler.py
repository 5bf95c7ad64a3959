"""Desired against loaded: what the serving agent does to its engine, one pass at a time.

An adapter is loaded only after its files were checked and, where there is a canary engine, only after that one has
tried it; customers are let in only after it answered a question with finite numbers that are not the base model's.
Where numbers went wrong all the same, the engine is given up: its cache keeps them for other customers' requests.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from apps.contracts.parity import ParityResult
from apps.contracts.serving import (
    DesiredAdapter,
    DesiredState,
    EngineLoad,
    LoadState,
    ObservedAdapter,
    ObservedState,
)
from apps.contracts.worker_api import EnrollResponse
from gpu_workers.adapter_store import AdapterRejected, AdapterStore, AdapterUnavailable, BaseIdentity
from gpu_workers.adapter_trial import NOT_LOADABLE, Verdict, try_adapter
from gpu_workers.api_client import ApiClient, ApiError, Unavailable
from gpu_workers.canary_engine import CanaryEngine
from gpu_workers.config import ServingConfig
from gpu_workers.engine import EnginePaths, EngineState, ReplicaBase, read_engine_state
from gpu_workers.engine_client import LORA_NAME, Canary, EngineClient, EngineDown, EngineRefused
from gpu_workers.engine_load import LoadMeter
from gpu_workers.front_door import FrontDoor
from gpu_workers.host_cache import HostCache
from gpu_workers.parity_check import CannotSay
from gpu_workers.private_files import write_private
from gpu_workers.serving_memory import hash_weights, read_memory
from gpu_workers.token_count import TokenCounter
from gpu_workers.whole_model import withdraw_model

log = logging.getLogger("anneal.serving")

QUARANTINE_SECONDS = 60.0  # adapters used this shortly before bad numbers appeared are suspects
MAX_SUSPICIONS = 3  # alone counts twice: the base model or the hardware may have been at fault once
RETRY_SECONDS = 10.0


class _Trial(msgspec.Struct):
    """What this agent knows of one desired adapter."""

    state: LoadState = LoadState.LOADING
    reason: str = ""
    retry_at: float = 0.0
    suspicions: int = 0
    parity: ParityResult | None = None


class Reconciler:
    """Drives one engine. Call `step` and `check_numbers` again and again; `changed` says that `observe` has news."""

    def __init__(
        self,
        *,
        config: ServingConfig,
        enrollment: EnrollResponse,
        api: ApiClient,
        store: AdapterStore,
        canary: CanaryEngine | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not enrollment.replica_id or not enrollment.replica_token or not enrollment.base_model:
            raise ValueError("the credential is not a replica's")
        self._config = config
        self._replica_id = enrollment.replica_id
        self._paths = EnginePaths(config.worker.work_dir.resolve())
        self._memory_path = self._paths.work_dir / "serving.json"
        self._memory = read_memory(self._memory_path)
        self._api = api
        self._store = store
        self._canary = canary
        self._clock = clock
        self._tokens = TokenCounter(self._paths)
        self.engine = EngineClient(self._paths.socket, note_asked=self._tokens.note_asked)
        self.door = FrontDoor(
            self.engine, token=enrollment.replica_token, base_served_name=enrollment.base_model["served_name"]
        )
        self._trials: dict[str, _Trial] = {}
        self._engine_state: EngineState | None = None
        self._loaded: set[str] = set()
        self._base_canary: Canary | None = None
        self._has_finished_first_pass = False
        self._condemned_generation = ""
        self._nan_baseline = 0
        self._nan_total = 0
        self._numbers_lock = asyncio.Lock()
        self._checked_activity = -1
        self._reason = "starting"
        self._has_stale_urls = False
        self._is_draining = False
        self._cache = HostCache(0)
        self._leaving: dict[str, Path] = {}  # unloaded, but perhaps with an answer under way
        self._meter = LoadMeter()
        self._load_seen = EngineLoad()
        self.changed = asyncio.Event()

    async def step(self) -> None:
        """Bring the engine one pass closer to what is desired."""
        await self._fetch_desired()
        if self._memory.desired is not None:
            self._sync_trials(self._memory.desired)
        try:
            await self._reconcile()
        except EngineDown as error:
            self._lose_engine(f"no engine: {error}"[:200])
        except EngineRefused as refusal:
            log.error("the engine refuses: %s", refusal)

    def observe(self) -> ObservedState:
        """Return what is loaded now, for the control plane."""
        desired = self._memory.desired
        state = self._engine_state
        adapters = [
            ObservedAdapter(lora_name=name, state=trial.state, reason=trial.reason[:300], parity=trial.parity)
            for name, trial in sorted(self._trials.items())
        ]
        return ObservedState(
            replica_id=self._replica_id,
            generation=desired.generation if desired else 0,
            engine_generation=state.generation if state else "",
            is_ready=not self._reason and not self._is_draining,
            adapters=tuple(adapters),
            nan_requests_total=self._nan_total,
            reason="draining" if self._is_draining else self._reason,
            url=self._config.url or _describe_url(self._config.listen),
            capacity=self._capacity(state),
            max_lora_rank=state.max_lora_rank if state else 0,
            max_loras=state.max_loras if state else 0,
            base_model_sha256=desired.base_model_sha256 if desired and state else "",
            load=self._load_seen,
            counted=self._tokens.seen() if state else None,
        )

    def begin_draining(self) -> None:
        """Say from now on that this replica is not ready, while it goes on answering."""
        self._is_draining = True
        self.changed.set()

    async def measure_load(self) -> None:
        """Look how the engine is doing."""
        state = self._engine_state
        if state is None:
            return
        try:
            metrics = await self._tokens.read(self.engine, state)
        except (EngineDown, EngineRefused):
            return
        self._load_seen = self._meter.read(
            metrics,
            state,
            cached_adapters=len(self._cache),
            waiting=self.door.count_waiting(),
            disk_bytes=await asyncio.to_thread(self._store.count_bytes),
        )

    def _capacity(self, state: EngineState | None) -> int:
        """Return how many adapters may be registered: with room in the engine's cache for those that come and go."""
        if state is None or not state.max_cpu_loras:
            return self._config.capacity
        most = max(1, state.max_cpu_loras - state.max_loras)
        return min(self._config.capacity or most, most)

    # --- desired ---------------------------------------------------------------------------------------------------

    async def _fetch_desired(self) -> None:
        """Take over a newer wish; without the control plane the last one stays."""
        current = self._memory.desired
        known = current.generation if current and not self._has_stale_urls else None
        try:
            fresh = await asyncio.to_thread(self._api.get_desired_state, self._replica_id, known_generation=known)
        except (Unavailable, ApiError) as error:
            log.warning("desired state not read: %s", error)
            return
        if fresh is None or (current is not None and fresh.generation < current.generation):
            return
        self._has_stale_urls = False
        if fresh != current:
            self._remember(desired=fresh)

    def _sync_trials(self, desired: DesiredState) -> None:
        wanted = {adapter.lora_name for adapter in desired.adapters}
        for name in set(self._trials) - wanted:
            del self._trials[name]
            self.changed.set()
        for name in wanted - set(self._trials):
            trial = _Trial(suspicions=self._memory.suspicions.get(name, 0))
            if name in self._memory.rejected:
                trial.state, trial.reason = LoadState.REJECTED, self._memory.rejected[name]
            self._trials[name] = trial
            self.changed.set()
        if self._canary is not None:
            self._canary.keep_only(wanted)

    # --- engine ----------------------------------------------------------------------------------------------------

    async def _reconcile(self) -> None:
        state = read_engine_state(self._paths)
        if state is None or state.generation == self._condemned_generation:
            raise EngineDown("starting" if state is None else "restarting after invalid numbers")
        models = {model.id: model.root for model in await self.engine.list_models()}
        if read_engine_state(self._paths) != state or state.served_name not in models:
            raise EngineDown("starting")
        desired = self._memory.desired
        if desired is None:
            raise EngineDown("the control plane has not said yet what to serve")
        if desired.is_withdrawn:
            await asyncio.to_thread(withdraw_model, self._paths, self._config.models_dir)
            raise EngineDown("its model was deleted")
        if desired.base_lora_served_name != state.served_name:
            raise EngineDown("the engine serves another base model than desired")
        if desired.base_model_sha256 not in ("", await asyncio.to_thread(hash_weights, Path(state.model_path))):
            raise EngineDown("the base model's weights are not the desired ones")
        if self._engine_state != state:
            await self._meet_engine(state)
        base = self._get_base(state)
        await self._match_loaded(desired, models, base)
        await self._load_missing(desired, state, models, base)
        self._has_finished_first_pass = True
        self._open_door()

    async def _meet_engine(self, state: EngineState) -> None:
        """Begin anew with an engine that has just started (or that this agent has just found)."""
        log.info("engine %s answers", state.generation)
        self._lose_engine("loading adapters")
        self._tokens.forget()
        self._nan_baseline = await self.engine.count_corrupted_requests()
        self._base_canary = await self._ask_base(state)
        self._engine_state = state
        self._cache = HostCache(state.max_cpu_loras)
        self._leaving.clear()
        self.door.set_slots(state.max_loras)
        desired = self._memory.desired
        if desired is not None and self._memory.cleaned_generation != state.generation:
            base = self._get_base(state)
            keep = [self._store.get_path(adapter, base) for adapter in desired.adapters]
            await asyncio.to_thread(self._store.collect_garbage, keep)
            self._remember(cleaned_generation=state.generation)

    async def _ask_base(self, state: EngineState) -> Canary:
        try:
            canary = await self.engine.ask_canary(state.served_name)
        except EngineRefused as refusal:
            raise EngineDown(f"the base model refuses: {refusal}") from refusal
        if not canary.is_finite():
            raise EngineDown("the base model gives invalid numbers")
        return canary

    def _lose_engine(self, reason: str) -> None:
        """Serve nobody until the engine is met again."""
        self.door.close(reason)
        self._engine_state = None
        self._loaded.clear()
        self._has_finished_first_pass = False
        for trial in self._trials.values():
            if trial.state is LoadState.LOADED:
                trial.state = LoadState.LOADING
        self._set_reason(reason)

    def _get_base(self, state: EngineState) -> BaseIdentity:
        return BaseIdentity(path=state.model_path, served_name=state.served_name, max_lora_rank=state.max_lora_rank)

    def _open_door(self) -> None:
        if self._engine_state is None or self._is_draining:  # lost while a pass was under way, or on the way out
            return
        self.door.open_for(self._loaded, expected=[n for n, t in self._trials.items() if _may_come(t)])
        self._set_reason("" if self._has_finished_first_pass else "loading adapters")

    # --- adapters --------------------------------------------------------------------------------------------------

    async def _match_loaded(self, desired: DesiredState, models: dict[str, str], base: BaseIdentity) -> None:
        """Forget every name that is not desired, or that stands for other files than desired."""
        wanted = {adapter.lora_name: str(self._store.get_path(adapter, base)) for adapter in desired.adapters}
        for name, root in models.items():
            trial = self._trials.get(name)
            if name == base.served_name or (name in self._loaded and wanted.get(name) == root):
                continue
            if wanted.get(name) == root and trial is not None and trial.state is not LoadState.REJECTED:
                if self._clock() >= trial.retry_at:  # the engine has it, but nobody vouches for it yet
                    await self._try_out(name)
                continue
            self._loaded.discard(name)
            self._open_door_if_met()
            await self.engine.unload_adapter(name)
            self._leaving[f"{name} {root}"] = Path(root)
        for name in self._loaded - set(models):
            self._loaded.discard(name)
            self._settle(name, LoadState.LOADING, "")
        self._give_back(models)

    def _give_back(self, models: dict[str, str]) -> None:
        """Let the files of unloaded adapters go once no answer under their names can read them again."""
        ended = [key for key in self._leaving if not self.door.is_used(key.split(" ", 1)[0])]
        paths = {self._leaving.pop(key) for key in ended}
        self._store.give_back(paths - {Path(root) for root in models.values()})

    def _open_door_if_met(self) -> None:
        if self._has_finished_first_pass:
            self._open_door()

    async def _load_missing(
        self, desired: DesiredState, state: EngineState, models: dict[str, str], base: BaseIdentity
    ) -> None:
        """Load what is desired and not there; the least suspected first."""
        for adapter in sorted(desired.adapters, key=lambda a: self._trials[a.lora_name].suspicions):
            trial = self._trials[adapter.lora_name]
            is_due = trial.state is not LoadState.REJECTED and self._clock() >= trial.retry_at
            if adapter.lora_name in models or not is_due:
                continue
            path = await self._fetch(adapter, base)
            if path is not None:
                await self._load(adapter.lora_name, path)
            if self._engine_state != state:
                raise EngineDown("restarting")
            self._open_door_if_met()
            if path is not None and self.door.count_in_flight():
                await asyncio.sleep(1.0)  # each load holds up everybody's tokens for a moment

    async def _fetch(self, adapter: DesiredAdapter, base: BaseIdentity) -> Path | None:
        """Return the folder with the checked files of an adapter that may be loaded; None where it may not be, now."""
        name = adapter.lora_name
        if LORA_NAME.fullmatch(name) is None:
            self._reject(name, "The engine name is not one of ours.")
        elif len(self._loaded) >= self._capacity(self._engine_state):
            self._postpone(name, "The replica holds as many adapters as it can.")
        else:
            try:
                path = await asyncio.to_thread(self._store.ensure, adapter, base)
                return path if self._is_cleared(adapter, path, base) else None
            except AdapterRejected as rejection:
                self._reject(name, str(rejection))
            except AdapterUnavailable as trouble:
                self._has_stale_urls = True
                self._postpone(name, str(trouble))
        return None

    def _is_cleared(self, adapter: DesiredAdapter, path: Path, base: BaseIdentity) -> bool:
        """Tell whether the customers' engine may meet the adapter: a new version meets the canary engine first."""
        name = adapter.lora_name
        if self._canary is None or adapter.is_tried or self._memory.passed.get(name) == path.name:
            return True
        try:
            verdict = self._canary.ask(name, path, ReplicaBase(served_name=base.served_name, path=base.path))
        except CannotSay as trouble:
            self._postpone(name, str(trouble))
            return False
        if verdict is None:
            self._settle(name, LoadState.LOADING, "A canary engine tries it first.")
            return False
        self._trials[name].parity = verdict.parity
        if verdict.reason:
            self._reject(name, verdict.reason)
            return False
        known = {other: folder for other, folder in self._memory.passed.items() if other in self._trials}
        self._remember(passed=known | {name: path.name})
        return True

    async def _load(self, name: str, path: Path) -> None:
        await self._spare_the_served()
        self._cache.touch(f"{name} {path}", used_at=time.monotonic())
        try:
            await self.engine.load_adapter(name, path)
        except EngineRefused as refusal:
            await self._require_same_engine()
            log.warning("engine refuses %s: %s", name, refusal)
            return self._reject(name, NOT_LOADABLE)
        return await self._try_out(name)

    async def _spare_the_served(self) -> None:
        """Before a load, see that what the engine's cache gives up for it is something no longer served."""
        served = await self._served_keys()
        for name, used_at in self.door.list_last_uses().items():
            if name in served:
                self._cache.touch(served[name], used_at=used_at)
        names = {key: name for name, key in served.items()}
        for key in self._cache.find_victims(names.keys()):
            await self.engine.touch(names[key])
            self._cache.touch(key, used_at=time.monotonic())

    async def _served_keys(self) -> dict[str, str]:
        """Return what tells each loaded adapter's files apart, by its name."""
        models = {model.id: model.root for model in await self.engine.list_models()}
        return {name: f"{name} {models[name]}" for name in self._loaded if name in models}

    async def _try_out(self, name: str) -> None:
        """Let customers in only if the adapter answers with finite numbers that are not the base model's."""
        async with self._numbers_lock:  # so that bad numbers seen meanwhile are blamed on this adapter
            verdict = await self._get_verdict(name)
            if verdict is None:
                return
            if verdict.parity is not None:
                self._trials[name].parity = verdict.parity
            if verdict.reason:
                self._reject(name, verdict.reason)
                await self.engine.unload_adapter(name)
                await self._judge_numbers(culprit=name)
                return
        self._loaded.add(name)
        self._settle(name, LoadState.LOADED, "")
        log.info("%s is loaded", name)

    async def _get_verdict(self, name: str) -> Verdict | None:
        """Return what the engine makes of the adapter, None when it could not be tried now."""
        state, desired = self._engine_state, self._memory.desired
        adapter = next((a for a in desired.adapters if a.lora_name == name), None) if desired else None
        if state is None or adapter is None:
            return None
        try:
            return await try_adapter(
                self.engine,
                self._store.get_path(adapter, self._get_base(state)),
                lora_name=name,
                base_name=state.served_name,
                base_canary=self._base_canary,
                corrupted_before=self._nan_baseline,
                require_same_engine=self._require_same_engine,
            )
        except CannotSay as trouble:
            self._postpone(name, str(trouble))
            return None

    async def _require_same_engine(self) -> None:
        """Raise EngineDown if the engine died meanwhile: then a refusal says nothing about the adapter."""
        await asyncio.sleep(0.5)
        await self.engine.list_models()
        if self._engine_state is None or read_engine_state(self._paths) != self._engine_state:
            raise EngineDown("restarting")

    def _reject(self, name: str, reason: str) -> None:
        log.warning("%s is rejected: %s", name, reason)
        self._remember(rejected=self._memory.rejected | {name: reason})
        self._settle(name, LoadState.REJECTED, reason)

    def _postpone(self, name: str, reason: str) -> None:
        log.warning("%s is not loaded: %s", name, reason)
        self._settle(name, LoadState.FAILED, reason)
        self._trials[name].retry_at = self._clock() + RETRY_SECONDS

    def _settle(self, name: str, state: LoadState, reason: str) -> None:
        trial = self._trials[name]
        if (trial.state, trial.reason) != (state, reason):
            trial.state, trial.reason = state, reason
            self.changed.set()

    # --- invalid numbers -------------------------------------------------------------------------------------------

    async def check_numbers(self) -> None:
        """Give the engine up as soon as one request in it had NaN in its logits. Costs nothing while it is idle."""
        activity = self.door.count_activity()
        if self._engine_state is None or activity == self._checked_activity:
            return
        async with self._numbers_lock:
            if await self._judge_numbers():
                self._checked_activity = activity

    async def _judge_numbers(self, *, culprit: str | None = None) -> bool:
        """Condemn the engine if its count of NaN requests has grown. Returns False when it could not be asked."""
        state = self._engine_state
        if state is None:
            return False
        try:
            count = await self.engine.count_corrupted_requests()
        except (EngineDown, EngineRefused):
            return False
        if count > self._nan_baseline and self._engine_state == state:
            self._nan_total += count - self._nan_baseline
            self._condemn(state, culprit)
        return True

    def _condemn(self, state: EngineState, culprit: str | None) -> None:
        suspects = set() if culprit else self.door.list_used_within(QUARANTINE_SECONDS) & self._loaded
        log.error("invalid numbers in engine %s; suspects: %s", state.generation, culprit or sorted(suspects))
        for name in suspects:
            self._suspect(name, is_alone=len(suspects) == 1)
        self._condemned_generation = state.generation
        self._lose_engine("restarting after invalid numbers")
        self._paths.restart_request.write_text(state.generation)

    def _suspect(self, name: str, *, is_alone: bool) -> None:
        trial = self._trials[name]
        trial.suspicions += 2 if is_alone else 1
        self._remember(suspicions=self._memory.suspicions | {name: trial.suspicions})
        if trial.suspicions >= MAX_SUSPICIONS:
            self._reject(name, "Requests to the adapter gave invalid numbers.")
        else:
            self._settle(name, LoadState.FAILED, "In quarantine: invalid numbers appeared while it was in use.")

    # --- memory -----------------------------------------------------------------------------------------------------

    def _set_reason(self, reason: str) -> None:
        if reason != self._reason:
            self._reason = reason
            self.changed.set()

    def _remember(self, **changes: Any) -> None:
        self._memory = msgspec.structs.replace(self._memory, **changes)
        write_private(self._memory_path, msgspec.json.encode(self._memory))


def _describe_url(listen: str) -> str:
    if listen.startswith(("/", "unix:")):
        return "unix:///" + listen.removeprefix("unix:").lstrip("/")
    return f"http://{listen}"


def _may_come(trial: _Trial) -> bool:
    return trial.state in (LoadState.LOADING, LoadState.LOADED, LoadState.FAILED)
