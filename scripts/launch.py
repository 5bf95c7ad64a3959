"""Start every process of Anneal under a supervisor, prepare the data, run the main job, and stop without a trace.

Called by scripts/up.py inside .venv; see there for the options.
"""

import argparse
import http.client
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from apps.core.embedded import is_postgres_ready, is_redis_ready
from apps.core.loopback import is_loopback
from scripts.environment import EnvironmentIncomplete, Prepared, plain_environment, prepare
from scripts.processes import REPOSITORY, Program, Tier
from scripts.supervision import (
    LAUNCH_MARK,
    LaunchFailed,
    Supervision,
    end,
    end_with_launcher,
    find_leftovers,
    lock,
)

MANAGE = (str(REPOSITORY / ".venv/bin/python"), "manage.py")
MAIN_JOB = (".venv/bin/python", "-m", "demo.main_job")
START_SECONDS = {
    Tier.SERVICES: 60.0,
    Tier.WEB: 120.0,
    Tier.CONTROL: 120.0,
    Tier.SERVING: 300.0,
    Tier.TRAINING: 60.0,
}
QUOTE_SECONDS = 120.0
CI_ROWS = "1000"
WATCHED = {
    ".venv": ("apps", "templates", "static"),
    ".venv-engines": ("gpu_workers", "apps/contracts", "apps/estimates"),
}


class Starting:
    """Which programs do not answer yet; one line for each that begins to, with the seconds since the start."""

    def __init__(self, prepared: Prepared, supervision: Supervision, *, checks: Executor) -> None:
        """Each check runs in a thread of `checks`: one that waits for its answer holds up no other."""
        self.began_at = time.time()
        self.seconds: dict[str, float] = {}
        self._prepared, self._supervision, self._checks = prepared, supervision, checks
        self._missing: dict[Program, Future[bool]] = {}
        self._late_at: dict[Program, float] = {}
        self._started: set[Tier] = set()

    def start(self, tier: Tier) -> None:
        """Start the programs of `tier` and expect them to answer. A second call for the same tier does nothing."""
        if tier in self._started:
            return
        self._started.add(tier)
        self._supervision.start_tier(tier)
        for program in self._prepared.programs:
            if program.tier is tier:
                self._missing[program] = self._ask(program)
                self._late_at[program] = time.monotonic() + START_SECONDS[tier]

    def _ask(self, program: Program) -> Future[bool]:
        return self._checks.submit(_health_check(self._prepared, self._supervision, program))

    def look(self) -> bool:
        """Whether every program that was started answers now. Raises LaunchFailed where supervisord has ended."""
        self._supervision.check()
        for program, check in list(self._missing.items()):
            if not check.done():
                continue
            if check.result():
                del self._missing[program]
                self.line(program.name, _address(self._prepared, program) or "is up")
            else:
                self._missing[program] = self._ask(program)
        return not self._missing

    def wait(self) -> None:
        """This method will return when all answer. Raises LaunchFailed with a log."""
        while not self.look():
            if late := self.late():
                raise LaunchFailed(f"{late.name} did not become healthy{self._supervision.tail(late.name)}")
            time.sleep(0.1)

    @property
    def is_up(self) -> bool:
        """Whether everything was started and has answered."""
        return {program.name for program in self._prepared.programs} <= self.seconds.keys()

    def late(self) -> Program | None:
        """A program that should answer by now; each is returned once in every span that it may take."""
        for program in self._missing:
            if time.monotonic() > self._late_at[program]:
                self._late_at[program] = time.monotonic() + START_SECONDS[program.tier]
                return program
        return None

    def line(self, name: str, note: str) -> None:
        self.seconds[name] = round(time.time() - self.began_at, 1)
        clear = "\r\033[K" if sys.stdout.isatty() else ""  # the main job's bar
        _say(f"{clear}{self.seconds[name]:7.1f} s  {name:<14} {note}")


def main() -> int:
    given = _arguments()
    home = given.home.resolve()
    os.umask(0o077)  # logs, mail and sockets are for this account alone
    home.mkdir(parents=True, exist_ok=True)
    # SIGINT too: a shell lets its background jobs ignore it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        with lock(home):
            return _run(given, home)
    except (LaunchFailed, EnvironmentIncomplete) as failure:
        sys.stderr.write(f"{failure}\n")
        return 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/up.py", description=__doc__)
    parser.add_argument("--home", type=Path, default=REPOSITORY / ".anneal", help="data directory (default .anneal)")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--main-job", action="store_true", help="run the main job, then keep running (default)")
    mode.add_argument("--ci", action="store_true", help="main job, 1,000 rows, QLoRA job, one JSON line, exit")
    mode.add_argument("--reload", action="store_true", help="no main job; restart processes when their code changes")
    mode.add_argument("--no-main-job", action="store_true", help="only keep running")
    parser.add_argument("--began-at", type=float, help=argparse.SUPPRESS)  # Unix time; set-up comes before us
    return parser.parse_args()


