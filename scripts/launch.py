"""Start every process of Anneal under a supervisor, prepare the data, run the main job, and stop without a trace.

Called by scripts/up.py inside .venv; see there for the options.
"""

import argparse
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from apps.core.embedded import is_postgres_ready, is_redis_ready
from scripts.environment import EnvironmentIncomplete, Prepared, prepare
from scripts.processes import REPOSITORY, Program, Tier
from scripts.supervision import LaunchFailed, Supervision, end, find_leftovers, lock

MANAGE = (str(REPOSITORY / ".venv/bin/python"), "manage.py")
MAIN_JOB = (str(REPOSITORY / ".venv/bin/python"), "demo/main_job.py")
START_SECONDS = {Tier.SERVICES: 60.0, Tier.CONTROL: 90.0, Tier.SERVING: 300.0, Tier.TRAINING: 60.0}
CI_ROWS = "1000"
WATCHED = {
    ".venv": ("apps", "templates", "static"),
    ".venv-engines": ("gpu_workers", "apps/contracts", "apps/estimates"),
}


class Progress:
    """One line per stage with its seconds."""

    def __init__(self) -> None:
        self._stage_started = self.started = time.monotonic()

    def done(self, name: str, note: str = "") -> None:
        seconds = time.monotonic() - self._stage_started
        sys.stdout.write(f"  {name:<28} {seconds:6.1f} s  {note}".rstrip() + "\n")
        sys.stdout.flush()
        self._stage_started = time.monotonic()


def main() -> int:
    given = _arguments()
    home = given.home.resolve()
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
    return parser.parse_args()


def _run(given: argparse.Namespace, home: Path) -> int:
    ready_file = home / "ready.json"
    ready_file.unlink(missing_ok=True)
    _remove_earlier(home)
    prepared = prepare(home, is_debug=given.reload, is_launch=True)
    supervision = Supervision(prepared)
    code, figures = 1, None
    try:
        bring_up(prepared, supervision)
        ready_file.write_text(json.dumps(_ready(prepared, supervision), indent=1) + "\n")
        code, figures = _use(given, prepared, supervision)
    except KeyboardInterrupt:
        code = 0 if not given.ci else 130
    finally:
        ready_file.unlink(missing_ok=True)
        left = _shut_down(supervision)
    if figures is not None:
        sys.stdout.write(json.dumps(_seconds_install() | figures | {"processes_left": left}) + "\n")
    return code if not left else 1


def _use(
    given: argparse.Namespace, prepared: Prepared, supervision: Supervision
) -> tuple[int, dict[str, object] | None]:
    if given.ci:
        return _run_main_job_for_figures(prepared)
    if not (given.reload or given.no_main_job):
        _run_main_job(prepared)
    sys.stdout.write(f"\n{prepared.public_url}  is running; Ctrl-C stops everything\n")
    sys.stdout.write(f"{_memory_line(supervision)}\n")
    sys.stdout.flush()
    _keep_running(supervision, is_reloading=given.reload)
    return 0, None


# --- up ---------------------------------------------------------------------------------------------------------------


def bring_up(prepared: Prepared, supervision: Supervision) -> None:
    """This function will return when every process answers. Raises LaunchFailed with the log of one that does not."""
    sys.stdout.write(f"Anneal in {prepared.home}\n")
    progress = Progress()
    supervision.start()
    for tier in Tier:
        programs = [program for program in prepared.programs if program.tier == tier]
        if programs:
            supervision.start_tier(tier)
        for program in programs:
            _wait_until_healthy(prepared, supervision, program)
            progress.done(program.name, _address(prepared, program))
        if tier is Tier.SERVICES:
            supervision.start_early()
            _prepare_data(prepared, progress)


def _prepare_data(prepared: Prepared, progress: Progress) -> None:
    _manage(prepared, "owner", "migrate", "--verbosity", "0")
    progress.done("migrations")
    if prepared.known["ANNEAL_DEBUG"] != "1" and _static_files_changed(prepared.home):
        _manage(prepared, "sys", "collectstatic", "--noinput", "--verbosity", "0")
        progress.done("static files")
    _manage(prepared, "sys", "seed_catalog")
    _manage(prepared, "sys", "seed_demo")
    progress.done("catalogue and demo data")


