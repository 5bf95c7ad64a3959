"""The supervisord of a launch and all below it: start, watch, restart, stop, and the check that nothing is left."""

import fcntl
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any
from xmlrpc.client import Fault, ServerProxy

from supervisor.xmlrpc import SupervisorTransport

from gpu_workers.common.process_tree import (
    Process,
    become_subreaper,
    die_with_parent,
    identify,
    is_alive,
    kill_all,
    kill_descendants,
    list_descendants,
    reap_children,
    signal_all,
)
from scripts.environment import Prepared, plain_environment
from scripts.processes import REPOSITORY, Place, Program, Tier

# In the environment of every program, with the data directory as its value. Its name has no ANNEAL_ prefix: workers
# remove such variables from their engine and their training child, which must be found too.
LAUNCH_MARK = "LAUNCHED_BY_ANNEAL"
POLITE_SECONDS = 15.0


class LaunchFailed(Exception):
    """A program did not start, or ended. The message names it and shows the end of its log."""


class Supervision:
    """The supervisord of one data directory. Its constructor makes this process the parent of every orphan below it."""

    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared
        self.logs = prepared.home / "logs"
        self.leftovers: tuple[Process, ...] = ()
        self._socket = prepared.runtime_dir / "supervisor.sock"
        self._daemon: subprocess.Popen[bytes] | None = None
        become_subreaper()

    def start(self) -> None:
        """Start supervisord with all programs stopped. Raises LaunchFailed."""
        self.logs.mkdir(exist_ok=True)
        self.logs.chmod(0o700)  # from a launch before the launcher set a umask
        self._socket.unlink(missing_ok=True)  # from a supervisord that was killed
        config = self.prepared.home / "supervisord.conf"
        with os.fdopen(os.open(config, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(self._render())
        command = [sys.executable, "-m", "supervisor.supervisord", "-c", str(config)]
        self._daemon = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=plain_environment() | {LAUNCH_MARK: str(self.prepared.home)},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=end_with_launcher,
        )
        give_up_at = time.monotonic() + 15
        while not self._answers():
            self.check()
            if time.monotonic() > give_up_at:
                raise LaunchFailed(f"supervisord does not answer{self.tail('supervisord')}")
            time.sleep(0.05)

    def start_tier(self, tier: Tier) -> None:
        self._rpc.startProcessGroup(str(tier), False)

    def restart(self, program: Program) -> None:
        name = f"{program.tier}:{program.name}"
        try:
            self._rpc.stopProcess(name)
        except Fault:  # it was between two attempts
            pass
        self._rpc.startProcess(name, False)

    def check(self) -> None:
        """Raise LaunchFailed if supervisord has ended."""
        if self._daemon is None or self._daemon.poll() is not None:
            raise LaunchFailed(f"supervisord has ended{self.tail('supervisord')}")

    def states(self) -> dict[str, dict[str, Any]]:
        """Return supervisord's state of each program: statename, pid, start, …"""
        return {info["name"]: info for info in self._rpc.getAllProcessInfo()}

    def is_running(self, program: Program) -> bool:
        """Return whether the program has run for long enough to count as started."""
        try:
            return bool(self.states()[program.name]["statename"] == "RUNNING")
        except (OSError, Fault):  # supervisord is starting or stopping
            return False

    def memory_bytes(self) -> dict[str, int]:
        """Return the proportional memory of each program with all its children, largest first."""
        found = {name: _tree_memory_bytes(info["pid"]) for name, info in self.states().items() if info["pid"]}
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def stop(self) -> None:
        """Stop every program, the trainer first, and leave no process. A second Ctrl-C kills all at once.

        Processes that outlived an orderly stop are listed in `leftovers` and killed.
        """
        if self._daemon is None:
            return
        try:
            if self._daemon.poll() is None:
                self._daemon.terminate()
            self._daemon.wait()
            self.leftovers = find_leftovers(self.prepared.home)
            end(self.leftovers)
        except KeyboardInterrupt:
            kill_descendants(os.getpid())

    def tail(self, name: str, lines: int = 20) -> str:
        path = self.logs / f"{name}.log"
        if not path.exists():
            return ""
        return f"; the end of {path}:\n" + "\n".join(path.read_text(errors="replace").splitlines()[-lines:])

    def _render(self) -> str:
        home = str(self.prepared.home)
        # With SPT_NOENV, a process that changes its title keeps its environment, and with it the mark.
        shared = {"ANNEAL_HOME": home, LAUNCH_MARK: home, "SPT_NOENV": "1", "PYTHONUNBUFFERED": "1"}
        variables = {program.name: self.prepared.variables(program) | shared for program in self.prepared.programs}
        return render_config(
            self.prepared.programs,
            self.prepared.place,
            home=self.prepared.home,
            runtime_dir=self.prepared.runtime_dir,
            variables=variables,
        )

    @property
    def _rpc(self) -> Any:
        transport = SupervisorTransport(None, None, f"unix://{self._socket}")
        return ServerProxy("http://localhost", transport=transport).supervisor

    def _answers(self) -> bool:
        try:
            return bool(self._rpc.getState()["statename"] == "RUNNING")
        except (OSError, Fault):
            return False


def render_config(
    programs: Sequence[Program],
    place: Place,
    *,
    home: Path,
    runtime_dir: Path,
    variables: Mapping[str, Mapping[str, str]],
) -> str:
    """Return the supervisor configuration of these programs. `variables` are by program name.

    It contains secrets: keep it 0600.
    """
    sections = [_supervisord_section(home, runtime_dir)]
    sections += [_program_section(program, place, home, variables[program.name]) for program in programs]
    for priority, tier in enumerate(Tier):
        members = [program.name for program in programs if program.tier == tier]
        if members:
            sections.append(f"[group:{tier}]\nprograms={','.join(members)}\npriority={priority}\n")
    return "\n".join(sections)


def _supervisord_section(home: Path, runtime_dir: Path) -> str:
    return f"""\
[unix_http_server]
file={_escaped(runtime_dir)}/supervisor.sock
chmod=0600

[rpcinterface:supervisor]
supervisor.rpcinterface_factory=supervisor.rpcinterface:make_main_rpcinterface

[supervisord]
nodaemon=true
silent=true
pidfile={_escaped(runtime_dir)}/supervisord.pid
logfile={_escaped(home)}/logs/supervisord.log
logfile_maxbytes=5MB
logfile_backups=1
childlogdir={_escaped(home)}/logs
strip_ansi=true
"""


def _program_section(program: Program, place: Place, home: Path, variables: Mapping[str, str]) -> str:
    # A program that keeps failing is restarted for ever, each time a second later than before. SIGTERM goes only to the
    # program, which stops its own children in order (a Celery child would drop its task); SIGKILL goes to all.
    environment = ",".join(f'{name}="{_escaped(value)}"' for name, value in sorted(variables.items()))
    log = _escaped(_escaped(home / f"logs/{program.name}.log"))  # supervisor expands it twice
    return f"""\
[program:{program.name}]
command={_escaped(shlex.join(place.command(program)))}
directory={_escaped(REPOSITORY)}
environment={environment}
autostart=false
autorestart=true
startsecs=2
startretries=1000000
stopsignal=TERM
stopwaitsecs={program.stop_seconds}
stopasgroup=false
killasgroup=true
redirect_stderr=true
stdout_logfile={log}
stdout_logfile_maxbytes=10MB
stdout_logfile_backups=2
"""


def _escaped(text: object) -> str:
    """Return `text` as supervisor's parser expects it. Raises LaunchFailed if it cannot be represented."""
    if re.search(r"""["\n]|\s[;#]""", str(text)):
        raise LaunchFailed(f"A supervisor configuration cannot hold {str(text)!r}: use a plainer path or value.")
    return str(text).replace("%", "%%")


def end_with_launcher() -> None:
    """Make the kernel end this process if the launcher is killed. Call it in a child between fork and exec."""
    die_with_parent(signal.SIGTERM)


def lock(home: Path) -> IO[str]:
    """Lock `home` for this process. Raises LaunchFailed if another launcher holds the lock."""
    file = (home / "launch.lock").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise LaunchFailed(f"Anneal already runs in {home} (process {file.read().strip()}). Stop it first.") from None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def find_leftovers(home: Path) -> tuple[Process, ...]:
    """Return the living processes of `home`: our descendants, orphans included, and those of a killed launcher."""
    mark = f"{LAUNCH_MARK}={home}".encode()
    marked = [int(entry.name) for entry in Path("/proc").iterdir() if _belongs(entry, mark, home)]
    found = [identify(pid) for pid in marked]
    found += [process for pid in (os.getpid(), *marked) for process in list_descendants(pid)]
    return tuple({process.pid: process for process in found if process and process.pid != os.getpid()}.values())


def _belongs(entry: Path, mark: bytes, home: Path) -> bool:
    if not entry.name.isdigit():
        return False
    try:
        # PostgreSQL overwrites its environment, but its working directory is its cluster.
        return mark in (entry / "environ").read_bytes().split(b"\0") or (entry / "cwd").readlink() == home / "postgres"
    except OSError:  # gone, or owned by another account
        return False


def end(processes: Iterable[Process]) -> None:
    """Request the end of processes, and kill those that do not end."""
    asked = list(processes)
    signal_all(asked, signal.SIGTERM)
    give_up_at = time.monotonic() + POLITE_SECONDS
    while asked and time.monotonic() < give_up_at:
        time.sleep(0.05)
        reap_children()
        asked = [process for process in asked if is_alive(process)]
    kill_all(asked)
    reap_children()


def _tree_memory_bytes(pid: int) -> int:
    pids = [pid, *(process.pid for process in list_descendants(pid))]
    return sum(_proportional_bytes(each) for each in pids)


def _proportional_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
