"""The embedded PostgreSQL and Redis: private, restricted, shared between processes, back after kill -9."""

import fcntl
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg
import pytest
import redis

from scripts import embedded
from scripts.embedded import EmbeddedServiceError, EmbeddedServices, ensure_running, servers
from tests.services.ports import free_port
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServices]:
    with ensure_running(tmp_path_factory.mktemp("embedded"), durable=False) as services:
        yield services


@pytest.fixture
def restored_signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def postmaster_pid(data_dir: Path) -> int:
    return int((data_dir / "postgres/postmaster.pid").read_text().splitlines()[0])


def is_alive(pid: int) -> bool:
    # A zombie waits for its parent and serves no client.
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_no_role_used_at_run_time_escapes_row_level_security(running: EmbeddedServices) -> None:
    question = "SELECT rolname, rolsuper OR rolbypassrls OR rolcreaterole FROM pg_roles WHERE rolname = current_user"

    for role in embedded.ROLES:
        with psycopg.connect(running.database_url(role)) as connection:
            assert connection.execute(question).fetchone() == (f"anneal_{role}", False)


@pytest.mark.slow
def test_the_web_role_becomes_the_system_role_only_by_asking(running: EmbeddedServices) -> None:
    with psycopg.connect(running.database_url("sys")) as connection:
        inherits = (
            "SELECT pg_has_role('anneal_app', 'anneal_sys', 'USAGE'), pg_has_role('anneal_app', 'anneal_sys', 'SET')"
        )
        assert connection.execute(inherits).fetchone() == (False, True)

    with psycopg.connect(running.database_url("app")) as connection:
        connection.execute("SET LOCAL ROLE anneal_sys")
        assert connection.execute("SELECT current_user").fetchone() == ("anneal_sys",)
        connection.commit()
        assert connection.execute("SELECT current_user").fetchone() == ("anneal_app",)


@pytest.mark.parametrize("role", ["app", "sys", "internal", "gateway"])
def test_only_the_owner_makes_tables(running: EmbeddedServices, role: embedded.Role) -> None:
    with (
        psycopg.connect(running.database_url(role)) as connection,
        pytest.raises(psycopg.errors.InsufficientPrivilege, match="schema public"),
    ):
        connection.execute("CREATE TABLE intruder (id int)")


def test_the_trainer_consumes_its_queue_and_reaches_nothing_else(running: EmbeddedServices) -> None:
    control = redis.Redis.from_url(running.redis_url)
    trainer = redis.Redis(
        unix_socket_path=running.redis_socket, username="anneal_trainer", password=running.trainer_password
    )
    control.lpush("anneal:train.cpu", "wake")

    assert trainer.brpop(["anneal:train.cpu"], timeout=1) == (b"anneal:train.cpu", b"wake")
    forbidden: list[tuple[str, ...]] = [
        ("LPUSH", "anneal:control", "task"),
        ("BRPOP", "anneal:control", "1"),
        ("GET", "session"),
        ("EVAL", "return 1", "0"),
        ("PUBLISH", "live", "x"),
        ("KEYS", "*"),
        ("CONFIG", "GET", "dir"),
        ("ACL", "LIST"),
    ]
    for command in forbidden:
        with pytest.raises(redis.exceptions.NoPermissionError):
            trainer.execute_command(*command)
    control.close()
    trainer.close()


def test_nothing_listens_on_the_network_and_sockets_are_private(running: EmbeddedServices) -> None:
    socket_dirs = [Path(running.postgres_socket_dir), Path(running.redis_socket).parent]

    assert [path.stat().st_mode & 0o777 for path in socket_dirs] == [0o700, 0o700]
    assert Path(running.redis_socket).stat().st_mode & 0o777 == 0o600
    with psycopg.connect(running.database_url("sys")) as connection:
        assert connection.execute("SHOW listen_addresses").fetchone() == ("",)
    client = redis.Redis.from_url(running.redis_url)
    assert client.config_get("port") == {"port": "0"} or client.config_get("port") == {b"port": b"0"}
    assert client.info("memory")["maxmemory_policy"] == "noeviction"
    client.close()


def test_a_second_server_on_the_same_directory_is_refused(
    running: EmbeddedServices, monkeypatch: pytest.MonkeyPatch, restored_signals: None
) -> None:
    monkeypatch.setattr(servers, "START_RETRY_SECONDS", 0.1)

    with pytest.raises(EmbeddedServiceError, match="another Redis already runs"):
        embedded.serve_redis(Path(running.data_dir))
    with pytest.raises(EmbeddedServiceError, match="another PostgreSQL already runs"):
        embedded.serve_postgres(Path(running.data_dir))


@pytest.mark.slow
def test_servers_outlive_their_starter_while_another_process_uses_them_and_stop_when_it_is_killed(
    tmp_path: Path,
) -> None:
    program = "import sys, time; from pathlib import Path; from scripts.embedded import ensure_running\n"
    program += "with ensure_running(Path(sys.argv[1]), durable=False): print('holding', flush=True); time.sleep(600)"
    with ensure_running(tmp_path, durable=False) as services:
        pid = postmaster_pid(tmp_path)
        other = subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path)], cwd=embedded.REPOSITORY, stdout=subprocess.PIPE
        )
        assert other.stdout and other.stdout.readline() == b"holding\n"

    psycopg.connect(services.database_url("app")).close()
    assert postmaster_pid(tmp_path) == pid

    other.kill()
    other.communicate()
    wait_until(lambda: not is_alive(pid))
    wait_until(lambda: not Path(services.redis_socket).exists())


