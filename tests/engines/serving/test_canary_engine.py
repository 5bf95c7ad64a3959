"""A new adapter version meets the canary engine first: what dies or is refused there never reaches the customers'."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from apps.contracts.serving import DesiredAdapter, DesiredState, LoadState, ObservedAdapter
from apps.contracts.worker_api import EnrollResponse
from gpu_workers.canary_engine import DEADLY, IDLE_SECONDS, START_SECONDS, CanaryEngine
from gpu_workers.config import ServingConfig, WorkerConfig
from gpu_workers.engine_client import EngineClient
from gpu_workers.engine_load import sum_samples
from gpu_workers.engine_state import EnginePaths, EngineState, read_engine_state
from gpu_workers.private_files import write_private
from gpu_workers.process_tree import Process, is_alive, list_descendants, list_session
from gpu_workers.reconciler import Reconciler
from tests.engines.serving.adapters import make_arrays, make_files
from tests.engines.serving.replica import ROOT, UNCOMPILED
from tests.engines.serving.replica import START_SECONDS as REAL_START_SECONDS

BASE = "b-demo"


def name_of(word: str) -> str:
    return "a-" + word.ljust(26, "0")


GOOD, NAN, DEADLY_ONE, UNLOADABLE = (name_of(word) for word in ("good", "nan", "deadly", "unloadable"))
LONG_NAN, COUNTED_NAN, MUTE, NOOP = (name_of(word) for word in ("longnan", "countednan", "mute", "noop"))


class Engine:
    """vLLM's words on a Unix socket, with a launcher that starts and ends it as the files in its folder say."""

    def __init__(self, title: str, paths: EnginePaths, events: list[str]) -> None:
        self.title, self.paths, self.events = title, paths, events
        self.model = "/m"
        self.loaded: dict[str, str] = {}
        self.corrupted = 0
        self.starts = 0
        self.starts_never = False
        self._runner: web.AppRunner | None = None

    @property
    def generation(self) -> str:
        return f"{self.title}-{self.starts}"

    async def look(self) -> None:
        """One turn of the launcher."""
        request = self.paths.restart_request
        if self._runner is not None and request.exists() and request.read_text() == self.generation:
            await self.stop()
            self.events.append(f"{self.title} ended")
        if self._runner is None and self.paths.replica.exists() and not self.starts_never:
            await self.start()

    async def start(self) -> None:
        self.starts += 1
        self.loaded, self.corrupted = {}, 0
        self.events.append(f"{self.title} started")
        self.paths.folder.mkdir(exist_ok=True, parents=True)
        self.paths.socket.unlink(missing_ok=True)
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/load_lora_adapter", self._load)
        app.router.add_post("/v1/unload_lora_adapter", self._unload)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.UnixSite(self._runner, str(self.paths.socket)).start()
        state = EngineState(
            generation=self.generation, served_name=BASE, model_path=self.model, launcher=Process(1, 1),
            keeper=Process(1, 1), max_loras=2, max_lora_rank=16, max_cpu_loras=8,
        )  # fmt: skip
        write_private(self.paths.state, msgspec.json.encode(state))

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        self._runner = None

    async def _models(self, _: web.Request) -> web.Response:
        models = {BASE: self.model} | self.loaded
        return web.json_response({"data": [{"id": name, "root": root} for name, root in models.items()]})

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=f'vllm:corrupted_requests_total{{engine="0"}} {self.corrupted}\n')

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.events.append(f"{self.title} loads {body['lora_name'].rstrip('0')}")
        if body["lora_name"] == UNLOADABLE:
            return web.json_response({"error": {"message": "no"}}, status=500)
        self.loaded[body["lora_name"]] = body["lora_path"]
        return web.Response()

    async def _unload(self, request: web.Request) -> web.Response:
        is_known = self.loaded.pop((await request.json())["lora_name"], None) is not None
        return web.Response(status=200 if is_known else 404)

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        model = body["model"]
        if model == DEADLY_ONE:
            self.events.append(f"{self.title} died")
            assert request.transport is not None
            request.transport.abort()
            asyncio.get_running_loop().create_task(self.stop())
            return web.Response()
        if model == COUNTED_NAN:  # it shows in none of the tokens that were chosen
            self.corrupted += 1
        if model == NAN or (model == LONG_NAN and "truncate_prompt_tokens" in body):
            self.corrupted += 1
            return web.json_response({"error": {"message": "not finite"}}, status=400)
        number = None if model == MUTE else -1.0 if model in (BASE, NOOP) else -2.0
        answer = {"tokens": ["x"], "token_logprobs": [number]}
        usage = {"prompt_tokens": 5, "completion_tokens": 1}
        return web.json_response({"choices": [{"logprobs": answer}], "usage": usage})


