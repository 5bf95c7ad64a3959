"""The canary engine as the real vLLM: it tries versions, ends when it is idle, and leaves no process."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from apps.contracts.serving import LoadState
from gpu_workers.common.config import REPOSITORY
from gpu_workers.common.process_tree import is_alive, list_descendants, list_session
from gpu_workers.engine.client import EngineClient
from gpu_workers.engine.load import sum_samples
from gpu_workers.engine.state import EnginePaths, read_engine_state
from gpu_workers.serving.trials.canary_engine import IDLE_SECONDS
from tests.support.engines.adapters import make_arrays, make_files
from tests.support.engines.models import BASE_MODEL
from tests.support.engines.replica import START_SECONDS
from tests.support.engines.stage import GOOD, NOOP, Stage, adapter, make_stage

pytestmark = pytest.mark.nightly  # a start of vLLM; test_canary_engine.py follows the same turns with a script

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


def test_it_tries_both_is_ended_when_idle_and_leaves_no_process(tmp_path: Path) -> None:
    arrays = make_arrays(BASE_MODEL)
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
    }

    async def script(stage: Stage) -> None:
        stage.shared.model = str(BASE_MODEL)
        await stage.shared.restart()
        stage.trial.starts_never = True  # the real launcher reads its files instead
        deadline = time.monotonic() + START_SECONDS
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
        command = [sys.executable, "-m", "gpu_workers.engine.launcher", "canary"]
        launcher = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=REPOSITORY)
    try:
        make_stage(tmp_path, adapter(GOOD), adapter(NOOP))(script)
    finally:
        if launcher.poll() is None:
            launcher.terminate()
            launcher.wait(60)
