"""The main job, through the public interfaces only: upload, estimate, fine-tune, serve, compare, and read the bill.

    .venv/bin/python -m demo.main_job --home .anneal [--rows 200] [--then-score 1000] [--figures FILE]

The program uses the official `openai` package, also for /api/v1, which covers what OpenAI's API lacks. It saves its
progress in HOME/demo/state.json; run it again to continue where it stopped. It has a next step for each state of a job:
it raises the cap of a paused job, and starts a new job after a failed or cancelled one.
"""

import argparse
import fcntl
import io
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import openai

from demo.main_job.journey import run_longer_check, run_main_job
from demo.main_job.platform import DemoFailed, Platform, is_passing, message_of
from demo.main_job.stages import Stage
from demo.main_job.state import State

# The variables by which curl sends requests through a proxy, which cannot reach our loopback address.
PROXIES = {"http_proxy", "all_proxy", "ALL_PROXY"}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m demo.main_job", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=100, help="held-out messages to score")
    parser.add_argument(
        "--then-score", type=int, default=0, metavar="ROWS", help="then score more messages, and a second job by QLoRA"
    )
    parser.add_argument("--figures", type=Path, help="write the figures, or the reason of a failure, into this file")
    parser.add_argument(
        "--began-at", type=float, default=time.time(), help="Unix time that the printed seconds count from"
    )
    asked = parser.parse_args()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the bar's blocks exist in few encodings
    figures = run(asked)
    if asked.figures:
        asked.figures.write_text(json.dumps(figures) + "\n")
    return 1 if "error" in figures else 0


def run(asked: argparse.Namespace) -> dict[str, object]:
    """Run the requested jobs and return the figures, or `error` if the main job did not finish."""
    home, stage = asked.home.resolve(), Stage(began_at=asked.began_at)
    try:
        platform = Platform(home)
        folder = home / "demo"
        folder.mkdir(exist_ok=True)
        with _alone(folder):
            state = State(folder / "state.json")
            figures = run_main_job(platform, state, stage, rows=asked.rows, folder=folder)
            if asked.then_score:
                model = str(figures["model"])
                figures |= run_longer_check(platform, state, stage, model, rows=asked.then_score, folder=folder)
    except KeyboardInterrupt:
        stage.line("stopped", "Run it again, and it continues where it stopped.")
        return {"error": "stopped"}
    except DemoFailed as failure:
        return _failed(stage, home, str(failure), process=failure.process)
    except openai.APIError as error:
        return _failed(stage, home, _reason(error, platform), process="web")
    sys.stdout.write("\n".join(["", *_curl(platform, str(figures["model"])), ""]))
    account = platform.account
    sys.stdout.write(f"\nDashboard {platform.url}  {account['email']} / {account['password']}\n")
    return figures | {"seconds_by_stage": stage.seconds}


def _failed(stage: Stage, home: Path, reason: str, *, process: str) -> dict[str, object]:
    stage.line("failed", reason)
    stage.line("", f"The log to read: {home / 'logs' / process}.log")
    return {"error": reason}


def _reason(error: openai.APIError, platform: Platform) -> str:
    """Return why the platform refused, in words that name the next step."""
    match error:
        case openai.AuthenticationError():
            return (
                f"The API key in {platform.home / 'demo.json'} is not accepted any more. If its organization is "
                f"suspended, reinstate it at {platform.url}/staff/organizations. If not, stop Anneal with Ctrl-C and "
                "run `make demo` again: it makes a new key."
            )
        case openai.APIConnectionError():
            return "The web server does not answer. Is Anneal running? `make demo` starts it."
        case openai.RateLimitError() if is_passing(error):
            again = "Wait a minute and run the main job again: it continues where it stopped."
            return f"The platform limits how often it is asked: {message_of(error)} {again}"
        case openai.RateLimitError():
            return f"The platform answered: {message_of(error)} {platform.operator_hint}"
        case _:
            return f"The platform answered: {message_of(error)}"


def _alone(folder: Path) -> IO[str]:
    """Lock the folder for this process. Raises DemoFailed while another main job holds the lock."""
    file = (folder / "main_job.lock").open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise DemoFailed("The main job runs already, in another process. Wait until it ends.") from None
    return file


def _curl(platform: Platform, model: str) -> Iterator[str]:
    body = {"model": model, "messages": [{"role": "user", "content": "My card still has not arrived, where is it?"}]}
    yield "Ask your adapter from another terminal:\n"
    around = "--noproxy '*' " if PROXIES & os.environ.keys() else ""
    yield f"curl {around}{platform.url}/v1/chat/completions \\"
    yield f"  -H 'Authorization: Bearer {platform.account['api_key']}' -H 'Content-Type: application/json' \\"
    yield f"  -d '{json.dumps(body)}'"


if __name__ == "__main__":
    sys.exit(main())
