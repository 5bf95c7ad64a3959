"""A child that reports what it is: `python -m tests.support.engines.reporting_child WORK_DIR END`."""

import atexit
import json
import os
import resource
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import torch


def outlive() -> None:
    """An interpreter waits for its threads before it cleans up."""
    threading.main_thread().join()
    sys.stdout.write("Its thread ended.\n")


secret = sys.stdin.readline()
interfaces = [name for _, name in socket.if_nameindex()]
report = {
    "secret": secret,
    "environment": dict(os.environ),
    "threads": torch.get_num_threads(),
    "interfaces": interfaces,
    "core_bytes": resource.getrlimit(resource.RLIMIT_CORE)[0],
    "is_session_leader": os.getsid(0) == os.getpid(),
    "descriptors": sorted(int(name) for name in os.listdir("/proc/self/fd")),
}
(Path(sys.argv[1]) / "report.json").write_text(json.dumps(report))
atexit.register(print, "It cleaned up.")
threading.Thread(target=outlive).start()
sys.stdout.write("It reported.\n")
sys.stdout.flush()
match sys.argv[2]:
    case "succeed":
        sys.exit(0)
    case "fail":
        sys.exit(3)
    case "explain":
        sys.exit("It explains itself.")
    case "raise":
        raise RuntimeError("This is its fault.")
    case "abort":
        os.kill(os.getpid(), signal.SIGABRT)
    case "hang":
        time.sleep(600)
