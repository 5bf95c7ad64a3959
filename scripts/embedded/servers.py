"""One server process in the foreground, and its system requirements: an account, a package, a lock."""

import ctypes
import fcntl
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

# PostgreSQL refuses to run as root; as root, its files belong to this system account.
POSTGRES_ACCOUNT = "anneal-postgres"
# Measured: after kill -9 of the postmaster a new one is refused for up to 1.5 s, until the old backends are gone.
START_RETRY_SECONDS = 5.0
READY_TIMEOUT_SECONDS = 60.0
_POLL_SECONDS = 0.1
PR_SET_PDEATHSIG = 1


class EmbeddedServiceError(RuntimeError):
    """An embedded server could not be started; the message names it, the reason and the fix."""


class Foreground:
    """Owns one server process: retries its start, and turns SIGTERM and SIGINT into its own stop signal."""

    def __init__(self, name: str, spawn: Callable[[], subprocess.Popen[bytes]], *, stop_signal: signal.Signals) -> None:
        self.is_stopping = False
        self._name, self._spawn, self._stop_signal = name, spawn, stop_signal
        self._process: subprocess.Popen[bytes] | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._ask_to_stop())

    def start(self, *, is_ready: Callable[[], bool]) -> None:
        """Return once the server answers or a stop was requested; retry a failed start."""
        self._wait_for_predecessor(is_ready)
        retry_until, give_up_at = time.monotonic() + START_RETRY_SECONDS, time.monotonic() + READY_TIMEOUT_SECONDS
        self._process = self._spawn()
        while not self.is_stopping and not is_ready():
            if self._process.poll() is not None:
                if time.monotonic() > retry_until:
                    raise EmbeddedServiceError(
                        f"{self._name} ended with code {self._process.returncode} while starting"
                    )
                time.sleep(0.2)
                self._process = self._spawn()
            elif time.monotonic() > give_up_at:
                self.stop()
                raise EmbeddedServiceError(f"{self._name} did not answer within {READY_TIMEOUT_SECONDS:.0f} s")
            time.sleep(0.02)

    def stop(self) -> None:
        self._ask_to_stop()
        self.wait()

    def wait(self, *, until_unused: Path | None = None) -> int:
        """Return the server's exit code; with `until_unused`, stop the server once that lock is free."""
        if self._process is None:
            return 0
        if until_unused:
            threading.Thread(target=self._stop_when_unused, args=(until_unused,), daemon=True).start()
        # Not in waitpid: a signal that came just before that call would wait with it until the server ends.
        while self._process.poll() is None:
            time.sleep(_POLL_SECONDS)
        return self._process.returncode

    def _ask_to_stop(self) -> None:
        self.is_stopping = True
        if self._process and self._process.returncode is None:
            os.kill(self._process.pid, self._stop_signal)

    def _stop_when_unused(self, lock: Path) -> None:
        # The kernel frees a dead user's share. Held until this process ends, so that a new process waits for a clean
        # stop.
        self._unused = locked(lock, fcntl.LOCK_EX)
        os.kill(os.getpid(), signal.SIGTERM)

    def _wait_for_predecessor(self, is_ready: Callable[[], bool]) -> None:
        # A server whose keeper was killed is about to end (parent-death signal).
        give_up_at = time.monotonic() + START_RETRY_SECONDS
        while is_ready():
            if time.monotonic() > give_up_at:
                raise EmbeddedServiceError(f"another {self._name} already runs on this data directory")
            time.sleep(0.05)


def spawn(
    command: Sequence[str], *, cwd: Path, account: pwd.struct_passwd | None, death_signal: signal.Signals
) -> subprocess.Popen[bytes]:
    libc = ctypes.CDLL(None)

    def die_with_parent() -> None:  # after the change of account, which would clear it
        if sys.platform == "linux":
            libc.prctl(PR_SET_PDEATHSIG, int(death_signal))

    return subprocess.Popen(
        command,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        preexec_fn=die_with_parent,
        user=account.pw_uid if account else None,
        group=account.pw_gid if account else None,
        extra_groups=[] if account else None,
    )


def run_or_explain(
    command: Sequence[str], *, account: pwd.struct_passwd | None = None, cwd: Path | None = None, text: str = ""
) -> None:
    done = subprocess.run(
        command,
        cwd=cwd,
        input=text,
        capture_output=True,
        text=True,
        check=False,
        user=account.pw_uid if account else None,
        group=account.pw_gid if account else None,
        extra_groups=[] if account else None,
    )
    if done.returncode:
        output = (done.stderr or done.stdout).strip()
        raise EmbeddedServiceError(f"{Path(command[0]).name} failed with code {done.returncode}: {output}")


def postgres_account() -> pwd.struct_passwd | None:
    """Return None for our own account, or PostgreSQL's system account if we are root, created if missing."""
    if os.getuid() != 0:
        return None
    with suppress(KeyError):
        return pwd.getpwnam(POSTGRES_ACCOUNT)
    try:
        _create_postgres_account()
    except EmbeddedServiceError:
        with suppress(KeyError):  # another process has created it meanwhile
            return pwd.getpwnam(POSTGRES_ACCOUNT)
        raise
    return pwd.getpwnam(POSTGRES_ACCOUNT)


def _create_postgres_account() -> None:
    # Debian's `su` without `-` keeps a path that lacks the administrator's programs.
    program = shutil.which("useradd", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
    if program is None:
        raise EmbeddedServiceError(
            f"PostgreSQL does not run as root, and there is no useradd to create the account {POSTGRES_ACCOUNT}. "
            "Create it, run Anneal as another user, or set the five DATABASE_…_URL and REDIS_URL."
        )
    run_or_explain(
        [program, "--system", "--user-group", "--no-create-home", "--shell=/usr/sbin/nologin", POSTGRES_ACCOUNT]
    )


def package_dir(name: str) -> Path:
    # The package itself is not imported: on import it warns and looks for its own runtime directory.
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise EmbeddedServiceError(
            f"the package {name} is not installed: run `make setup`, or set the five DATABASE_…_URL and REDIS_URL"
        )
    return Path(spec.origin).parent


def locked(path: Path, kind: int) -> IO[str]:
    file = path.open("a+")  # NFS wants a file that is open for reading for a shared lock
    fcntl.flock(file, kind)
    return file