def _run(given: argparse.Namespace, home: Path) -> int:
    ready_file = home / "ready.json"
    ready_file.unlink(missing_ok=True)
    _remove_earlier(home)
    is_new = not (home / "demo.json").exists()
    prepared = prepare(home, is_debug=given.reload, is_launch=True)
    supervision = Supervision(prepared)
    checks = ThreadPoolExecutor(len(prepared.programs))
    starting = Starting(prepared, supervision, checks=checks)
    code, figures = 0, {}
    try:
        bring_up(prepared, supervision, starting)
        if given.reload or given.no_main_job:
            starting.start(Tier.SERVING)
        if given.ci:
            figures = _run_main_job_for_figures(prepared, supervision, starting)
            code = 1 if "error" in figures else 0
        else:
            _keep_running(given, prepared, supervision, starting)
    except KeyboardInterrupt:
        code = 130 if given.ci else 0
    except LaunchFailed as failure:
        code, figures = 1, {"error": str(failure)}
        sys.stderr.write(f"{failure}\n")
    finally:
        ready_file.unlink(missing_ok=True)
        checks.shutdown(wait=False, cancel_futures=True)
        left = _shut_down(supervision)
    if given.ci and figures:
        ended_at = figures.pop("main_job_ended_at", None)
        start = _figures_of_start(starting, given.began_at, is_new=is_new, ended_at=ended_at)
        _say(json.dumps(start | figures | {"processes_left": left}))
    return code if not left else 1


# --- up ---------------------------------------------------------------------------------------------------------------


def bring_up(prepared: Prepared, supervision: Supervision, starting: Starting) -> None:
    """This function will return when the control plane answers, with the trainer on its way and the engine not started.

    Raises LaunchFailed with the log of a process that does not answer.
    """
    _say(f"Anneal in {prepared.home}")
    for note in prepared.notes:
        _say(note)
    supervision.start()
    starting.start(Tier.SERVICES)
    starting.wait()
    _prepare_data(prepared)
    starting.line("database", "tables, static files, catalogue and demo account are ready")
    starting.start(Tier.WEB)
    starting.wait()
    _say(_sign_in(prepared))
    starting.start(Tier.CONTROL)
    starting.wait()
    starting.start(Tier.TRAINING)


def _prepare_data(prepared: Prepared) -> None:
    """This function will migrate, collect changed static files and seed, in one process. Raises LaunchFailed."""
    command = ["prepare", "--demo" if _has_demo(prepared) else "--local", "--verbosity", "0"]
    environment = {**os.environ, **prepared.management_variables(role="owner")}
    done = subprocess.run(
        [*MANAGE, *command], cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise LaunchFailed(f"manage.py prepare failed:\n{(done.stdout + done.stderr).strip()[-3000:]}")


def _has_demo(prepared: Prepared) -> bool:
    """Whether this launch makes the demonstration's operator account: never where others could reach it."""
    return prepared.services is not None and is_loopback(prepared.public_url)


def _health_check(prepared: Prepared, supervision: Supervision, program: Program) -> Callable[[], bool]:
    services, known = prepared.services, prepared.known
    match program.name:
        case "postgres":
            return lambda: services is not None and is_postgres_ready(services)
        case "redis":
            return lambda: services is not None and is_redis_ready(services)
        case "web":
            return lambda: _answers(f"http://127.0.0.1:{known['WEB_PORT']}", "/accounts/login/")
        case "internal":
            return lambda: _answers(f"http://127.0.0.1:{known['INTERNAL_PORT']}", "/internal/v1/claim")
        case "gateway":
            return lambda: _answers(known["ANNEAL_GATEWAY_URL"], "/v1/chat/completions")
        case "vllm":
            engine = prepared.place.fill("${replica_dir}/engine/vllm.sock")
            return lambda: _answers(f"unix://{engine}", "/health")
        case _:
            return lambda: supervision.is_running(program)


def _answers(url: str, path: str) -> bool:
    """Whether a server is there that answers a GET, be it with a refusal."""
    connection = _connection(url)
    try:
        connection.request("GET", path)
        return connection.getresponse().status < 500
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _connection(url: str) -> http.client.HTTPConnection:
    if not url.startswith("unix://"):
        parts = urlsplit(url)
        return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=10)
    connection = http.client.HTTPConnection("localhost", timeout=10)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(10)
    try:
        connection.sock.connect(url.removeprefix("unix://"))
    except OSError:  # http.client connects by itself, to nobody, when it finds no socket
        pass
    return connection


