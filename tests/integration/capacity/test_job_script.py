"""What Slurm is asked for: the options of a node, and its script, run by the shell without Slurm."""

import signal
import subprocess
import time

from apps.finetuning.pools.capacity.port import NodeRequest
from apps.finetuning.pools.capacity.slurm import Slurm, SlurmSettings
from gpu_workers.common.config import read_config, read_engine_config
from tests.support.waiting import wait_until

WORKER = """#!/bin/sh
trap '' TERM
: > {home}/started
sleep 1
: > "$ANNEAL_WORK_DIR/checkpoint" && : > {home}/saved
exit 3
"""


def test_the_work_folder_stays_until_a_worker_that_was_told_three_times_to_stop_has_saved(tmp_path, monkeypatch):
    python = tmp_path / ".venv-engines" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(WORKER.format(home=tmp_path))
    python.chmod(0o755)
    scripts: list[str] = []
    monkeypatch.setattr(Slurm, "_run", lambda *_, script: scripts.append(script) or "1")
    settings = SlurmSettings(partition="gpu", install_dir=str(tmp_path), work_dir=str(tmp_path / "nodes"))
    Slurm(settings).request(NodeRequest(name="node", pool="p", token="t", internal_url="u", idle_seconds=9))
    (tmp_path / "job").write_text(scripts[0])

    job = subprocess.Popen(["sh", str(tmp_path / "job")])
    wait_until((tmp_path / "started").exists, "the worker did not start")
    for _ in range(3):
        job.send_signal(signal.SIGTERM)
        time.sleep(0.1)
    assert job.wait(10) == 3
    assert (tmp_path / "saved").exists()
    assert list((tmp_path / "nodes").iterdir()) == []


def test_spot_nodes_go_to_their_own_partition(monkeypatch):
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(Slurm, "_run", lambda _, *words, script: asked.append(words) or "1")
    settings = SlurmSettings(
        partition="gpu", qos="normal", spot_partition="spot", install_dir="/opt/anneal", work_dir="/scratch"
    )
    for is_spot in (True, False, None):
        node = NodeRequest(name="node", pool="p", token="t", internal_url="u", idle_seconds=9, is_spot=is_spot)
        Slurm(settings).request(node)

    assert [("--partition=spot" in words, "--partition=gpu" in words) for words in asked] == [
        (True, False), (False, True), (False, True),
    ]  # fmt: skip
    assert all("--qos=normal" in words for words in asked)


def test_a_node_that_serves_runs_a_replica_on_all_its_gpus(tmp_path, monkeypatch):
    python = tmp_path / ".venv-engines" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/shown\nenv >> {tmp_path}/shown\n')
    python.chmod(0o755)
    scripts: list[str] = []
    monkeypatch.setattr(Slurm, "_run", lambda *_, script: scripts.append(script) or "1")
    settings = SlurmSettings(partition="gpu", install_dir=str(tmp_path), work_dir=str(tmp_path / "nodes"))
    name = "anneal-pool-" + "1" * 26 + "-node-" + "2" * 26
    node = NodeRequest(name=name, pool="p", token="t", internal_url="u", idle_seconds=9, is_replica=True, gpus=2)
    Slurm(settings).request(node)
    subprocess.run(["sh", "-c", scripts[0]], check=True)

    arguments, *variables = (tmp_path / "shown").read_text().splitlines()
    assert arguments == "-m gpu_workers.serving.node"
    environment = dict(each.split("=", 1) for each in variables if "=" in each)
    assert read_engine_config(environment).extra_arguments == ("--tensor-parallel-size", "2")
    config = read_config(environment)
    assert config.node_address
    assert config.work_dir == tmp_path / "nodes" / ("2" * 26), "short enough for a socket"
