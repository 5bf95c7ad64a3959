"""The serving agent's loop: it brings the loaded adapters closer to the desired ones, one pass at a time.

An adapter is loaded only after its files were checked and, if there is a canary engine, only after that engine has
tested it. Customers are admitted only after it answered a question with finite numbers that differ from the base
model's. If an engine still produces bad numbers, the agent ends it, because its cache would pass them on to other
customers' requests.
"""

import asyncio
import logging
import re
import time
from collections.abc import Callable
from pathlib import Path

from apps.contracts.serving import DesiredState, EngineLoad, LoadState, ObservedState
from apps.contracts.worker_api import EnrollResponse
from gpu_workers.common.api_client import ApiClient, ApiError, Unavailable
from gpu_workers.common.config import ServingConfig
from gpu_workers.engine.client import EngineClient, EngineDown, EngineRefused
from gpu_workers.engine.load import LoadMeter
from gpu_workers.engine.state import EnginePaths, EngineState, read_engine_state
from gpu_workers.serving.adapters.loader import AdapterLoader, EngineSession
from gpu_workers.serving.adapters.store import AdapterStore
from gpu_workers.serving.agent_memory import MemoryFile, hash_weights
from gpu_workers.serving.traffic.front_door import FrontDoor
from gpu_workers.serving.traffic.number_watch import NumberWatch
from gpu_workers.serving.traffic.token_count import TokenCounter
from gpu_workers.serving.trials.canary_engine import CanaryEngine
from gpu_workers.serving.trials.verdicts import Trials
from gpu_workers.serving.whole_model import withdraw_model

log = logging.getLogger("anneal.serving")

OLDEST_VLLM = (0, 25)  # an older one may answer with another customer's weights after a load (vllm-project/vllm#47724)
QUARANTINE_SECONDS = 60.0  # adapters used this shortly before bad numbers are suspects