def _address(prepared: Prepared, program: Program) -> str:
    return {"web": prepared.public_url, "internal": prepared.known["ANNEAL_INTERNAL_URL"]}.get(program.name, "")


# --- the main job -----------------------------------------------------------------------------------------------------


def _run_main_job_for_figures(prepared: Prepared, supervision: Supervision, starting: Starting) -> dict[str, Any]:
    if not _has_demo(prepared):
        return {"error": "the main job needs the demo account, which exists on one machine with embedded services only"}
    path = prepared.home / "demo/figures.json"
    path.unlink(missing_ok=True)
    options = ["--rows", CI_ROWS, "--qlora", "--figures", str(path)]
    child = _start_main_job(prepared, starting, options)
    try:
        while child.poll() is None:
            _start_engine_when_quoted(prepared, starting)
            _look(prepared, supervision, starting)
            time.sleep(0.2)
    finally:
        _end_child(child)
    if not path.exists():
        return {"error": f"the main job ended with code {child.returncode}; its output is above"}
    figures: dict[str, Any] = json.loads(path.read_text())
    return figures


def _start_main_job(prepared: Prepared, starting: Starting, options: Sequence[str]) -> subprocess.Popen[bytes]:
    _say("The main job, through the public interfaces: upload, estimate, train, serve, compare, bill\n")
    command = [*MAIN_JOB, "--home", str(prepared.home), "--began-at", str(starting.began_at), *options]
    # In a group of its own: Ctrl-C reaches the launcher, which decides the order.
    return subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=plain_environment() | {LAUNCH_MARK: str(prepared.home)},
        process_group=0,
        preexec_fn=end_with_launcher,
    )


def _start_engine_when_quoted(prepared: Prepared, starting: Starting) -> None:
    """This function will start the engine when the training job exists, or after the time that a quote may take.

    The trainer measures its speed for the quote. An engine that loads at the same time makes it up to 20 % slower, also
    where each has a core for itself.
    """
    state = prepared.home / "demo/state.json"
    has_job = state.exists() and "ftjob-" in state.read_text()
    if has_job or time.time() - starting.began_at > QUOTE_SECONDS:
        starting.start(Tier.SERVING)


def _end_child(child: subprocess.Popen[bytes] | None) -> None:
    if child and child.poll() is None:
        child.terminate()
        child.wait()


# --- running and stopping ---------------------------------------------------------------------------------------------


def _keep_running(given: argparse.Namespace, prepared: Prepared, supervision: Supervision, starting: Starting) -> None:
    """This function will run until it is interrupted; a main job that fails stops nothing. Raises LaunchFailed."""
    has_main_job = _has_demo(prepared) and not (given.reload or given.no_main_job)
    child = _start_main_job(prepared, starting, []) if has_main_job else None
    is_said, seen = False, _newest_changes() if given.reload else {}
    try:
        while True:
            if child:
                _start_engine_when_quoted(prepared, starting)
            is_up = _look(prepared, supervision, starting)
            if child and child.poll() is not None:
                _say(_after_main_job(prepared, child.returncode))
                child = None
                starting.start(Tier.SERVING)
            if is_up and not child and not is_said:
                is_said = True
                _say(f"\n{prepared.public_url}  is running; Ctrl-C stops everything\n{_memory_line(supervision)}")
            if given.reload and (now := _newest_changes()) != seen:
                _restart_changed(supervision, {venv for venv in now if now[venv] != seen[venv]})
                seen = now
            time.sleep(1.0 if is_up else 0.2)
    finally:
        _end_child(child)


def _look(prepared: Prepared, supervision: Supervision, starting: Starting) -> bool:
    """Whether every process answers; says once what is late, and writes ready.json when nothing is missing."""
    is_up, ready_file = starting.look(), prepared.home / "ready.json"
    if late := starting.late():
        log = supervision.logs / f"{late.name}.log"
        _say(f"{late.name} does not answer after {START_SECONDS[late.tier]:.0f} s. Everything else runs. Log: {log}")
    if is_up and not ready_file.exists():
        ready_file.write_text(json.dumps(_ready(prepared, supervision), indent=1) + "\n")
    return is_up


