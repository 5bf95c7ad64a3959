"""Start every process of Anneal under a supervisor, prepare the data, run the main job, and stop without a trace.

scripts/up.py calls this program inside .venv and passes its options on.
"""

import argparse
import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from scripts.embedded import EmbeddedServiceError
from scripts.environment import EnvironmentIncomplete, prepare
from scripts.launch.code_changes import newest_changes, restart_changed
from scripts.launch.main_job import after_main_job, end_main_job, figures_of_start, run_for_figures, start_main_job
from scripts.launch.starting import Starting, bring_up, has_demo, say
from scripts.processes import REPOSITORY
from scripts.supervision import LaunchFailed, Supervision, end, find_leftovers, lock


def main() -> int:
    given = _arguments()
    home = given.home.resolve()
    os.umask(0o077)  # only this account can read logs, mail and sockets
    home.mkdir(parents=True, exist_ok=True)
    # SIGINT too: a shell makes its background jobs ignore it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        with lock(home):
            return _run(given, home)
    except (LaunchFailed, EnvironmentIncomplete, EmbeddedServiceError) as failure:
        sys.stderr.write(f"{failure}\n")
        return 1
    except KeyboardInterrupt:  # before anything was started
        sys.stderr.write("\nStopped.\n")
        return 130


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/up.py", description=__doc__)
    parser.add_argument("--home", type=Path, default=REPOSITORY / ".anneal", help="data directory (default .anneal)")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--main-job", action="store_true", help="run the main job, then keep running (default)")
    mode.add_argument("--ci", action="store_true", help="main job, 1,000 rows, QLoRA job, one JSON line, exit")
    mode.add_argument("--reload", action="store_true", help="no main job; restart processes when their code changes")
    mode.add_argument("--no-main-job", action="store_true", help="only keep running")
    parser.add_argument("--began-at", type=float, help=argparse.SUPPRESS)  # Unix time; set-up runs before this program
    return parser.parse_args()


def _run(given: argparse.Namespace, home: Path) -> int:
    ready_file = home / "ready.json"
    ready_file.unlink(missing_ok=True)
    while earlier := find_leftovers(home):  # again for processes that a supervisor started while it was ending
        say(f"Ending {len(earlier)} processes of an earlier run that was cut off.")
        end(earlier)
    is_new = not (home / "demo.json").exists()
    prepared = prepare(home, is_debug=given.reload, is_launch=True)
    supervision = Supervision(prepared)
    checks = ThreadPoolExecutor(len(prepared.programs))
    starting = Starting(prepared, supervision, checks=checks)
    code, figures = 0, {}
    try:
        bring_up(starting)
        if given.ci:
            figures = run_for_figures(starting)
            code = 1 if "error" in figures else 0
        else:
            _keep_running(given, starting)
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
        ended_at = ended_at if isinstance(ended_at, float) else None
        start = figures_of_start(starting, given.began_at, is_new=is_new, ended_at=ended_at)
        say(json.dumps(start | figures | {"processes_left": left}))
    return code if not left else 1


def _keep_running(given: argparse.Namespace, starting: Starting) -> None:
    """Run until interrupted. A failed main job stops nothing. Raises LaunchFailed."""
    prepared, supervision = starting.prepared, starting.supervision
    has_main_job = has_demo(prepared) and not (given.reload or given.no_main_job)
    child = start_main_job(starting) if has_main_job else None
    is_said, seen = False, newest_changes() if given.reload else {}
    try:
        while True:
            if child and child.poll() is not None:
                say(after_main_job(prepared, child.returncode))
                child = None
            is_up = starting.watch()
            if is_up and not child and not is_said:
                is_said = True
                say(f"\nAnneal runs at {prepared.public_url}. Press Ctrl-C to stop all of it.\n{_memory(supervision)}")
            if given.reload and (now := newest_changes()) != seen:
                restart_changed(supervision, {venv for venv in now if now[venv] != seen[venv]})
                seen = now
            time.sleep(1.0 if is_up else 0.2)
    finally:
        end_main_job(child)


def _memory(supervision: Supervision) -> str:
    memory = supervision.memory_bytes()
    parts = ", ".join(f"{name} {count / 1e6:,.0f}" for name, count in memory.items())
    return f"It takes {sum(memory.values()) / 1e6:,.0f} MB of memory: {parts}"


def _shut_down(supervision: Supervision) -> int:
    started = time.monotonic()
    say("\nStopping, which can take a minute. Press Ctrl-C again to stop at once.")
    supervision.stop()
    left = len(supervision.leftovers)
    say(f"Stopped in {time.monotonic() - started:.1f} s; {left} processes were left.")
    for process in supervision.leftovers:
        say(f"  Process {process.pid} did not stop by itself and was ended.")
    return left


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
