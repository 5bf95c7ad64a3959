"""Several processes, and one with its shards in the host's memory, train as one does. Here on the CPU, over gloo."""

import io
import json
import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from apps.contracts.addresses.machines import NodeGroup
from apps.contracts.failures import FailureCode
from apps.contracts.hyperparameters import Method, Objective
from apps.contracts.runs import Failed, LogLine
from gpu_workers.common.config import REPOSITORY, child_environment, rank_environment
from gpu_workers.common.events import AdapterReady, read_outcome, write_outcome
from gpu_workers.train import __main__ as entry
from gpu_workers.train.loop import launch
from gpu_workers.train.loop.launch import Rank
from gpu_workers.train.loop.process_group import first_rank_first
from gpu_workers.train.model import sharding
from gpu_workers.train.model.loading import load_model
from gpu_workers.trainer.children.executor import MODULE
from gpu_workers.trainer.children.fork_server import ForkServer
from tests.support.engines import short_of_memory
from tests.support.engines.attempts import Tried, make_run_spec, prepare
from tests.support.engines.processes import PLAIN, assert_trained_alike, fork, rows_for, wait_for


def run_several(
    work_dir: Path,
    model: Path,
    fork_server: ForkServer,
    *,
    count: int = 2,
    starts_ranks: bool = False,
    module: str = MODULE,
    **changes: object,
) -> Tried:
    """Train with so many processes: all forked, or, as outside of tests, started by one that is given the run."""
    work_dir.mkdir()
    spec = make_run_spec(model, **({"recipe": PLAIN, "gpu_count": count} | changes))
    prepare(work_dir, rows_for(spec.hyperparameters))
    (work_dir / "spec.json").write_bytes(msgspec.json.encode(spec))
    arguments = [str(work_dir / "spec.json"), str(work_dir)]
    with (work_dir / "log").open("w+b") as log:
        if starts_ranks:
            wait_for([fork_server.fork(MODULE, arguments, log=log.fileno(), environment=child_environment(threads=1))])
        else:
            fork(fork_server, arguments, log, count=count, module=module)
        log.seek(0)
        said = log.read()
    outcome = read_outcome(work_dir)
    assert isinstance(outcome, AdapterReady) or module != MODULE, (outcome, said[-3000:].decode())
    return Tried(work_dir, outcome)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallelism", "method", "starts_ranks"),
    [
        ("ddp", Method.LORA, False),
        ("fsdp", Method.QLORA, False),
        pytest.param("ddp", Method.LORA, True, marks=pytest.mark.nightly),  # each imports torch anew
        pytest.param("fsdp", Method.LORA, False, marks=pytest.mark.nightly),
        pytest.param("fsdp", Method.FULL, False, marks=pytest.mark.nightly),
    ],
)
def test_two_processes_lose_as_one_does(tiny_model, tmp_path, alone, fork_server, parallelism, method, starts_ranks):
    recipe = msgspec.structs.replace(PLAIN, method=method)
    single = alone(method)

    tried = run_several(
        tmp_path / "two",
        tiny_model,
        fork_server,
        starts_ranks=starts_ranks,
        recipe=recipe,
        parallelism=parallelism,
    )

    assert_trained_alike(tried, single)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallelism", "method"),
    [
        pytest.param("ddp", Method.LORA, marks=pytest.mark.nightly),
        ("fsdp", Method.LORA),
        pytest.param("fsdp", Method.QLORA, marks=pytest.mark.nightly),
    ],
)
def test_two_processes_prefer_as_one_does(tiny_model, tmp_path, alone, fork_server, parallelism, method):
    """ORPO, which has no reference to bring along."""
    recipe = msgspec.structs.replace(PLAIN, method=method, objective=Objective.ORPO)

    tried = run_several(tmp_path / "two", tiny_model, fork_server, recipe=recipe, parallelism=parallelism)

    assert_trained_alike(tried, alone(method, Objective.ORPO))


@pytest.mark.slow
@pytest.mark.parametrize(("method", "starts_ranks"), [(Method.LORA, True), (Method.FULL, False)])
def test_one_process_with_its_shards_in_the_hosts_memory_loses_as_without(
    tiny_model, tmp_path, alone, fork_server, method, starts_ranks
):
    recipe = msgspec.structs.replace(PLAIN, method=method, cpu_offload=True)

    tried = run_several(
        tmp_path / "one",
        tiny_model,
        fork_server,
        count=1,
        starts_ranks=starts_ranks,
        recipe=recipe,
        parallelism="fsdp",
    )

    assert_trained_alike(tried, alone(method))


@pytest.mark.slow
def test_memory_that_runs_out_in_one_process_ends_all(tiny_model, tmp_path, fork_server):
    """It cannot go on with smaller batches, because the others wait for it in the step that it left."""
    tried = run_several(tmp_path / "two", tiny_model, fork_server, module=short_of_memory.MODULE)

    assert tried.outcome.code is FailureCode.OUT_OF_MEMORY
    assert not [line for line in tried.of(LogLine) if "Memory ran out" in line.message]


