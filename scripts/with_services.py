"""Run one command with the embedded services of a data directory and the environment of a management command.

    .venv/bin/python -m scripts.with_services [--home DIR] [--role sys|owner] manage.py makemigrations --check

Uses the servers of a running `make demo` or `make dev`; otherwise starts them and stops them afterwards.
"""

import argparse
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

from scripts.embedded import ROLES, EmbeddedServiceError, ensure_running
from scripts.environment import EnvironmentIncomplete, prepare
from scripts.processes import REPOSITORY


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", type=Path, default=REPOSITORY / ".anneal")
    parser.add_argument("--role", choices=ROLES, default="sys", help="whose database login (default sys)")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    try:
        return _run(given)
    except (EnvironmentIncomplete, EmbeddedServiceError) as failure:
        sys.stderr.write(f"{failure}\n")
        return 1


def _run(given: argparse.Namespace) -> int:
    home = given.home.resolve()
    home.mkdir(parents=True, exist_ok=True)
    prepared = prepare(home, is_debug=True, is_launch=False)
    command = [sys.executable, *given.command] if given.command[0].endswith(".py") else given.command
    with ensure_running(home) if prepared.services else nullcontext():
        environment = {**os.environ, **prepared.management_variables(role=given.role)}
        return subprocess.run(command, cwd=REPOSITORY, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
