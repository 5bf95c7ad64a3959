"""deploy/redis as an external server has it: started by its script, reached by TCP and password."""

import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from apps.core import embedded

START = embedded.REPOSITORY / "deploy/redis/start.sh"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    data = tmp_path_factory.mktemp("redis")
    variables = {
        "PATH": "/usr/bin:/bin",
        "DATA_DIR": str(data),
        "SERVER": str(embedded.redis_server()),
        "CONTROL_PASSWORD": "control-password",
        "TRAINER_PASSWORD": "trainer-password",
    }
    command = ["sh", START, "--port", "0", "--unixsocket", str(data / "s"), "--bind", "127.0.0.1"]
    server = subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL)
    give_up_at = time.monotonic() + 60
    while not is_listening(data / "s"):
        assert time.monotonic() < give_up_at, "Redis did not start"
        time.sleep(0.02)
    yield str(data / "s")
    server.terminate()
    server.wait()


def is_listening(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def connect(address: str, user: str | None, password: str | None) -> redis.Redis:
    return redis.Redis(unix_socket_path=address, username=user, password=password, retry=Retry(NoBackoff(), 0))


def test_nobody_enters_without_a_password(address: str) -> None:
    client = connect(address, None, None)

    with pytest.raises(redis.exceptions.AuthenticationError):
        client.ping()
    client.close()


def test_the_control_plane_has_queues_streams_locks_and_subscriptions_but_no_administration(address: str) -> None:
    client = connect(address, "anneal_control", "control-password")

    client.lpush("anneal:control", "task")
    client.xadd("live", {"step": 1})
    client.publish("live", "x")
    with client.lock("leader", timeout=5):
        pass
    for command in (("FLUSHALL",), ("CONFIG", "GET", "dir"), ("KEYS", "*"), ("ACL", "LIST"), ("SHUTDOWN",)):
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.execute_command(*command)
    client.close()


def test_a_trainer_takes_from_its_queue_only(address: str) -> None:
    control = connect(address, "anneal_control", "control-password")
    trainer = connect(address, "anneal_trainer", "trainer-password")
    control.lpush("anneal:train.gpu", "wake")

    assert trainer.brpop(["anneal:train.gpu"], timeout=1) == (b"anneal:train.gpu", b"wake")
    with pytest.raises(redis.exceptions.NoPermissionError):
        trainer.lpush("anneal:control", "a task of its own making")
    control.close()
    trainer.close()