class Reconciler:
    """Drives one engine. Call `step` and `check_numbers` repeatedly; `changed` is set when `observe` has news."""

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
        self._memory = MemoryFile(self._paths.work_dir / "serving.json")
        self._api = api
        self._store = store
        self._canary = canary
        self._tokens = TokenCounter(self._paths)
        self.engine = EngineClient(self._paths.socket, record_asked=self._tokens.record_asked)
        self.door = FrontDoor(
            self.engine, token=enrollment.replica_token, base_served_name=enrollment.base_model["served_name"]
        )
        self.changed = asyncio.Event()
        self.not_ready_reported = asyncio.Event()  # the control plane knows that it is draining
        self._trials = Trials(self._memory, changed=self.changed, clock=clock)
        self._met: EngineSession | None = None
        self._numbers = NumberWatch(self.engine, get_state=self._get_state, condemn=self._condemn)
        self._loader = AdapterLoader(
            engine=self.engine,
            paths=self._paths,
            door=self.door,
            store=store,
            canary=canary,
            trials=self._trials,
            numbers=self._numbers,
        )
        self._has_finished_first_pass = False
        self._condemned_generation = ""
        self._reason = "starting"
        self._is_draining = False
        self._meter = LoadMeter()
        self._load_seen = EngineLoad()

    async def step(self) -> None:
        """Bring the engine one pass closer to the desired state."""
        await self._fetch_desired()
        desired = self._memory.content.desired
        if desired is not None:
            wanted = {adapter.lora_name for adapter in desired.adapters}
            self._trials.follow(wanted)
            if self._canary is not None:
                self._canary.keep_only(wanted)
        try:
            await self._reconcile()
        except EngineDown as error:
            self._lose_engine(f"no engine: {error}"[:200])
        except EngineRefused as refusal:
            log.error("the engine refuses: %s", refusal)

    def observe(self) -> ObservedState:
        """Return the currently loaded adapters, for the control plane."""
        desired, state = self._memory.content.desired, self._get_state()
        return ObservedState(
            replica_id=self._replica_id,
            generation=desired.generation if desired else 0,
            engine_generation=state.generation if state else "",
            is_ready=not self._reason and not self._is_draining,
            adapters=self._trials.observe(),
            nan_requests_total=self._numbers.total,
            reason="draining" if self._is_draining else self._reason,
            url=self._config.reached_at,
            capacity=self._capacity(state),
            max_lora_rank=state.max_lora_rank if state else 0,
            max_loras=state.max_loras if state else 0,
            base_model_sha256=desired.base_model_sha256 if desired and state else "",
            load=self._load_seen,
            counted=self._tokens.seen() if state else None,
        )

    def begin_draining(self) -> None:
        """Report from now on that this replica is not ready, but keep answering."""
        self._is_draining = True
        self.changed.set()

    def record_reported(self, state: ObservedState) -> None:
        """Record that the control plane has received this result of `observe`."""
        if self._is_draining and not state.is_ready:
            self.not_ready_reported.set()

    async def measure_load(self) -> None:
        """Measure the load of the engine."""
        met = self._met
        if met is None:
            return
        try:
            metrics = await self._tokens.read(self.engine, met.state)
        except (EngineDown, EngineRefused):
            return
        self._load_seen = self._meter.read(
            metrics,
            met.state,
            cached_adapters=len(met.cache),
            waiting=self.door.count_waiting(),
            disk_bytes=await asyncio.to_thread(self._store.count_bytes),
        )

    async def check_numbers(self) -> None:
        """End the engine as soon as one of its requests had NaN in its logits.

        This costs nothing while the engine is idle.
        """
        await self._numbers.check(self.door.count_activity())

    def _get_state(self) -> EngineState | None:
        """Return the launcher's state of the engine that this agent works with now, or None without one."""
        return self._met.state if self._met is not None else None

    def _capacity(self, state: EngineState | None) -> int:
        """Return how many adapters may be registered. The rest of the engine's cache is for temporary ones."""
        if state is None or not state.max_cpu_loras:
            return self._config.capacity
        most = max(1, state.max_cpu_loras - state.max_loras)
        return min(self._config.capacity or most, most)

    # --- desired ---------------------------------------------------------------------------------------------------

    async def _fetch_desired(self) -> None:
        """Fetch the desired state if it changed. If the control plane cannot be reached, the last one stays."""
        current = self._memory.content.desired
        known = current.generation if current and not self._loader.has_stale_urls else None
        try:
            fresh = await asyncio.to_thread(self._api.get_desired_state, self._replica_id, known_generation=known)
        except (Unavailable, ApiError) as error:
            log.warning("desired state not read: %s", error)
            return
        if fresh is None:
            return
        self._loader.has_stale_urls = False
        if fresh != current:
            self._memory.change(desired=fresh)

    # --- engine ----------------------------------------------------------------------------------------------------

    async def _reconcile(self) -> None:
        state = read_engine_state(self._paths)
        if state is None or state.generation == self._condemned_generation:
            raise EngineDown("starting" if state is None else "restarting after invalid numbers")
        models = {model.id: model.root for model in await self.engine.list_models()}
        if read_engine_state(self._paths) != state or state.served_name not in models:
            raise EngineDown("starting")
        desired = self._memory.content.desired
        if desired is None:
            raise EngineDown("the control plane has not said yet what to serve")
        if desired.is_withdrawn:
            await asyncio.to_thread(withdraw_model, self._paths, self._config.models_dir)
            raise EngineDown("its model was deleted")
        if desired.base_lora_served_name != state.served_name:
            raise EngineDown("the engine serves another base model than desired")
        if desired.base_model_sha256 not in ("", await asyncio.to_thread(hash_weights, Path(state.model_path))):
            raise EngineDown("the base model's weights are not the desired ones")
        met = self._met
        if met is None or met.state != state:
            met = await self._meet_engine(state, desired)
        await self._match_loaded(desired, models, met)
        await self._load_missing(desired, models, met)
        self._has_finished_first_pass = True
        self._open_door()

    async def _meet_engine(self, state: EngineState, desired: DesiredState) -> EngineSession:
        """Begin a session with an engine that has just started, or that this agent has just found."""
        log.info("engine %s answers", state.generation)
        self._lose_engine("loading adapters")
        version = await self.engine.get_version()
        found = re.match(r"(\d+)\.(\d+)", version)
        if found is None or (int(found[1]), int(found[2])) < OLDEST_VLLM:
            raise EngineDown(f"its vLLM is {version[:40]}, older than {'.'.join(map(str, OLDEST_VLLM))}")
        self._tokens.forget()
        await self._numbers.begin()
        try:
            canary = await self.engine.ask_canary(state.served_name)
        except EngineRefused as refusal:
            raise EngineDown(f"the base model refuses: {refusal}") from refusal
        if not canary.is_finite():
            raise EngineDown("the base model gives invalid numbers")
        met = self._met = EngineSession(state, canary, version=version, base_sha256=desired.base_model_sha256)
        self.door.set_slots(state.max_loras)
        if self._memory.content.cleaned_generation != state.generation:
            keep = [self._store.get_path(adapter, met.base) for adapter in desired.adapters]
            await asyncio.to_thread(self._store.collect_garbage, keep)
            self._memory.change(cleaned_generation=state.generation)
        return met

    def _lose_engine(self, reason: str) -> None:
        """Serve no requests until a new session with the engine begins."""
        self.door.close(reason)
        if self._met is not None:
            self._met.give_up()
            self._met = None
        self._has_finished_first_pass = False
        self._trials.record_engine_lost()
        self._set_reason(reason)

    def _open_door(self) -> None:
        if self._met is None or self._is_draining:  # lost during a pass, or while draining
            return
        self.door.open_for(self._met.loaded, expected=self._trials.list_expected())
        self._set_reason("" if self._has_finished_first_pass else "loading adapters")

    # --- adapters --------------------------------------------------------------------------------------------------

    async def _match_loaded(self, desired: DesiredState, models: dict[str, str], met: EngineSession) -> None:
        """Unload every name that is not desired, or whose files are not the desired ones."""
        wanted = {adapter.lora_name: adapter for adapter in desired.adapters}
        folders = {name: str(self._store.get_path(adapter, met.base)) for name, adapter in wanted.items()}
        for name, root in models.items():
            is_right = folders.get(name) == root
            if name == met.state.served_name or (name in met.loaded and is_right):
                continue
            if is_right and not self._trials.is_rejected(name):
                if self._trials.is_due(name):  # the engine has it, but it is not tested yet
                    await self._loader.try_out(wanted[name], met)
                continue
            met.loaded.discard(name)
            self._open_door_if_met()
            await self.engine.unload_adapter(name)
            met.leaving[f"{name} {root}"] = Path(root)
        for name in met.loaded - set(models):
            met.loaded.discard(name)
            self._trials.settle(name, LoadState.LOADING, "")
        # Release the files of unloaded adapters once no answer under their names can read them again.
        ended = [key for key in met.leaving if not self.door.is_used(key.split(" ", 1)[0])]
        paths = {met.leaving.pop(key) for key in ended}
        self._store.give_back(paths - {Path(root) for root in models.values()})

    def _open_door_if_met(self) -> None:
        if self._has_finished_first_pass:
            self._open_door()

    async def _load_missing(self, desired: DesiredState, models: dict[str, str], met: EngineSession) -> None:
        """Load the desired adapters that are missing, the least suspected first."""
        for adapter in sorted(desired.adapters, key=lambda a: self._trials[a.lora_name].suspicions):
            if adapter.lora_name in models or not self._trials.is_due(adapter.lora_name):
                continue
            path = await self._loader.fetch(adapter, met, capacity=self._capacity(met.state))
            if path is not None:
                await self._loader.load(adapter, path, met)
            if self._met is not met:
                raise EngineDown("restarting")
            self._open_door_if_met()
            if path is not None and self.door.count_in_flight():
                await asyncio.sleep(1.0)  # each load delays all customers' tokens for a moment

    def _condemn(self, state: EngineState, culprit: str | None) -> None:
        """End an engine with bad numbers. If no adapter is known to be the cause, suspect its recent ones."""
        suspects = set()
        if culprit is None and self._met is not None:
            suspects = self.door.list_used_within(QUARANTINE_SECONDS) & self._met.loaded
        log.error("invalid numbers in engine %s; suspects: %s", state.generation, culprit or sorted(suspects))
        self._condemned_generation = state.generation
        self._paths.restart_request.write_text(state.generation)
        self._trials.suspect(suspects)
        self._lose_engine("restarting after invalid numbers")

    def _set_reason(self, reason: str) -> None:
        if reason != self._reason:
            self._reason = reason
            self.changed.set()
