"""Install missing dependencies, then start every process of Anneal and run the main job.

    python3 scripts/up.py [--home DIR] [--main-job | --ci | --reload | --no-main-job]

Standard library only: it starts under any Python 3.11 or newer and continues inside .venv.
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

REPOSITORY = Path(__file__).resolve().parents[1]


def main() -> NoReturn:
    began_at = time.time()
    python = REPOSITORY / ".venv/bin/python"
    if not {"-h", "--help"} & set(sys.argv):
        if code := set_up():
            sys.exit(code)
    elif not python.exists():
        sys.stdout.write(f"{__doc__}\n")  # to show more, set-up would download a gigabyte
        sys.exit(0)
    os.chdir(REPOSITORY)
    sys.stdout.flush()
    os.execv(python, [str(python), "-m", "scripts.launch", f"--began-at={began_at}", *sys.argv[1:]])  # noqa: S606  no shell wanted


def set_up() -> int:
    """Run set-up and return its exit code. Ctrl-C reaches it too; then wait until it has ended with its own message."""
    setup = subprocess.Popen([sys.executable, str(REPOSITORY / "scripts/setup.py")], cwd=REPOSITORY)
    is_stopped = False
    while setup.poll() is None:
        try:
            setup.wait()
        except KeyboardInterrupt:
            is_stopped = True
    return setup.returncode or (130 if is_stopped else 0)


if __name__ == "__main__":
    main()
