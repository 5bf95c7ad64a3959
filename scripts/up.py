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
    if not {"-h", "--help"} & set(sys.argv):
        try:
            setup = subprocess.run([sys.executable, REPOSITORY / "scripts/setup.py"], cwd=REPOSITORY, check=False)
        except KeyboardInterrupt:
            sys.exit(130)  # set-up has printed that it stopped
        if setup.returncode:
            sys.exit(setup.returncode)
    python = REPOSITORY / ".venv/bin/python"
    os.chdir(REPOSITORY)
    sys.stdout.flush()
    os.execv(python, [str(python), "-m", "scripts.launch", f"--began-at={began_at}", *sys.argv[1:]])  # noqa: S606  no shell wanted


if __name__ == "__main__":
    main()
