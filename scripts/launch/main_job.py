"""The main job as a child of the launcher, and the figures of a start that ran it."""

import json
import shlex
import subprocess
import time
from collections.abc import Sequence

from scripts.environment import Prepared, plain_environment
from scripts.launch.starting import Starting, has_demo, say
from scripts.processes import REPOSITORY
from scripts.supervision import LAUNCH_MARK, end_with_launcher

MAIN_JOB = (".venv/bin/python", "-m", "demo.main_job")
CI_ROWS = "1000"  # after the main job, which scores as many as `make demo` does


def start_main_job(starting: Starting, options: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    say(
        "The main job runs as your own program would, through the public API: upload, estimate, train, serve,\n"
        "compare, bill. It takes some minutes; look around the dashboard meanwhile.\n"
    )
    home = str(starting.prepared.home)
    # In a separate process group: Ctrl-C reaches only the launcher, which decides the order.
    return subprocess.Popen(
        [*MAIN_JOB, "--home", home, "--began-at", str(starting.began_at), *options],
        cwd=REPOSITORY,
        env=plain_environment() | {LAUNCH_MARK: home},
        process_group=0,
        preexec_fn=end_with_launcher,
    )


def end_main_job(child: subprocess.Popen[bytes] | None) -> None:
    if child and child.poll() is None:
        child.terminate()
        child.wait()


def after_main_job(prepared: Prepared, code: int) -> str:
    """Return the message for the end of the main job with that exit code."""
    if not code:
        return ""
    command = shlex.join([*MAIN_JOB, "--home", str(prepared.home)])
    return (
        f"\nThe main job did not finish; the reason is above. Everything keeps running: {prepared.public_url}\n"
        f"To run the main job again, in another terminal:\n  cd {shlex.quote(str(REPOSITORY))} && {command}"
    )


def run_for_figures(starting: Starting) -> dict[str, object]:
    """Run the main job and a QLoRA job to their end; return their figures, or `error`."""
    prepared = starting.prepared
    if not has_demo(prepared):
        return {"error": "The main job needs the demo account, which needs embedded services and a local URL."}
    path = prepared.home / "demo/figures.json"
    path.unlink(missing_ok=True)
    child = start_main_job(starting, ["--then-score", CI_ROWS, "--figures", str(path)])
    try:
        while child.poll() is None:
            starting.watch()
            time.sleep(0.2)
    finally:
        end_main_job(child)
    if not path.exists():
        return {"error": f"The main job ended with code {child.returncode}. Its output is above."}
    figures: dict[str, object] = json.loads(path.read_text())
    return figures


def figures_of_start(
    starting: Starting, began_at: float | None, *, is_new: bool, ended_at: float | None
) -> dict[str, object]:
    """Return the seconds of set-up and start. Those since the clone are None if packages or data existed before."""
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
