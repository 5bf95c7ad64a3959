"""A real Slurm with two nodes on this host: a pool goes from zero to a node, its job ends, and the pool is empty.

Needs Debian's slurmctld, slurmd, slurm-client and munge.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from apps.core.database.clock import db_now
from apps.finetuning.models import CapacityNode, PoolCapacity, Worker
from apps.finetuning.pools.capacity.port import NodeRequest
from apps.finetuning.pools.capacity.reconciliation import reconcile_pool
from apps.finetuning.pools.capacity.settings import engine_of, set_capacity
from tests.services.ports import free_port

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not shutil.which("slurmctld"), reason="apt-get install slurmctld slurmd slurm-client munge"),
]
ROOT = Path(__file__).resolve().parents[3]
WORKER = "tests.integration.capacity.slurm_worker"
_CONF = """
ClusterName=anneal
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={home}/munge.sock
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool.%n
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd.%n.pid
SlurmctldLogFile={home}/slurmctld.log
SlurmdLogFile={home}/slurmd.%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SchedulerType=sched/builtin
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=15
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 State=UNKNOWN
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 State=UNKNOWN
PartitionName=train Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Path]:
    """Start munge and Slurm on loopback; return the path of slurm.conf."""
    user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    conf, key = tmp_path / "slurm.conf", tmp_path / "munge.key"
    conf.write_text(_CONF.format(home=tmp_path, user=user, ports=[free_port() for _ in range(3)]))
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    for folder in ("state", "spool.n1", "spool.n2"):
        (tmp_path / folder).mkdir()
    munge = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={tmp_path}/munge.sock"]
    munge += [f"--{kind}-file={tmp_path}/munge.{kind}" for kind in ("pid", "log", "seed")]
    commands = [munge, ["slurmctld", "-D", "-c", "-f", str(conf)]]
    commands += [["slurmd", "-D", "-N", node, "-f", str(conf)] for node in ("n1", "n2")]
    started = []
    try:
        for command in commands:
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            started.append(subprocess.Popen(command, env=os.environ | {"SLURM_CONF": str(conf)}, **quiet))  # type: ignore[call-overload]
            time.sleep(1)
        until(lambda: b"idle" in _ask(conf, "sinfo", "--noheader", "--format=%T"))
        yield conf
    finally:
        _ask(conf, "scancel", "--me", "--signal=KILL")
        for process in reversed(started):
            process.terminate()
            process.wait(30)


@pytest.fixture
def install_dir(tmp_path: Path) -> Path:
    """Return a folder that looks like Anneal on a node; its python starts the worker of this test."""
    python = tmp_path / "anneal" / ".venv-engines" / "bin" / "python"
    python.parent.mkdir(parents=True)
    # The arguments are: -m gpu_workers.trainer.polling --exit-when-idle SECONDS
    python.write_text(f'#!/bin/sh\ncd {ROOT} && exec {sys.executable} -m {WORKER} "$4" 2> {tmp_path}/worker.log\n')
    python.chmod(0o755)
    return tmp_path / "anneal"


def until(holds: Callable[[], bool], seconds: float = 60) -> float:
    """Return the seconds until it holds."""
    begin = time.monotonic()
    while not holds():
        assert time.monotonic() - begin < seconds
        time.sleep(0.5)
    return time.monotonic() - begin


def _ask(conf: Path, *command: str) -> bytes:
    return subprocess.run(command, env=os.environ | {"SLURM_CONF": str(conf)}, capture_output=True, check=False).stdout


@pytest.mark.django_db(transaction=True)
def test_a_pool_goes_from_zero_to_a_slurm_node_and_back(slurm, install_dir, tmp_path, internal_url, floor):
    Worker.objects.filter(pk=floor.worker.pk).update(revoked_at=db_now())
    capacity = set_capacity(
        pool=floor.pool, kind="slurm", minimum=0, maximum=2, gpus_per_node=1, idle_seconds=30, node_nano_per_hour=0,
        budget_nano_per_hour=None, by="user_test",
        settings={
            "partition": "train", "install_dir": str(install_dir), "work_dir": str(tmp_path / "nodes"),
            "slurm_conf": str(slurm),
        },
    )  # fmt: skip
    job = floor.job()

    def look() -> list[str]:
        reconcile_pool(pool_id=floor.pool.pk)
        assert PoolCapacity.objects.get().problem == ""
        return list(CapacityNode.objects.values_list("status", flat=True))

    assert look() == ["starting"]
    zero_to_node = until(lambda: look() == ["running"])
    worker = CapacityNode.objects.get().worker
    until(lambda: worker.runs.filter(job=job, status="failed").exists())
    to_zero = until(lambda: look() == ["released"], seconds=90)

    worker.refresh_from_db()
    assert worker.revoked_at
    assert _ask(slurm, "squeue", "--noheader") == b""
    assert list((tmp_path / "nodes").iterdir()) == []  # neither token nor credential remains
    print(f"\nzero to enrolled: {zero_to_node:.1f} s; last run to zero with 30 s of idling: {to_zero:.1f} s")  # noqa: T201

    # A node that Slurm has no room for waits with its reason, and is released on request.
    engine = engine_of(capacity)
    for number in range(3):
        engine.request(
            NodeRequest(
                name=f"anneal-x-{number}", pool="p", token="t", internal_url="http://127.0.0.1:9", idle_seconds=9
            )
        )
    until(lambda: any(node.reason for node in engine.list_nodes(prefix="anneal-x-").values()))
    engine.release(external_ids=[node.external_id for node in engine.list_nodes(prefix="anneal-x-").values()])
    until(lambda: engine.list_nodes(prefix="anneal-x-") == {})
