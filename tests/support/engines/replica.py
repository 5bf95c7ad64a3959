"""A whole replica as real processes: launcher with vLLM under a restarting supervisor, and the agent beside it."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx

from apps.contracts.serving import DesiredAdapter, LoadState
from gpu_workers.common.config import REPOSITORY
from gpu_workers.common.process_tree import Process, list_descendants, list_session, read_title
from gpu_workers.engine.state import EnginePaths, EngineState, read_engine_state, read_parts
from tests.support.engines.control_plane import ENROLL_TOKEN, ControlPlane
from tests.support.waiting import wait_until

START_SECONDS = 600  # 25 s on two idle cores; the machine may be busy
ANSWER_SECONDS = 300  # the machine may stand still meanwhile
DRAIN_SECONDS = 180  # longer than a test keeps an engine from answering
CACHED_ADAPTERS = 8  # in the engine's own cache


class Replica:
    """Started whole; `stop` ends every process of it."""

    def __init__(
        self,
        work_dir: Path,
        plane: ControlPlane,
        *,
        python: str = sys.executable,
        settings: dict[str, str] | None = None,
    ) -> None:
        self.plane = plane
        self._python = python
        self.paths = EnginePaths(work_dir)
        self.listen = work_dir / "door" / "replica.sock"
        token_file = work_dir / "token"
        token_file.write_text(ENROLL_TOKEN)
        self._environment = os.environ | {
            "ANNEAL_WORK_DIR": str(work_dir),
            "ANNEAL_INTERNAL_URL": plane.url,
            "ANNEAL_ENROLL_TOKEN_FILE": str(token_file),
            "ANNEAL_REPLICA_LISTEN": str(self.listen),
            "ANNEAL_ENGINE_MAX_LORAS": "2",
            "ANNEAL_ENGINE_MAX_CPU_LORAS": str(CACHED_ADAPTERS),
            "ANNEAL_ENGINE_MAX_LORA_RANK": "16",
            "ANNEAL_REPLICA_CACHE_BYTES": "1",
            "ANNEAL_ENGINE_DRAIN_SECONDS": str(DRAIN_SECONDS),
            "ANNEAL_ENGINE_KV_CACHE_BYTES": str(64 * 2**20),
            "PYTHONPATH": str(REPOSITORY),
            **(settings or {}),
        }
        self._logs = work_dir
        self._is_stopping = threading.Event()
        self.launcher: subprocess.Popen[bytes] | None = None
        self.start_agent()
        self._supervisor = threading.Thread(target=self._keep_launcher, daemon=True)
        self._supervisor.start()
        self.http = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(self.listen)),
            base_url="http://replica",
            headers={"Authorization": f"Bearer {plane.enrollment.replica_token}"},
            timeout=ANSWER_SECONDS,
        )
        self.engine_http = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(self.paths.socket)), base_url="http://engine", timeout=ANSWER_SECONDS
        )

    def start_agent(self) -> None:
        self.agent = self._start("serving.agent")

    def start_no_engine_again(self) -> None:
        self._is_stopping.set()

    def stop(self) -> None:
        self.start_no_engine_again()
        for process in (self.agent, self.launcher):
            if process is not None:
                process.send_signal(signal.SIGTERM)
        self._supervisor.join(60)
        self.agent.wait(20)
        self.http.close()
        self.engine_http.close()

    def get_state(self) -> EngineState | None:
        return read_engine_state(self.paths)

    def wait_for_new_engine(self, old_generation: str) -> EngineState:
        def find() -> EngineState | None:
            state = self.get_state()
            return state if state is not None and state.generation != old_generation else None

        return wait_until(find, "a new launcher", seconds=30)

    def wait_until_ready(self) -> None:
        wait_until(lambda: self.plane.observed and self.plane.observed[-1].is_ready, "ready", seconds=START_SECONDS)

    def serve(self, *adapters: DesiredAdapter) -> None:
        """Want exactly these, and wait until each is loaded or rejected."""
        generation = self.plane.want(*adapters)

        def is_settled() -> bool:
            seen = self.plane.observed[-1]
            states = {row.state for row in seen.adapters}
            return seen.generation == generation and seen.is_ready and states <= {LoadState.LOADED, LoadState.REJECTED}

        self.wait_until_ready()
        wait_until(is_settled, "a verdict on every adapter", seconds=START_SECONDS)

    def wait_for_title(self, title: str) -> Process:
        """Wait for a permanent process of vLLM. It is recorded: to look for it in /proc would take a core meanwhile."""

        def find() -> Process | None:
            return next((p for p in read_parts(self.paths) if read_title(p).startswith(title)), None)

        return wait_until(find, title, seconds=START_SECONDS)

    def list_processes(self) -> list[Process]:
        """Return launcher, keeper and everything of vLLM."""
        state = self.get_state()
        if state is None:
            return []
        return [state.launcher, *list_descendants(state.launcher.pid), *list_session(state.keeper)]

    def list_loaded(self) -> dict[str, str]:
        """Return what the engine itself says it knows: name -> folder."""
        return {row["id"]: row["root"] for row in self.engine_http.get("/v1/models").json()["data"]}

    def complete(self, model: object, **fields: object) -> httpx.Response:
        body = {"model": model, "prompt": "My card", "max_tokens": 8, "temperature": 0} | fields
        return self.http.post("/v1/completions", json=body)

    def _start(self, module: str) -> subprocess.Popen[bytes]:
        with open(self._logs / f"{module}.log", "ab") as log:
            return subprocess.Popen(
                [self._python, "-m", f"gpu_workers.{module}"],
                env=self._environment,
                stdout=log,
                stderr=log,
                cwd=REPOSITORY,
            )

    def _keep_launcher(self) -> None:
        while not self._is_stopping.is_set():
            self.launcher = self._start("engine.launcher")
            self.launcher.wait()
            time.sleep(0.2)


@contextlib.contextmanager
def pausing(process: subprocess.Popen[bytes]):
    """Hold a process still meanwhile."""
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)
