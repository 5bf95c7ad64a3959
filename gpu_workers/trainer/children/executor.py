"""The start, watch and end of the training child. Each run has its own process and process group."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from gpu_workers.common.config import REPOSITORY, child_environment
from gpu_workers.common.events import LOG_FILE, SPEC_FILE
from gpu_workers.common.files import replace_file
from gpu_workers.common.process_tree import Process, identify, is_alive, kill_all, list_session
from gpu_workers.trainer.children.confinement import confined
from gpu_workers.trainer.children.cpu_threads import choose_threads
from gpu_workers.trainer.children.fork_server import Forked, ForkServer, ServerGone

logger = logging.getLogger(__name__)

MODULE = "gpu_workers.train"
PID_FILE = "child.json"
_CGROUP_EVENTS = Path("/sys/fs/cgroup/memory.events")


class Child:
    """A running training process and all processes that it started."""

    def __init__(self, popen: subprocess.Popen[bytes] | Forked, process: Process) -> None:
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
        """Request a checkpoint and an orderly end."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the whole group at once."""
        self._signal(signal.SIGKILL)
        self._popen.wait()

    def end_with_stacks(self, *, patience_seconds: float = 5.0) -> None:
        """Make each Python process of the group write its threads' stacks to the log, then end the group.

        faulthandler does this on SIGABRT in C, so it needs no cooperation of the child's threads.
        """
        self._signal(signal.SIGABRT)
        self._signal(signal.SIGCONT)
        self.wait(patience_seconds)
        self.kill()

    @property
    def leader(self) -> Process:
        """Return the process that started the child's session."""
        return self._process

    def memory_bytes(self) -> int | None:
        try:
            pages = Path(f"/proc/{self.pid}/statm").read_text().split()[1]
        except (OSError, IndexError):
            return None
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def was_killed_for_memory(self) -> bool:
        """Return whether the kernel's OOM killer acted in this machine's memory group since the child began."""
        return self.poll() == -signal.SIGKILL and _count_oom_kills() > self._oom_kills

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            pass


class SubprocessExecutor:
    """Runs `python -m <module> SPEC WORK_DIR`: in a fork of `fork_server`, or in a new interpreter without one.

    Call it from a thread that outlives the child, because PDEATHSIG is tied to that thread. `thread_limit` is the
    maximum number of a child's CPU threads, 0 for the machine's free cores (cpu_threads.py).
    """

    def __init__(
        self,
        module: str = MODULE,
        *,
        thread_limit: int,
        command: tuple[str, ...] | None = None,
        environment: Mapping[str, str] | None = None,
        fork_server: ForkServer | None = None,
    ) -> None:
        self._thread_limit = thread_limit
        self._module = module
        self._fork_server = fork_server
        self._environment = {"TOKENIZERS_PARALLELISM": "false", "PYTHONFAULTHANDLER": "1"} | dict(environment or {})
        self._command = command or (sys.executable, "-m", "gpu_workers.trainer.child", module)

    def start(
        self,
        work_dir: Path,
        *,
        hub_token: str | None = None,
        devices: Sequence[str] | None = None,
        more: Mapping[str, object] | None = None,
        has_network: bool = True,
    ) -> Child:
        """Start the child on the spec in `work_dir`.

        Secrets (`hub_token`, `more`) go only through its standard input.

        The child sees only these `devices` of the machine's GPUs (None: all), and has no network unless
        `has_network`.
        """
        threads = choose_threads(limit=self._thread_limit)
        environment = child_environment(
            threads=threads, devices=devices, extra=self._environment, has_network=has_network
        )
        with (work_dir / LOG_FILE).open("ab") as log:
            popen = self._spawn([str(work_dir / SPEC_FILE), str(work_dir)], log, environment, has_network=has_network)
        process = identify(popen.pid) or Process(pid=popen.pid, started_ticks=0)
        replace_file(work_dir / PID_FILE, msgspec.json.encode(process))
        try:
            with popen.stdin as stdin:  # type: ignore[union-attr]
                stdin.write(msgspec.json.encode({"hub_token": hub_token} | dict(more or {})) + b"\n")
        except BrokenPipeError:
            pass  # it is dead already; the exit code shows it
        return Child(popen, process)

    def _spawn(
        self, arguments: list[str], log: BinaryIO, environment: dict[str, str], *, has_network: bool
    ) -> subprocess.Popen[bytes] | Forked:
        if self._fork_server is not None:
            try:
                return self._fork_server.fork(
                    self._module, arguments, log=log.fileno(), environment=environment, has_network=has_network
                )
            except ServerGone as error:
                logger.warning("No fork, a new interpreter instead: %s", error)
        return subprocess.Popen(
            confined([*self._command, *arguments], has_network=has_network),
            cwd=REPOSITORY,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def kill_stale_children(runs_dir: Path, *, sleep: Callable[[float], None] = time.sleep) -> int:
    """Kill processes that an earlier agent left below `runs_dir`, and their descendants; return their number."""
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