def test_a_process_that_is_killed_ends_its_parent_alike(tiny_model, tmp_path):
    """The agent then looks whether the kernel killed it for its memory."""
    spec = make_run_spec(tiny_model, PLAIN, gpu_count=2, parallelism="ddp")
    (tmp_path / "spec.json").write_bytes(msgspec.json.encode(spec))
    os.mkfifo(tmp_path / "life")  # ends with the killed process
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ncd {tmp_path}\n[ $RANK = 1 ] && exec 3> life && kill -9 $$\ncat life; exit 3\n")
    python.chmod(0o700)
    write_outcome(tmp_path, Failed(code=FailureCode.INTERNAL_ERROR, message="It lost the other one."))
    script = f"import runpy, sys; sys.executable = {str(python)!r}; runpy.run_module({MODULE!r}, run_name='__main__')"

    command = [sys.executable, "-c", script, str(tmp_path / "spec.json"), str(tmp_path)]
    ended = subprocess.run(command, cwd=REPOSITORY, input=b"{}\n", check=False, timeout=60)

    assert ended.returncode == -signal.SIGKILL
    assert read_outcome(tmp_path) is None


GROUP = NodeGroup(rank=1, node_count=3, master_address="10.0.0.1", master_port=77, address="127.0.0.1")


@pytest.mark.parametrize(
    ("group", "named"),
    [
        (None, {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}),
        (GROUP, {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "6", "MASTER_PORT": "77", "GLOO_SOCKET_IFNAME": "lo"}),
    ],
)
def test_processes_that_are_started_know_what_the_forked_ones_of_these_tests_know(tmp_path, monkeypatch, group, named):
    """What runs in them is the command that starts the one process above."""
    report = "import json, os, sys; json.dump([sys.stdin.read(), dict(os.environ)], open(sys.argv[1], 'w'))"
    popen, commands = subprocess.Popen, []

    def start(command: list[str], **options: object) -> subprocess.Popen[bytes]:
        commands.append(command)
        return popen([sys.executable, "-SEc", report, str(tmp_path / str(len(commands)))], **options)

    monkeypatch.setattr(launch.subprocess, "Popen", start)
    monkeypatch.setattr(launch.signal, "signal", lambda *_: None)

    assert launch.run_ranks(["train", "spec", "folder"], count=2, secret_line=b"a secret", group=group) == 0

    assert commands == [[sys.executable, "-m", "gpu_workers.trainer.child", MODULE, "spec", "folder"]] * 2
    reports = [json.loads((tmp_path / name).read_text()) for name in ("1", "2")]
    assert [secret for secret, _ in reports] == ["a secret"] * 2
    assert reports[1][1].items() >= named.items()
    place = launch.place_in(group, 2) if group else {"count": 2, "port": int(reports[0][1]["MASTER_PORT"])}
    for index, (_, environment) in enumerate(reports):
        assert environment.items() >= rank_environment(index=index, **place).items()


@pytest.mark.parametrize(("gpu_count", "parallelism"), [(1, "fsdp"), (2, "ddp")])
def test_shards_and_several_gpus_are_trained_by_ranks(tiny_model, tmp_path, monkeypatch, gpu_count, parallelism):
    started: list[int] = []
    monkeypatch.setattr(entry, "run_ranks", lambda argv, *, count, **_: started.append(count) or 7)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"{}\n")))
    spec = make_run_spec(tiny_model, PLAIN, gpu_count=gpu_count, parallelism=parallelism)
    (tmp_path / "spec.json").write_bytes(msgspec.json.encode(spec))

    assert (entry.main(tmp_path / "spec.json", tmp_path), started) == (7, [gpu_count])


def test_processes_wait_for_one_that_downloads_a_large_model(monkeypatch):
    asked: list[dict] = []
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **options: asked.append(options))

    with first_rank_first(Rank(is_launched=True)):
        pass

    assert asked[0]["timeout"] > timedelta(hours=6)


def test_what_starts_the_processes_does_not_wait_for_torch():
    found = "import sys, gpu_workers.train.__main__; print(sorted({'torch', 'transformers'} & set(sys.modules)))"

    said = subprocess.run([sys.executable, "-c", found], cwd=REPOSITORY, capture_output=True, text=True, check=True)

    assert said.stdout == "[]\n"


@pytest.mark.parametrize(
    ("is_offloaded", "copies", "mesh"),
    [(True, 1, {"shard": 4}), (False, 1, {"shard": 4}), (False, 2, {"replicate": 2, "shard": 2})],
)
def test_shards_rest_where_the_recipe_says(tiny_model, monkeypatch, is_offloaded, copies, mesh):
    asked: list[dict] = []
    monkeypatch.setattr(sharding, "fully_shard", lambda module, **options: asked.append(options))
    monkeypatch.setattr(sharding, "init_device_mesh", lambda *mesh, mesh_dim_names: (*mesh, mesh_dim_names))
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    recipe = msgspec.structs.replace(PLAIN, cpu_offload=is_offloaded)

    model = load_model(tiny_model, recipe, is_sharded=True, copies=copies)

    assert len(asked) == model.config.num_hidden_layers + 1
    assert {type(options["offload_policy"]) for options in asked} == {
        CPUOffloadPolicy if is_offloaded else OffloadPolicy
    }
    assert {options["mesh"] for options in asked} == {("cpu", tuple(mesh.values()), tuple(mesh))}
    trained = {parameter for parameter in model.parameters() if parameter.requires_grad}
    assert all(options["ignored_params"] == trained for options in asked)