@pytest.mark.slow
def test_acknowledged_rows_survive_kill_9_and_the_next_start_is_patient(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    with ensure_running(data_dir) as services:
        with psycopg.connect(services.database_url("owner")) as connection:
            connection.execute("CREATE TABLE kept (id int)")
            connection.execute("INSERT INTO kept SELECT generate_series(1, 1000)")
        os.kill(postmaster_pid(data_dir), signal.SIGKILL)
    tmp_path.chmod(0o700)  # if we are root, PostgreSQL's own account cannot walk through it now

    with (
        ensure_running(data_dir) as services,
        psycopg.connect(services.database_url("owner")) as connection,
    ):
        assert connection.execute("SELECT count(*) FROM kept").fetchone() == (1000,)


KILLS, WRITERS = 5, 4


@contextmanager
def writing(url: str, kill: int, acknowledged: set[str]) -> Iterator[None]:
    """Have threads insert rows, and note each that the server acknowledges, until it is gone."""

    def write(writer: int) -> None:
        with suppress(psycopg.OperationalError), psycopg.connect(url, autocommit=True) as connection:
            for number in itertools.count():
                name = f"{kill}:{writer}:{number}"
                connection.execute("INSERT INTO kept VALUES (%s)", [name])
                acknowledged.add(name)

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(WRITERS)]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.slow
def test_no_acknowledged_row_is_lost_if_the_server_is_killed_under_load(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """The seed decides after how many rows. What the operating system has not written survives too: it runs on."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")  # noqa: T201 - pytest shows it after a failure
    chance, acknowledged, seconds = random.Random(seed), set[str](), []
    with ensure_running(tmp_path) as services:  # keeps Redis, so that only PostgreSQL starts again
        with psycopg.connect(services.database_url("owner")) as connection:
            connection.execute("CREATE TABLE kept (name text PRIMARY KEY)")
        for kill in range(KILLS):
            with writing(services.database_url("owner"), kill, acknowledged):
                enough = len(acknowledged) + chance.randint(1, 1_000)
                wait_until(lambda enough=enough: len(acknowledged) >= enough)
                os.kill(postmaster_pid(tmp_path), signal.SIGKILL)
            killed_at = time.monotonic()
            with ensure_running(tmp_path), psycopg.connect(services.database_url("owner")) as connection:
                seconds.append(round(time.monotonic() - killed_at, 2))
                found = {name for (name,) in connection.execute("SELECT name FROM kept")}
            assert acknowledged - found == set()
            assert len(found - acknowledged) <= WRITERS * (kill + 1)  # each had one insert without an answer at most

    record_property("acknowledged_rows", len(acknowledged))
    record_property("seconds_restart", max(seconds))


@pytest.mark.slow
def test_a_lock_file_that_names_an_unrelated_process_does_not_stop_the_start(tmp_path: Path) -> None:
    with ensure_running(tmp_path, durable=False) as services:
        left_over = Path(services.postgres_socket_dir, ".s.PGSQL.5432.lock").read_text()
    lines = left_over.splitlines()
    lines[0] = str(os.getpid())
    (tmp_path / "postgres/postmaster.pid").write_text("\n".join(lines) + "\n")
    Path(services.postgres_socket_dir, ".s.PGSQL.5432.lock").write_text("\n".join(lines) + "\n")

    with ensure_running(tmp_path, durable=False) as services:
        psycopg.connect(services.database_url("app")).close()


@pytest.mark.slow
def test_sigterm_shuts_postgres_down_at_once_although_a_client_is_connected(tmp_path: Path) -> None:
    services = embedded.services(tmp_path)
    server = subprocess.Popen(
        [sys.executable, "-m", "scripts.embedded", "postgres", "--data-dir", str(tmp_path), "--not-durable"],
        cwd=embedded.REPOSITORY,
        stderr=subprocess.DEVNULL,
    )
    wait_until(lambda: embedded.is_postgres_ready(services))
    with psycopg.connect(services.database_url("app")):
        server.terminate()

        assert server.wait(timeout=60) == 0  # a shutdown that waits for clients would never end


@pytest.mark.slow
def test_a_loopback_port_asks_for_the_password_of_the_role(tmp_path: Path) -> None:
    port = free_port()
    with ensure_running(tmp_path, durable=False, tcp_port=port):
        place = {"host": "127.0.0.1", "port": port, "dbname": "anneal", "user": "anneal_app"}
        psycopg.connect(**place, password=embedded.tcp_passwords(tmp_path)["app"]).close()
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            psycopg.connect(**place, password="guess")


def test_a_shared_lock_is_taken_on_a_readable_file(tmp_path: Path) -> None:
    """NFS refuses it on one that is open for writing only."""
    with servers.locked(tmp_path / "users.lock", fcntl.LOCK_SH) as file:
        assert file.readable() and file.writable()


def test_a_path_too_long_or_too_odd_for_a_socket_moves_to_a_private_short_one(tmp_path: Path) -> None:
    assert embedded.runtime_dir(Path("/srv/anneal")) == Path("/srv/anneal/run")
    for awkward in (tmp_path / ("deep" * 25), tmp_path / 'ä "b'):
        services = embedded.services(awkward)

        assert services.runtime_dir.startswith(f"/tmp/anneal-{os.getuid()}-")
        assert len(f"{services.postgres_socket_dir}/.s.PGSQL.5432.lock") <= 107
        assert Path(services.postgres_socket_dir).stat().st_mode & 0o777 == 0o700
        shutil.rmtree(services.runtime_dir)


def test_a_runtime_directory_prepared_by_another_account_is_refused() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # a longer path would be left for one under /tmp
        data = Path(short) / "data"
        data.mkdir()
        (Path(short) / "elsewhere").mkdir()
        (data / "run").symlink_to(Path(short) / "elsewhere")

        with pytest.raises(EmbeddedServiceError, match="belongs to another account"):
            embedded.services(data)
