"""Start, watch and end the training child: its own process group, a fresh interpreter and CUDA context each run."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from gpu_workers.common.config import child_environment
from gpu_workers.common.events import LOG_FILE, SPEC_FILE, replace_file
from gpu_workers.common.process_tree import Process, die_with_parent, identify, is_alive, kill_all, list_session
from gpu_workers.trainer.cpu_threads import choose_threads
from gpu_workers.trainer.network import leave_network

PID_FILE = "child.json"
REPOSITORY = Path(__file__).resolve().parents[2]
_CGROUP_EVENTS = Path("/sys/fs/cgroup/memory.events")


class Child:
    """A running training process with everything it may have started."""

    def __init__(self, popen: subprocess.Popen[bytes], process: Process) -> None:
        self._popen = popen
        self._process = process
        self._oom_kills = _count_oom_kills()

    @property
    def pid(self) -> int:
        return self._popen.pid

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while it runs."""
        return self._popen.poll()

    def wait(self, timeout_seconds: float) -> int | None:
        try:
            return self._popen.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            return None

    def terminate(self) -> None:
        """Ask for a checkpoint and an orderly end."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the whole group at once."""
        self._signal(signal.SIGKILL)
        self._popen.wait()

    def end_with_stacks(self, *, patience_seconds: float = 5.0) -> None:
        """Have each Python process of the group write its threads' stacks to the log, then end the group.

        faulthandler does so on SIGABRT, in C: it needs no thread of the child to answer.
        """
        self._signal(signal.SIGABRT)
        self._signal(signal.SIGCONT)
        self.wait(patience_seconds)
        self.kill()

    @property
    def leader(self) -> Process:
        """The process that began the child's session."""
        return self._process

    def memory_bytes(self) -> int | None:
        try:
            pages = Path(f"/proc/{self.pid}/statm").read_text().split()[1]
        except (OSError, IndexError):
            return None
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def was_killed_for_memory(self) -> bool:
        """Whether the kernel killed something in this machine's memory group since the child began."""
        return self.poll() == -signal.SIGKILL and _count_oom_kills() > self._oom_kills

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            pass


class SubprocessExecutor:
    """Runs `python -m <module> SPEC WORK_DIR`. Call from a thread that outlives the child: PDEATHSIG follows it.

    `thread_limit`: the most CPU threads of a child, 0 for as many as the machine has free cores (cpu_threads.py).
    """

    def __init__(
        self,
        *,
        thread_limit: int,
        module: str = "gpu_workers.train",
        command: tuple[str, ...] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._thread_limit = thread_limit
        self._environment = {"TOKENIZERS_PARALLELISM": "false", "PYTHONFAULTHANDLER": "1"} | dict(environment or {})
        self._command = command or (sys.executable, "-m", module)

    def start(
        self,
        work_dir: Path,
        *,
        hub_token: str | None = None,
        gpu_count: int | None = None,
        more: Mapping[str, Any] | None = None,
        has_network: bool = True,
    ) -> Child:
        """Start the child on the spec in `work_dir`; secrets (`hub_token`, `more`) go through its standard input alone.

        It sees `gpu_count` of this machine's GPUs, all of them for None, and no network unless it `has_network`.
        """
        threads = choose_threads(limit=self._thread_limit)
        environment = child_environment(threads=threads, gpu_count=gpu_count, extra=self._environment)
        with (work_dir / LOG_FILE).open("ab") as log:
            popen = self._spawn([str(work_dir / SPEC_FILE), str(work_dir)], log, environment, has_network=has_network)
        process = identify(popen.pid) or Process(pid=popen.pid, started_ticks=0)
        replace_file(work_dir / PID_FILE, msgspec.json.encode(process))
        try:
            with popen.stdin as stdin:  # type: ignore[union-attr]
                stdin.write(msgspec.json.encode({"hub_token": hub_token} | dict(more or {})) + b"\n")
        except BrokenPipeError:
            pass  # it is dead already; the exit code tells
        return Child(popen, process)

    def _spawn(
        self, arguments: list[str], log: BinaryIO, environment: dict[str, str], *, has_network: bool
    ) -> subprocess.Popen[bytes]:
        parent = os.getpid()
        return subprocess.Popen(
            [*self._command, *arguments],
            cwd=REPOSITORY,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=lambda: _prepare_child(parent, has_network=has_network),
        )


def _prepare_child(parent: int, *, has_network: bool) -> None:
    if not has_network:
        leave_network()  # first: a change of credentials takes the death signal back
    die_with_parent(signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a dump would hold a customer's rows, and fill the disk
    if os.getppid() != parent:  # the parent died before the request took hold
        os._exit(1)


def kill_stale_children(runs_dir: Path, *, sleep: Callable[[float], None] = time.sleep) -> int:
    """Kill what an earlier agent left running below `runs_dir`, grandchildren included; return how many processes."""
    killed = 0
    for file in runs_dir.glob(f"*/{PID_FILE}"):
        try:
            leader = msgspec.json.decode(file.read_bytes(), type=Process)
        except (OSError, msgspec.DecodeError):
            continue
        remaining = list_session(leader)
        killed += len(remaining)
        while remaining:
            kill_all(remaining)
            sleep(0.02)
            remaining = [process for process in remaining if is_alive(process)]
    return killed


def _count_oom_kills() -> int:
    try:
        lines = _CGROUP_EVENTS.read_text().splitlines()
    except OSError:
        return 0
    counts = dict(line.split() for line in lines)
    return int(counts.get("oom_kill", 0))
