"""The main job against a scripted platform, with a clock that moves only during a sleep."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from demo.main_job import adapters, jobs, pauses, stages
from demo.main_job.platform import Platform
from demo.main_job.stages import Stage
from demo.main_job.state import State
from tests.support.scripted_main_job import Clock, ScriptedPlatform

Train = Callable[[], Any]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (adapters, jobs, pauses, stages):
        monkeypatch.setattr(module, "time", clock.as_module())
    return clock


@pytest.fixture
def scripted() -> ScriptedPlatform:
    scripted = ScriptedPlatform()
    scripted.add_file()
    return scripted


@pytest.fixture
def home(tmp_path: Path) -> Path:
    account = {"api_key": "ann_live_x", "base_model": "demo", "pool": "local-cpu", "email": "e", "password": "p"}
    (tmp_path / "demo.json").write_text(json.dumps(account))
    (tmp_path / "ports.json").write_text(json.dumps({"public_url": "http://127.0.0.1:8000"}))
    (tmp_path / "demo").mkdir()
    return tmp_path


@pytest.fixture
def platform(home: Path, scripted: ScriptedPlatform) -> Platform:
    return Platform(home, transport=httpx2.MockTransport(scripted.answer))


@pytest.fixture
def state(home: Path) -> State:
    return State(home / "demo/state.json")


@pytest.fixture
def stage(clock: Clock) -> Stage:
    return Stage(began_at=clock.now)


@pytest.fixture
def train(platform: Platform, state: State, stage: Stage) -> Train:
    return lambda: jobs.train(platform, state, stage, "file-1", name="lora", quantization=None)
