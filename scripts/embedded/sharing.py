"""Both servers for tests and management commands, kept running and shared between processes."""

import fcntl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO

from scripts.embedded.places import POSTGRES_PORT, REPOSITORY, EmbeddedServices, services, users_lock
from scripts.embedded.postgres import is_postgres_ready
from scripts.embedded.redis import is_redis_ready
from scripts.embedded.servers import READY_TIMEOUT_SECONDS, EmbeddedServiceError, locked


@contextmanager
def ensure_running(data_dir: Path, *, durable: bool = True, tcp_port: int | None = None) -> Iterator[EmbeddedServices]:
    """Keep both servers of `data_dir` running. Start those that do not run yet.

    Any number of processes may use them at once; servers started here stop when the last user ends. Servers that a
    supervisor started are used but not stopped. Raises EmbeddedServiceError if one does not start.
    """
    where = services(data_dir, postgres_port=tcp_port or POSTGRES_PORT)
    users = locked(users_lock(data_dir), fcntl.LOCK_SH)
    started: list[subprocess.Popen[bytes]] = []
    try:
        with locked(data_dir / "starting.lock", fcntl.LOCK_EX):
            started = _start_missing(data_dir, where, durable=durable, tcp_port=tcp_port)
        yield where
    finally:
        is_last = _is_last_user(users)
        users.close()
        for process in started:
            if is_last:
                process.wait()
            else:
                process.returncode = 0  # it keeps running for the others: no longer our child, and without a warning


def _start_missing(
    data_dir: Path, where: EmbeddedServices, *, durable: bool, tcp_port: int | None
) -> list[subprocess.Popen[bytes]]:
    flags = ["--until-unused"] + ([] if durable else ["--not-durable"])
    tcp_flags = [f"--tcp-port={tcp_port}"] if tcp_port else []
    servers: list[tuple[str, Callable[[], bool], list[str]]] = [
        ("postgres", partial(is_postgres_ready, where), tcp_flags),
        ("redis", partial(is_redis_ready, where), []),
    ]
    logs = data_dir / "logs"
    missing = [
        (_start_keeper(name, data_dir, flags + extra, logs / f"{name}.log"), is_ready, logs / f"{name}.log")
        for name, is_ready, extra in servers
        if not is_ready()
    ]
    for process, is_ready, log in missing:
        _wait_for_keeper(process, is_ready, log)
    return [process for process, *_ in missing]


def _start_keeper(name: str, data_dir: Path, flags: list[str], log: Path) -> subprocess.Popen[bytes]:
    log.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "scripts.embedded", name, "--data-dir", str(data_dir.resolve()), *flags]
    with log.open("ab") as output:
        return subprocess.Popen(
            command, cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )


def _wait_for_keeper(process: subprocess.Popen[bytes], is_ready: Callable[[], bool], log: Path) -> None:
    give_up_at = time.monotonic() + READY_TIMEOUT_SECONDS
    while not is_ready():
        if process.poll() is not None or time.monotonic() > give_up_at:
            last_lines = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise EmbeddedServiceError(f"an embedded server did not start; the end of {log}:\n{last_lines}")
        time.sleep(0.02)


def _is_last_user(users: IO[str]) -> bool:
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