def _static_files_changed(home: Path) -> bool:
    # Compressing them takes seconds; the manifest is written last.
    manifest = home / "static/staticfiles.json"
    return not manifest.exists() or manifest.stat().st_mtime_ns < _newest_change(["static"])[1]


def _manage(prepared: Prepared, role: str, *arguments: str) -> None:
    environment = {**os.environ, **prepared.management_variables(role=role)}
    done = subprocess.run(
        [*MANAGE, *arguments], cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise LaunchFailed(f"manage.py {arguments[0]} failed:\n{(done.stdout + done.stderr).strip()[-3000:]}")


def _wait_until_healthy(prepared: Prepared, supervision: Supervision, program: Program) -> None:
    is_healthy = _health_check(prepared, supervision, program)
    give_up_at = time.monotonic() + START_SECONDS[program.tier]
    while not is_healthy():
        supervision.check()
        if time.monotonic() > give_up_at:
            raise LaunchFailed(f"{program.name} did not become healthy{supervision.tail(program.name)}")
        time.sleep(0.1)


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
            return lambda: supervision.states()[program.name]["statename"] == "RUNNING"


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


def _run_main_job(prepared: Prepared) -> None:
    """This function will run the main job for people. Raises LaunchFailed when it does not get through."""
    sys.stdout.write("\nThe main job, through the public interfaces\n")
    sys.stdout.flush()
    child = _start_main_job(prepared, [], output=None)
    if _wait_or_end(child):
        raise LaunchFailed(f"the main job failed; the logs are in {prepared.home / 'logs'}")


def _run_main_job_for_figures(prepared: Prepared) -> tuple[int, dict[str, object] | None]:
    child = _start_main_job(prepared, ["--rows", CI_ROWS, "--qlora", "--json"], output=subprocess.PIPE)
    assert child.stdout
    last_line = ""
    try:
        for line in child.stdout:
            sys.stdout.write(line if not line.startswith("{") else "")
            sys.stdout.flush()
            last_line = line
    except KeyboardInterrupt:
        child.terminate()
        raise
    code = _wait_or_end(child)
    return code, None if code else json.loads(last_line)


def _start_main_job(prepared: Prepared, options: Sequence[str], *, output: int | None) -> subprocess.Popen[str]:
    # In a group of its own: Ctrl-C reaches the launcher, which decides the order.
    command = [*MAIN_JOB, "--home", str(prepared.home), *options]
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=output, text=True, process_group=0)


def _wait_or_end(child: subprocess.Popen[str]) -> int:
    try:
        return child.wait()
    except KeyboardInterrupt:
        child.terminate()
        child.wait()
        raise


# --- running and stopping ---------------------------------------------------------------------------------------------


def _keep_running(supervision: Supervision, *, is_reloading: bool) -> None:
    seen = _newest_changes() if is_reloading else {}
    while True:
        time.sleep(1.0)
        supervision.check()
        if is_reloading and (now := _newest_changes()) != seen:
            _restart_changed(supervision, {venv for venv in now if now[venv] != seen[venv]})
            seen = now


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
    earlier = find_leftovers(home)
    if earlier:
        sys.stdout.write(f"ending {len(earlier)} processes of an interrupted run\n")
        end(earlier)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


# --- what is said -----------------------------------------------------------------------------------------------------


def _ready(prepared: Prepared, supervision: Supervision) -> dict[str, object]:
    pids = {name: info["pid"] for name, info in supervision.states().items()}
    return {"public_url": prepared.public_url, "launcher": os.getpid(), "pids": pids}


def _memory_line(supervision: Supervision) -> str:
    memory = supervision.memory_bytes()
    parts = ", ".join(f"{name} {count / 1e6:,.0f}" for name, count in memory.items())
    return f"memory {sum(memory.values()) / 1e6:,.0f} MB: {parts}"


def _seconds_install() -> dict[str, object]:
    path = REPOSITORY / ".anneal/setup.json"
    return json.loads(path.read_text()) if path.exists() else {"seconds_install": None}


if __name__ == "__main__":
    sys.exit(main())
