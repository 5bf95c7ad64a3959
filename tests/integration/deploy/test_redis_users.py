"""deploy/redis as an external server has it: started by its script, reached by TCP and password."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from kombu import Connection
from redis.backoff import NoBackoff
from redis.retry import Retry

from apps.config.celery import app as celery
from scripts import embedded
from tests.support.waiting import wait_until

START = embedded.REPOSITORY / "deploy/redis/start.sh"
TAKE_DOORBELL = """
from gpu_workers.trainer.celery_app import app

with app.connection_for_read() as connection, connection.SimpleQueue(app.amqp.queues["train.gpu"]) as queue:
    message = queue.get(timeout=30)
    message.ack()
    print(message.headers["task"])
"""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    data = tmp_path_factory.mktemp("redis")
    variables = {
        "PATH": "/usr/bin:/bin",
        "DATA_DIR": str(data),
        "SERVER": str(embedded.redis_server()),
        "CONTROL_PASSWORD": "control-password",
        "TRAINER_POOL": "gpu",
        "TRAINER_PASSWORD": "trainer-password",
        "OTHER_TRAINERS": "h100:h100-password l4_spot:l4-password",
    }
    command = ["sh", START, "--port", "0", "--unixsocket", str(data / "s"), "--bind", "127.0.0.1"]
    server = subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL)
    wait_until(lambda: is_listening(data / "s"), "Redis did not start")
    yield str(data / "s")
    server.terminate()
    server.wait()


def is_listening(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def broker_url(address: str, role: str) -> str:
    return f"redis+socket://anneal_{role}:{role}-password@{address}"


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
    assert client.register_script("return 7")() == 7  # as the libraries send theirs
    refused = [
        ("FLUSHALL",),
        ("CONFIG", "GET", "dir"),
        ("KEYS", "*"),
        ("ACL", "LIST"),
        ("SHUTDOWN",),
        ("CLIENT", "LIST"),
    ]
    refused += [("EVAL", "return 1", "0"), ("FUNCTION", "LIST"), ("SCRIPT", "FLUSH"), ("CLIENT", "KILL", "ID", "1")]
    for command in refused:
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


@pytest.mark.slow
def test_the_trainers_own_settings_take_a_doorbell_with_that_access(address: str, tmp_path: Path) -> None:
    with Connection(broker_url(address, "control")) as control:
        control.transport_options = celery.conf.broker_transport_options
        celery.send_task("train.wake", queue="train.gpu", connection=control)
    environment = {
        "PATH": "/usr/bin:/bin",
        "CELERY_BROKER_URL": broker_url(address, "trainer"),
        "ANNEAL_BROKER_KEY_PREFIX": "anneal:",
        "ANNEAL_INTERNAL_URL": "http://127.0.0.1:1",
        "ANNEAL_WORK_DIR": str(tmp_path),
        "ANNEAL_POOL": "gpu",
    }

    ran = subprocess.run(
        [sys.executable, "-c", TAKE_DOORBELL],
        cwd=embedded.REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert ran.stdout == "train.wake\n", ran.stderr


@pytest.mark.parametrize(
    ("user", "password", "own", "others"),
    [
        ("anneal_trainer", "trainer-password", "gpu", ["h100", "l4_spot", "gpu2", "g", "gpu.h100"]),
        ("anneal_trainer_h100", "h100-password", "h100", ["gpu", "l4_spot", "h100b"]),
        ("anneal_trainer_l4_spot", "l4-password", "l4_spot", ["gpu", "h100", "l4"]),
    ],
)
def test_a_pools_trainers_reach_the_doorbells_of_their_pool_alone(
    address: str, user: str, password: str, own: str, others: list[str]
) -> None:
    trainer = connect(address, user, password)

    trainer.lpush(f"anneal:train.{own}", "wake")
    assert trainer.rpop(f"anneal:train.{own}") == b"wake"
    trainer.sadd(f"anneal:_kombu.binding.train.{own}", "binding")
    stolen = [("RPOP", f"anneal:train.{pool}") for pool in others]
    stolen += [("LPUSH", f"anneal:train.{pool}", "x") for pool in others]
    stolen += [("SADD", f"anneal:_kombu.binding.train.{pool}", "x") for pool in others]
    stolen += [
        ("CLIENT", "LIST"),
        ("CLIENT", "KILL", "ID", "1"),
        ("CLIENT", "PAUSE", "1000"),
        ("CLIENT", "NO-EVICT", "on"),
    ]
    stolen += [
        ("EVAL", "return 1", "0"),
        ("PUBLISH", "live", "x"),
        ("SUBSCRIBE", "live"),
        ("SCRIPT", "LOAD", "return 1"),
    ]
    stolen += [("DEL", f"anneal:train.{own}"), ("SCAN", "0"), ("MONITOR",), ("CONFIG", "GET", "dir"), ("ACL", "WHOAMI")]
    for command in stolen:
        with pytest.raises(redis.exceptions.NoPermissionError):
            trainer.execute_command(*command)
    trainer.close()


def test_a_pool_whose_name_is_a_pattern_ends_the_start(tmp_path: Path) -> None:
    variables = {"PATH": "/usr/bin:/bin", "DATA_DIR": str(tmp_path), "SERVER": "true", "CONTROL_PASSWORD": "a"}
    variables |= {"TRAINER_POOL": "*", "TRAINER_PASSWORD": "b"}

    ended = subprocess.run(["sh", START], env=variables, capture_output=True, text=True, check=False)

    assert ended.returncode != 0 and "no pool's name" in ended.stderr
