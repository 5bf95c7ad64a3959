"""A small Llama with the demo's tokenizer, made once, and the agent running real training children on it."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from apps.contracts.hyperparameters import Hyperparameters, Method, Objective
from gpu_workers.common.api_client import ApiClient
from gpu_workers.common.config import WorkerConfig
from gpu_workers.train.loop import callbacks
from gpu_workers.train.model import samples
from gpu_workers.trainer.agent import Agent
from gpu_workers.trainer.children.devices import Devices
from gpu_workers.trainer.children.executor import SubprocessExecutor
from gpu_workers.trainer.children.fork_server import ForkServer
from gpu_workers.trainer.publication import MODULE as PUBLISHING_CHILD
from gpu_workers.trainer.publication import Publisher
from tests.support.engines.attempts import Tried, attempt
from tests.support.engines.models import BASE_MODEL
from tests.support.engines.processes import PLAIN, rows_for
from tests.support.engines.rows import SMALL, make_rows
from tests.twins.control_plane import CREDENTIAL, ControlPlane, serve_control_plane


@pytest.fixture(scope="session", autouse=True)
def short_samples() -> Iterator[None]:
    """Samples of full length took a quarter of the time of these short runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(samples, "_MAX_ANSWER_TOKENS", 4)
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=6144,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(BASE_MODEL / name, folder / name)
    return folder


@pytest.fixture(scope="session")
def trained(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Tried:
    """A run of SMALL that nothing disturbed, and its report of every step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(callbacks, "REPORT_INTERVAL_SECONDS", 0.0)
        return attempt(tmp_path_factory.mktemp("trained"), tiny_model, make_rows(32))


@pytest.fixture(scope="session")
def fully_trained(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Tried:
    """The same with every weight trained."""
    recipe = msgspec.structs.replace(SMALL, method=Method.FULL, learning_rate=1e-3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(callbacks, "REPORT_INTERVAL_SECONDS", 0.0)
        return attempt(tmp_path_factory.mktemp("fully-trained"), tiny_model, make_rows(32), recipe=recipe)


@pytest.fixture(scope="session")
def alone(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tried]:
    """What one process makes of the same recipe, by objective and method."""
    made: dict[bytes, Tried] = {}

    def train(method: Method, objective: Objective = Objective.SUPERVISED, *, recipe: Hyperparameters = PLAIN) -> Tried:
        recipe = msgspec.structs.replace(recipe, method=method, objective=objective)
        key = msgspec.json.encode(recipe)
        if key not in made:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(callbacks, "REPORT_INTERVAL_SECONDS", 0.0)
                folder = tmp_path_factory.mktemp(f"{objective}-{method}")
                made[key] = attempt(folder, tiny_model, rows_for(recipe), recipe=recipe)
        return made[key]

    return train


@pytest.fixture
def plane() -> Iterator[ControlPlane]:
    with serve_control_plane() as plane:
        yield plane


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture
def make_agent(
    plane: ControlPlane, tiny_model: Path, tmp_path: Path, fork_server: ForkServer
) -> Iterator[Callable[..., Agent]]:
    clients: list[ApiClient] = []

    def make(devices: tuple[str, ...] = ("0",), *, publishes: bool = True) -> Agent:
        config = WorkerConfig(
            internal_url=plane.url,
            credential_file=tmp_path / "credential.json",
            work_dir=tmp_path / "work",
            base_model_roots=(tiny_model.parent,),
            trainer_thread_limit=1,
        )
        clients.append(ApiClient(plane.url, credential=CREDENTIAL))
        executor = SubprocessExecutor(thread_limit=1, fork_server=fork_server)
        publisher = Publisher(SubprocessExecutor(PUBLISHING_CHILD, thread_limit=1, fork_server=fork_server))
        agent = Agent(
            config,
            clients[-1],
            devices=Devices(devices),
            executor=executor,
            publisher=publisher if publishes else None,
            prober=None,
        )
        agent.recover()
        return agent

    yield make
    for client in clients:
        client.close()