class Plane:
    """The control plane: one wish."""

    def __init__(self, adapters: list[DesiredAdapter]) -> None:
        self.desired = DesiredState(
            replica_id="rep_1", base_lora_served_name=BASE, base_model_sha256="", generation=1,
            adapters=tuple(adapters),
        )  # fmt: skip

    def get_desired_state(self, replica_id: str, *, known_generation: int | None = None) -> DesiredState:
        return self.desired


class Store:
    """Files that are always here; what they hold is the engines' script."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get_path(self, adapter: DesiredAdapter, base: object) -> Path:
        return self._folder / adapter.lora_name

    ensure = get_path

    def collect_garbage(self, keep: list[Path]) -> list[Path]:
        return []

    def give_back(self, paths: set[Path]) -> None:
        return


class Stage:
    """Both engines and the agent between them, driven turn by turn on a clock of its own."""

    def __init__(self, folder: Path, *adapters: DesiredAdapter, has_canary: bool = True) -> None:
        self.now = 0.0
        self.events: list[str] = []
        self.shared = Engine("shared", EnginePaths(folder), self.events)
        self.trial = Engine("canary", EnginePaths(folder / "canary"), self.events)
        self.canary = CanaryEngine(folder / "canary", clock=lambda: self.now) if has_canary else None
        enrollment = EnrollResponse(
            worker_id="wrk_1", credential="c", pool="cpu", replica_id="rep_1",
            replica_token="a-token-long-enough", base_model={"served_name": BASE},
        )  # fmt: skip
        worker = WorkerConfig(internal_url="http://x", credential_file=folder / "c", work_dir=folder)
        self.reconciler = Reconciler(
            config=ServingConfig(worker=worker, listen="/x"), enrollment=enrollment, api=Plane(list(adapters)),
            store=Store(folder), canary=self.canary, clock=lambda: self.now,
        )  # fmt: skip

    async def turn(self, times: int = 1, *, seconds: float = 1.0) -> None:
        for _ in range(times):
            self.now += seconds
            await self.reconciler.step()
            await self.trial.look()
            if self.canary is not None:
                await self.canary.step()

    def seen(self, name: str) -> ObservedAdapter:
        return next(row for row in self.reconciler.observe().adapters if row.lora_name == name)

    def state_of(self, name: str) -> LoadState | None:
        return next((row.state for row in self.reconciler.observe().adapters if row.lora_name == name), None)


def adapter(name: str, *, is_tried: bool = False) -> DesiredAdapter:
    return DesiredAdapter(
        lora_name=name, version_id="adpv", manifest_sha256="", rank=8, files=(), is_tried=is_tried
    )  # fmt: skip


def make_stage(folder: Path, *adapters: DesiredAdapter, has_canary: bool = True) -> Callable[..., None]:
    """Return what plays a script; the clients need a running loop, so the stage is built inside it."""

    def play(script: Callable[[Stage], Awaitable[None]]) -> None:
        async def whole() -> None:
            stage = Stage(folder, *adapters, has_canary=has_canary)
            await stage.shared.start()
            try:
                await script(stage)
            finally:
                await stage.reconciler.engine.close()
                if stage.canary is not None:
                    await stage.canary.close()
                await stage.shared.stop()
                await stage.trial.stop()

        asyncio.run(whole())

    return play


def test_a_new_version_is_loaded_for_customers_only_after_it_passed_elsewhere(tmp_path: Path) -> None:
    async def script(stage: Stage) -> None:
        await stage.turn()
        assert (stage.seen(GOOD).state, stage.seen(GOOD).reason) == (
            LoadState.LOADING,
            "A canary engine tries it first.",
        )
        assert stage.reconciler.observe().is_ready  # the others need not wait for it
        await stage.turn(2)
        assert stage.seen(GOOD).state is LoadState.LOADED

    make_stage(tmp_path, adapter(GOOD))(script)


def test_events_come_in_order(tmp_path: Path) -> None:
    async def script(stage: Stage) -> None:
        await stage.turn(3)
        assert stage.events == ["shared started", "canary started", "canary loads a-good", "shared loads a-good"]

    make_stage(tmp_path, adapter(GOOD))(script)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (NAN, "invalid numbers"),
        (LONG_NAN, "invalid numbers"),
        (COUNTED_NAN, "invalid numbers"),
        (MUTE, "invalid numbers"),
        (NOOP, "exactly as the base model"),
        (UNLOADABLE, "could not load"),
        (DEADLY_ONE, DEADLY),
    ],
)
def test_a_version_that_fails_there_is_rejected_and_the_shared_engine_never_saw_it(
    tmp_path: Path, name: str, reason: str
) -> None:
    async def script(stage: Stage) -> None:
        await stage.turn(8)
        assert stage.seen(name).state is LoadState.REJECTED and reason in stage.seen(name).reason
        assert stage.seen(GOOD).state is LoadState.LOADED
        assert [event for event in stage.events if event.startswith("shared")] == [
            "shared started",
            "shared loads a-good",
        ]
        assert stage.events.count("canary died") == (2 if name == DEADLY_ONE else 0)

    make_stage(tmp_path, adapter(name), adapter(GOOD))(script)


def test_an_engine_with_bad_numbers_in_it_tries_no_other_version(tmp_path: Path) -> None:
    async def script(stage: Stage) -> None:
        await stage.turn(6)
        assert stage.events[1:] == [
            "canary started", "canary loads a-nan", "canary ended", "canary started", "canary loads a-good",
            "shared loads a-good",
        ]  # fmt: skip

    make_stage(tmp_path, adapter(NAN), adapter(GOOD))(script)


def test_several_versions_share_one_start_and_the_engine_ends_when_it_is_idle(tmp_path: Path) -> None:
    others = [adapter(name_of(f"other{n}")) for n in range(3)]

    async def script(stage: Stage) -> None:
        await stage.turn(8)
        assert all(stage.seen(one.lora_name).state is LoadState.LOADED for one in others)
        await stage.turn(seconds=IDLE_SECONDS - 10)
        assert "canary ended" not in stage.events
        await stage.turn(2, seconds=11)
        assert (stage.events.count("canary started"), stage.events.count("canary ended")) == (1, 1)
        await stage.turn(3)
        assert stage.events[-1] == "canary ended"  # it stays so while nobody needs it

    make_stage(tmp_path, *others)(script)


def test_what_an_engine_tried_before_needs_no_canary_engine_nor_does_anything_where_there_is_none(
    tmp_path: Path,
) -> None:
    async def script(stage: Stage) -> None:
        await stage.turn(2)
        assert stage.events == ["shared started", "shared loads a-good"]

    for folder, has_canary in (("tried", True), ("none", False)):
        (tmp_path / folder).mkdir()
        make_stage(tmp_path / folder, adapter(GOOD, is_tried=has_canary), has_canary=has_canary)(script)


@pytest.mark.parametrize("name", [LONG_NAN, COUNTED_NAN])
def test_without_a_canary_engine_the_shared_one_finds_bad_numbers_too_and_is_given_up(
    tmp_path: Path, name: str
) -> None:
    async def script(stage: Stage) -> None:
        await stage.turn()
        assert stage.seen(name).state is LoadState.REJECTED and "invalid numbers" in stage.seen(name).reason
        assert stage.shared.paths.restart_request.read_text() == stage.shared.generation
        assert name not in stage.shared.loaded

    make_stage(tmp_path, adapter(name), has_canary=False)(script)


def test_an_engine_is_given_fewer_adapters_than_its_cache_holds_by_its_slots(tmp_path: Path) -> None:
    """Unloading frees nothing: without that room those that come and go would push out those being served."""

    async def script(stage: Stage) -> None:
        await stage.turn(2)
        states = [row.state for row in stage.reconciler.observe().adapters]
        assert (states.count(LoadState.LOADED), states.count(LoadState.FAILED)) == (6, 1)  # eight cached, two slots

    make_stage(tmp_path, *(adapter(name_of(f"one{n}")) for n in range(7)), has_canary=False)(script)


def test_a_passed_version_is_not_tried_again_by_the_next_agent(tmp_path: Path) -> None:
    async def first(stage: Stage) -> None:
        await stage.turn(3)
        assert stage.seen(GOOD).state is LoadState.LOADED

    async def second(stage: Stage) -> None:
        await stage.turn(2)
        assert stage.seen(GOOD).state is LoadState.LOADED and "canary started" not in stage.events

    make_stage(tmp_path, adapter(GOOD))(first)
    make_stage(tmp_path, adapter(GOOD))(second)


def test_an_engine_that_never_starts_lets_nothing_through_and_says_so(tmp_path: Path) -> None:
    async def script(stage: Stage) -> None:
        stage.trial.starts_never = True
        await stage.turn(2)
        await stage.turn(2, seconds=START_SECONDS)
        assert stage.seen(GOOD).state is LoadState.FAILED
        assert stage.seen(GOOD).reason == "The canary engine does not start."
        assert stage.events == ["shared started"]

    make_stage(tmp_path, adapter(GOOD))(script)


def test_an_engine_that_nobody_wants_any_more_is_ended(tmp_path: Path) -> None:
    """Its agent was killed between taking back the wish and saying so."""

    async def script(stage: Stage) -> None:
        await stage.trial.start()
        await stage.turn(2)
        assert stage.events[-1] == "canary ended"

    make_stage(tmp_path)(script)


REAL_ROOM = 512  # tokens, of the demo base model


async def count_read(paths: EnginePaths) -> float:
    """Return how many tokens of prompts the real engine has read."""
    engine = EngineClient(paths.socket)
    try:
        return sum_samples(await engine.read_metrics())["prompt_tokens_total"]
    finally:
        await engine.close()


def read_log(folder: Path) -> str:
    return (folder / "canary.log").read_text()


def test_real_vllm_tries_both_is_ended_when_idle_and_leaves_no_process(tmp_path: Path) -> None:
    model = ROOT / "demo" / "base_model"
    arrays = make_arrays(model)
    idle = {name: array * 0 if ".lora_B." in name else array for name, array in arrays.items()}
    for name, files in ((GOOD, make_files(arrays)), (NOOP, make_files(idle))):
        (tmp_path / name).mkdir()
        for file, content in files.items():
            (tmp_path / name / file).write_bytes(content)
    environment = os.environ | {
        "ANNEAL_WORK_DIR": str(tmp_path),
        "ANNEAL_ENGINE_MAX_LORAS": "2",
        "ANNEAL_ENGINE_MAX_LORA_RANK": "16",
        "ANNEAL_CANARY_KV_CACHE_BYTES": str(64 * 2**20),
        "ANNEAL_ENGINE_EXTRA_ARGUMENTS": UNCOMPILED,
    }

    async def script(stage: Stage) -> None:
        stage.shared.model = str(model)
        await stage.shared.restart()
        stage.trial.starts_never = True  # the real launcher reads its files instead
        deadline = time.monotonic() + REAL_START_SECONDS
        while {stage.state_of(name) for name in (GOOD, NOOP)} & {LoadState.LOADING, None}:
            assert launcher.poll() is None and time.monotonic() < deadline, read_log(tmp_path)[-3000:]
            await stage.turn(seconds=0)
            await asyncio.sleep(0.2)

        assert stage.state_of(GOOD) is LoadState.LOADED
        assert stage.state_of(NOOP) is LoadState.REJECTED and "exactly as the base model" in stage.seen(NOOP).reason
        assert [event for event in stage.events if "loads" in event] == ["shared loads a-good"]
        # Base and both versions were asked a prompt as long as the engine takes, beside a short one.
        assert await count_read(stage.trial.paths) > 3 * (REAL_ROOM - 8)
        state = read_engine_state(stage.trial.paths)
        assert state is not None and stage.trial.paths.folder.stat().st_mode & 0o777 == 0o700
        parts = [state.launcher, state.keeper, *list_descendants(state.launcher.pid), *list_session(state.keeper)]
        assert len(set(parts)) > 3
        await stage.turn(seconds=IDLE_SECONDS)
        assert await asyncio.to_thread(launcher.wait, 60) != 0  # its supervisor starts it again, to wait
        assert not any(map(is_alive, parts))

    with open(tmp_path / "canary.log", "wb") as log:
        command = [sys.executable, "-m", "gpu_workers.engine", "canary"]
        launcher = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=ROOT)
    try:
        make_stage(tmp_path, adapter(GOOD), adapter(NOOP))(script)
    finally:
        if launcher.poll() is None:
            launcher.terminate()
            launcher.wait(60)
