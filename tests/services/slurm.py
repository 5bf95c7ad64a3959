"""A real Slurm with two nodes on this host. Needs Debian's slurmctld, slurmd, slurm-client and munge."""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.services.ports import free_port

needs_slurm = pytest.mark.skipif(
    not shutil.which("slurmctld"), reason="apt-get install slurmctld slurmd slurm-client munge"
)
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
        until(lambda: b"idle" in ask_slurm(conf, "sinfo", "--noheader", "--format=%T"))
        yield conf
    finally:
        ask_slurm(conf, "scancel", "--me", "--signal=KILL")
        for process in reversed(started):
            process.terminate()
            process.wait(30)


def until(holds: Callable[[], bool], seconds: float = 60) -> float:
    """Return the seconds until it holds."""
    begin = time.monotonic()
    while not holds():
        assert time.monotonic() - begin < seconds
        time.sleep(0.5)
    return time.monotonic() - begin


def ask_slurm(conf: Path, *command: str) -> bytes:
    """Return what the command says about the cluster."""
    return subprocess.run(command, env=os.environ | {"SLURM_CONF": str(conf)}, capture_output=True, check=False).stdout