def _newest_changes() -> dict[str, tuple[int, int]]:
    """For each environment the number of watched files and the newest change among them."""
    return {venv: _newest_change(folders) for venv, folders in WATCHED.items()}


def _newest_change(folders: Sequence[str]) -> tuple[int, int]:
    paths = [path for folder in folders for path in (REPOSITORY / folder).rglob("*.*") if path.suffix != ".pyc"]
    changes = [path.stat().st_mtime_ns for path in paths if path.exists()]
    return len(changes), max(changes, default=0)


def _restart_changed(supervision: Supervision, venvs: set[str]) -> None:
    # The engine outlives edits: it takes half a minute to load and reads no code of ours after its start.
    changed = [
        p for p in supervision.prepared.programs if p.venv in venvs and p.tier != Tier.SERVICES and p.name != "vllm"
    ]
    sys.stdout.write(f"changed: restarting {', '.join(program.name for program in changed)}\n")
    sys.stdout.flush()
    for program in changed:
        supervision.restart(program)


def _shut_down(supervision: Supervision) -> int:
    started = time.monotonic()
    sys.stdout.write("\nstopping … (again Ctrl-C: at once)\n")
    sys.stdout.flush()
    supervision.stop()
    left = len(supervision.leftovers)
    sys.stdout.write(f"stopped in {time.monotonic() - started:.1f} s, {left} processes left\n")
    for process in supervision.leftovers:
        sys.stdout.write(f"  had to end process {process.pid}\n")
    return left


def _remove_earlier(home: Path) -> None:
    """This function will end what a launcher that was killed left behind; we hold the lock, so nobody uses it."""
    while earlier := find_leftovers(home):  # again for what a supervisor started while it was ending
        sys.stdout.write(f"ending {len(earlier)} processes of an interrupted run\n")
        end(earlier)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


# --- what is said -----------------------------------------------------------------------------------------------------


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _sign_in(prepared: Prepared) -> str:
    if not _has_demo(prepared):
        env = shlex.quote(str(prepared.home / "env"))
        return (
            f"\n  The dashboard is open:  {prepared.public_url}\n"
            "  There is no demo account: others can reach this installation or its database. Make an operator with\n"
            f"  set -a; . {env}; set +a; {MANAGE[0]} manage.py createoperator you@example.com\n"
        )
    account = json.loads((prepared.home / "demo.json").read_text())
    return (
        f"\n  The dashboard is open:  {prepared.public_url}\n"
        f"  Sign in as              {account['email']}\n"
        f"  with the password       {account['password']}\n"
    )


def _after_main_job(prepared: Prepared, code: int) -> str:
    if not code:
        return ""
    command = shlex.join([*MAIN_JOB, "--home", str(prepared.home)])
    return (
        f"\nThe main job did not finish; the reason is above. Everything keeps running: {prepared.public_url}\n"
        f"To run the main job again, in another terminal:\n  cd {shlex.quote(str(REPOSITORY))} && {command}"
    )


def _ready(prepared: Prepared, supervision: Supervision) -> dict[str, object]:
    pids = {name: info["pid"] for name, info in supervision.states().items()}
    return {"public_url": prepared.public_url, "launcher": os.getpid(), "pids": pids}


def _memory_line(supervision: Supervision) -> str:
    memory = supervision.memory_bytes()
    parts = ", ".join(f"{name} {count / 1e6:,.0f}" for name, count in memory.items())
    return f"memory {sum(memory.values()) / 1e6:,.0f} MB: {parts}"


def _figures_of_start(
    starting: Starting, began_at: float | None, *, is_new: bool, ended_at: float | None
) -> dict[str, Any]:
    """The seconds of set-up and start. Those since the clone are None where packages or data were there before."""
    setup = REPOSITORY / ".anneal/setup.json"
    has_installed = began_at is not None and setup.exists() and setup.stat().st_mtime >= began_at
    cloned_at = began_at if has_installed and is_new else None

    def since_clone(moment: float | None) -> float | None:
        return None if cloned_at is None or moment is None else round(moment - cloned_at, 1)

    web = starting.seconds.get("web")
    return {
        "seconds_install": json.loads(setup.read_text())["seconds_install"] if has_installed else None,
        "seconds_clone_to_dashboard": since_clone(None if web is None else starting.began_at + web),
        "seconds_clone_to_end_of_main_job": since_clone(ended_at),
        "seconds_start_to_dashboard": web,
        "seconds_start": max(starting.seconds.values()) if starting.is_up else None,
        "seconds_until_up": starting.seconds,
    }


if __name__ == "__main__":
    sys.exit(main())
