"""A program whose grandchild leaves its session and its parent, as engines' workers do when they are orphaned."""

import os
import time
from pathlib import Path

if __name__ == "__main__":
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            home = Path(os.environ["ANNEAL_HOME"])
            (home / "escaping.pid").write_text(str(os.getpid()))
            (home / "escaping.pid").rename(home / "escaped")
            time.sleep(600)
        os._exit(0)
    time.sleep(600)
