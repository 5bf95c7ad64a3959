"""An agent before a control plane's twin, with a scripted child."""

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from apps.contracts.hyperparameters import Hyperparameters
from apps.contracts.runs import RunSpec
from gpu_workers.common.api_client import ApiClient
from gpu_workers.common.config import WorkerConfig
from gpu_workers.trainer.agent import Agent
from gpu_workers.trainer.children.devices import Devices
from gpu_workers.trainer.children.executor import SubprocessExecutor
from gpu_workers.trainer.idle.probes import Prober
from gpu_workers.trainer.idle.rehearsals import Rehearser
from gpu_workers.trainer.publication import Publisher
from tests.twins.control_plane import CREDENTIAL, ControlPlane, serve_control_plane

CHILD = "tests.integration.gpu_workers.scripted_child"

ROWS = b'{"messages": []}\n'

CLIENTS: list[ApiClient] = []


@pytest.fixture
def plane() -> Iterator[ControlPlane]:
    with serve_control_plane() as plane:
        yield plane
        for client in CLIENTS:
            client.close()
        CLIENTS.clear()


@pytest.fixture
def models(tmp_path: Path) -> Path:
    folder = tmp_path / "models" / "tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def make_agent(
    plane: ControlPlane,
    tmp_path: Path,
    behaviour: str,
    *,
    publisher: Publisher | None = None,
    probe_command: tuple[str, ...] = (),
    devices: tuple[str, ...] = ("0",),
    rehearser: Rehearser | None = None,
    address: str = "",
) -> Agent:
    """An agent whose children run a script; with `probe_command` it also measures, by that command.

    `devices` stand for the GPUs of the machine, and at `address` others reach it.
    """
    config = WorkerConfig(
        internal_url=plane.url,
        credential_file=tmp_path / "credential.json",
        work_dir=tmp_path / "work",
        base_model_roots=(tmp_path / "models",),
        node_address="10.0.0.9",  # which only a worker that polls passes to its agent
    )
    executor = SubprocessExecutor(thread_limit=1, command=(sys.executable, "-m", CHILD, behaviour))
    CLIENTS.append(ApiClient(plane.url, credential=CREDENTIAL))
    prober = None
    if probe_command:
        probing = SubprocessExecutor(thread_limit=1, command=probe_command)
        prober = Prober(config, CLIENTS[-1], gpu_key="cpu", device=devices[0], executor=probing, patience_seconds=0.0)
    agent = Agent(
        config, CLIENTS[-1], devices=Devices(devices), executor=executor, publisher=publisher, prober=prober,
        rehearser=rehearser, address=address,
    )  # fmt: skip
    agent.recover()
    return agent


def add_run(plane: ControlPlane, models: Path, **options: object) -> RunSpec:
    return plane.add_run(ROWS, base_model=models, hyperparameters=Hyperparameters(), **options)


class Draining:
    """`agent.drain()` in a thread that lives until the end: the child dies with the thread that started it."""

    def __init__(self, agent: Agent) -> None:
        self.thread = threading.Thread(target=agent.drain)
        self.thread.start()

    def join(self, timeout_seconds: float = 120) -> None:
        self.thread.join(timeout_seconds)
        assert not self.thread.is_alive()
