"""`python -m gpu_workers.train.fork_server FD`: import the training libraries once and fork the children of all runs.

Imports are most of a child's work before it loads its model. They take seconds of CPU time, which a machine that also
serves the platform has to share. The process computes nothing, because a fork lacks the threads of its parent. It is
only for machines without a GPU, because a process cannot use CUDA after a fork from one that has initialized it.

It answers requests on the socket FD (unix(7), SOCK_SEQPACKET, one JSON object a message), and ends with all its
children when the other end closes.
"""

import atexit
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
from typing import Any

gc.disable()  # imports leave almost no garbage, and a fifth of their time is spent looking for it
sys.modules["wandb"] = None  # type: ignore[assignment]  # only the tracking process uses it (gpu_workers/trainer/child.py)
import torch  # noqa: E402

import gpu_workers.train.after.examination  # noqa: E402
import gpu_workers.train.after.merge  # noqa: E402
import gpu_workers.train.process  # noqa: E402, F401
from gpu_workers.common.config import replace_environment  # noqa: E402
from gpu_workers.trainer.children.confinement import confine  # noqa: E402
from gpu_workers.trainer.children.fork_server import MESSAGE_BYTES  # noqa: E402


def serve(channel: socket.socket) -> dict[str, Any] | None:
    """Fork for each request and report each end; return the request in the fork, and None once the other end closes."""
    channel.send(b"{}")
    alive: dict[int, int] = {}  # by pidfd
    ready = selectors.DefaultSelector()
    ready.register(channel, selectors.EVENT_READ)
    while True:
        for key, _ in ready.select():
            if pid := alive.pop(key.fd, None):
                ready.unregister(key.fd)
                os.close(key.fd)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                channel.send(json.dumps({"ended": pid, "code": code}).encode())
                continue
            request, files, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, 2)
            if not request:
                for pid in alive.values():
                    os.killpg(pid, signal.SIGKILL)
                return None
            server = os.getpid()
            pid = os.fork()
            if not pid:
                ready.close()
                for descriptor in alive:
                    os.close(descriptor)
                return _prepare(json.loads(request), channel, files, server)
            for descriptor in files:
                os.close(descriptor)
            pidfd = os.pidfd_open(pid)
            alive[pidfd] = pid
            ready.register(pidfd, selectors.EVENT_READ)


def _prepare(request: dict[str, Any], channel: socket.socket, files: list[int], server: int) -> dict[str, Any]:
    """Put this fork into the state of a new interpreter; return the request."""
    os.setsid()
    channel.send(json.dumps({"pid": os.getpid()}).encode())  # from here on, a signal to its group reaches it
    channel.close()
    stdin, log = files
    for source, target in ((stdin, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    for descriptor in files:
        os.close(descriptor)
    confine(server, has_network=request["has_network"])
    replace_environment(request["environment"])
    if threads := request["environment"].get("OMP_NUM_THREADS"):  # OpenMP has read the server's
        torch.set_num_threads(int(threads))
    return request


def _run(module: str) -> int:
    """Run `python -m module` to its end; return the exit code that an interpreter would have."""
    code: object = None
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    except Exception:  # noqa: BLE001 - an interpreter prints it and ends
        traceback.print_exc()
        code = 1
    if code is not None and not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing ends its forks
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code or 0


if __name__ == "__main__":
    gc.freeze()  # a collection in a fork would visit, and so copy, what was imported
    gc.enable()
    asked = serve(socket.socket(fileno=int(sys.argv[1])))
    if asked is not None:
        sys.argv = [asked["module"], *asked["arguments"]]
        # An interpreter's end frees what was imported, object by object: half a second, most of it to copy pages.
        os._exit(_run(asked["module"]))
