"""Both engines of a replica as scripts, and the real agent between them, driven turn by turn."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
from aiohttp import web

from apps.contracts.serving import DesiredAdapter, DesiredState, LoadState, ObservedAdapter
from apps.contracts.worker_api import EnrollResponse
from gpu_workers.common.config import ServingConfig, WorkerConfig
from gpu_workers.common.files import PRIVATE, replace_file
from gpu_workers.common.process_tree import Process
from gpu_workers.engine.state import EnginePaths, EngineState
from gpu_workers.serving.reconciler import Reconciler
from gpu_workers.serving.trials.canary_engine import CanaryEngine
from tests.support.engines.models import SERVED_NAME, name_of

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
        self.refusals: list[int] = []  # the HTTP status of each of the next loads
        self.version = "0.32.0"
        self.settings_sha256 = ""
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
        app.router.add_get("/version", self._version)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/load_lora_adapter", self._load)
        app.router.add_post("/v1/unload_lora_adapter", self._unload)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.UnixSite(self._runner, str(self.paths.socket)).start()
        state = EngineState(
            generation=self.generation, served_name=SERVED_NAME, model_path=self.model, launcher=Process(1, 1),
            keeper=Process(1, 1), max_loras=2, max_lora_rank=16, max_cpu_loras=8,
            settings_sha256=self.settings_sha256,
        )  # fmt: skip
        replace_file(self.paths.state, msgspec.json.encode(state), mode=PRIVATE)

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        self._runner = None

    async def _models(self, _: web.Request) -> web.Response:
        models = {SERVED_NAME: self.model} | self.loaded
        return web.json_response({"data": [{"id": name, "root": root} for name, root in models.items()]})

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": self.version})

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=f'vllm:corrupted_requests_total{{engine="0"}} {self.corrupted}\n')

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.events.append(f"{self.title} loads {body['lora_name'].rstrip('0')}")
        if body["lora_name"] == UNLOADABLE:
            return web.json_response({"error": {"message": "no"}}, status=500)
        if self.refusals:
            return web.json_response({"error": {"message": "not now"}}, status=self.refusals.pop(0))
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
        number = None if model == MUTE else -1.0 if model in (SERVED_NAME, NOOP) else -2.0
        answer = {"tokens": ["x"], "token_logprobs": [number]}
        usage = {"prompt_tokens": 5, "completion_tokens": 1}
        return web.json_response({"choices": [{"logprobs": answer}], "usage": usage})


class Plane:
    """The control plane: one wish."""

    def __init__(self, adapters: list[DesiredAdapter]) -> None:
        self.desired = DesiredState(
            replica_id="rep_1", base_lora_served_name=SERVED_NAME, base_model_sha256="", generation=1,
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
            replica_token="a-token-long-enough", base_model={"served_name": SERVED_NAME},
        )  # fmt: skip
        worker = WorkerConfig(internal_url="http://x", credential_file=folder / "c", work_dir=folder)
        self.plane = Plane(list(adapters))
        self.reconciler = Reconciler(
            config=ServingConfig(worker=worker, listen="/x"), enrollment=enrollment, api=self.plane,
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
