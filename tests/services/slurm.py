"""A real Slurm on this host, with as many nodes as a test wants.

It needs Debian's slurmctld, slurmd, slurm-client and munge.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from gpu_workers.common.process_tree import Process, identify, kill_all, list_descendants, read_title
from tests.services.ports import free_port

INSTALL = "apt-get install slurmctld slurmd slurm-client munge"
needs_slurm = pytest.mark.skipif(not shutil.which("slurmctld"), reason=INSTALL)
_CONF = """
ClusterName=anneal
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
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
{nodes}
PartitionName=train Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
_NODE = "NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=1 State=UNKNOWN"


class SlurmCluster:
    """munge, a controller and its nodes n1, n2 …, each a process of its own. `conf` is the path of slurm.conf."""

    def __init__(self, home: Path, *, nodes: int) -> None:
        user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
        self.names = [f"n{number}" for number in range(1, nodes + 1)]
        self.conf, self._home = home / "slurm.conf", home
        places = "\n".join(_NODE.format(name=name, port=free_port()) for name in self.names)
        self.conf.write_text(_CONF.format(home=home, user=user, port=free_port(), nodes=places))
        key = home / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        for folder in ("state", *(f"spool.{name}" for name in self.names)):
            (home / folder).mkdir()
        munge = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={home}/munge.sock"]
        self._commands = {
            "munge": munge + [f"--{kind}-file={home}/munge.{kind}" for kind in ("pid", "log", "seed")],
            "controller": ["slurmctld", "-D", "-f", str(self.conf)],
        } | {name: ["slurmd", "-D", "-N", name, "-f", str(self.conf)] for name in self.names}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        """Start "munge", "controller" or a node; again after its death, with the state that it left."""
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        environment = os.environ | {"SLURM_CONF": str(self.conf)}
        self._processes[name] = subprocess.Popen(self._commands[name], env=environment, **quiet)  # type: ignore[call-overload]

    def kill(self, name: str) -> None:
        """Send kill -9 to this daemon alone. What runs on a node goes on."""
        self._processes[name].kill()
        self._processes[name].wait(30)

    def kill_node(self, name: str) -> None:
        """End a node as a machine that lost its power: its daemon and all its processes at once."""
        steps = self._steps_of(name)
        processes = [process for step in steps for process in (step, *list_descendants(step.pid))]
        self.kill(name)
        kill_all(processes)

    def _steps_of(self, name: str) -> list[Process]:
        """Return the processes of Slurm, no longer children of their node's daemon, that run its jobs."""
        wanted = (f"SLURMD_NODENAME={name}".encode(), f"SLURM_CONF={self.conf}".encode())
        found = set()
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it may have ended
                if set(wanted) <= set((folder / "environ").read_bytes().split(b"\0")):
                    found.add(int((folder / "stat").read_text().rpartition(")")[2].split()[1]))
        parents = [process for pid in found if (process := identify(pid))]
        return [process for process in parents if read_title(process) == "slurmstepd"]

    def ask(self, *command: str) -> bytes:
        """Return what the command says about the cluster."""
        return ask_slurm(self.conf, *command)

    def stop(self) -> None:
        self.ask("scancel", "--me", "--signal=KILL")
        for process in reversed(self._processes.values()):
            process.terminate()
            process.wait(30)


@contextmanager
def running_slurm(home: Path, *, nodes: int = 2) -> Iterator[SlurmCluster]:
    """Start munge and Slurm on loopback, in an empty folder; they end with the block."""
    cluster = SlurmCluster(home, nodes=nodes)
    try:
        for name in ("munge", "controller", *cluster.names):
            cluster.start(name)
            time.sleep(1)
        until(lambda: cluster.ask("sinfo", "--noheader", "--format=%T").split() == [b"idle"])
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Path]:
    """Start munge and Slurm on loopback; return the path of slurm.conf."""
    with running_slurm(tmp_path) as cluster:
        yield cluster.conf


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
