"""The gateway as its own process under its own database role, before a scripted engine and a small world of tenants."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import httpx
import openai
from django.db import connection, transaction

from apps.accounts.models import Organization, User
from apps.accounts.operations import IssuedKey
from apps.adapters.models import Adapter, AdapterVersion
from apps.billing.models import UsageEvent
from apps.billing.operations import grant_credit
from apps.catalog.models import BaseModel
from apps.catalog.operations import set_price
from apps.core.clock import db_now
from apps.core.ids import new_id, new_ulid
from apps.core.sealing import place_of, seal
from apps.serving.models import Deployment, LoadedAdapter, Replica
from apps.serving.whole_models import give_place
from tests.api.gateway.scripted_engine import TOKEN
from tests.factories.accounts import make_key, make_organization, make_user

ROOT = Path(__file__).resolve().parents[3]
USD = 1_000_000_000
INPUT_NANO, OUTPUT_NANO, PER = 50_000_000, 200_000_000, 1_000_000
BASE_MODEL = "tiny"
CONTEXT_LENGTH = 512
MEDIA_HOST = "images.example.com"
HI = [{"role": "user", "content": "Hi"}]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


class GatewayProcess:
    """One gateway on a Unix socket."""

    def __init__(self, home: Path, *, name: str = "gateway") -> None:
        self.home = home
        self.name = name
        self.socket = home / f"{name}.sock"
        self._process: subprocess.Popen[bytes] | None = None
        self._clients: list[httpx.Client] = []

    def start(self) -> None:
        self.socket.unlink(missing_ok=True)  # a killed process leaves it
        command = [sys.executable, "-m", "uvicorn", "--factory", "apps.gateway.app:create_app", "--uds", self.socket]
        command += ["--loop", "uvloop", "--http", "apps.gateway.connections:Connection", "--no-access-log"]
        command += ["--log-level", "warning"]
        environ = os.environ | {"ANNEAL_HOME": str(self.home), "DATABASE_URL": _gateway_database_url()}
        environ["ANNEAL_MEDIA_HOSTS"] = MEDIA_HOST
        environ["DJANGO_SETTINGS_MODULE"] = "apps.config.settings.dev"
        with (self.home / f"{self.name}.log").open("ab") as log:
            self._process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=log, stderr=log)
        wait_until(self._is_up, "the gateway did not start", seconds=120)

    def _is_up(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log()
        return self.is_listening()

    def is_listening(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(self.socket)) == 0

    def log(self) -> str:
        return (self.home / f"{self.name}.log").read_text()

    def kill(self) -> None:
        """Kill it as a crash would: nothing is flushed, and its recorder ends by itself."""
        assert self._process is not None
        recorders = self.recorder_pids()
        self._process.kill()
        self._process.wait()
        wait_until(lambda: not any(is_alive(pid) for pid in recorders), "the recorder outlived its gateway")

    def kill_recorder(self) -> None:
        """Kill the process that writes and ships; the gateway ends by itself."""
        for pid in self.recorder_pids():
            os.kill(pid, signal.SIGKILL)
        self.wait()

    def recorder_pids(self) -> list[int]:
        assert self._process is not None
        children = Path(f"/proc/{self._process.pid}/task").glob("*/children")
        try:
            return [int(pid) for path in children for pid in path.read_text().split()]
        except FileNotFoundError:
            return []  # it is dead

    def stop(self) -> int:
        self.terminate()
        return self.wait()

    def terminate(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        assert self._process is not None
        return self._process.wait(timeout=60)

    def http(self, key: IssuedKey | str | None = None) -> httpx.Client:
        secret = key.secret if isinstance(key, IssuedKey) else key
        return self._client(headers={"Authorization": f"Bearer {secret}"} if secret else {})

    def openai(self, key: IssuedKey, **options: object) -> openai.OpenAI:
        options = {"max_retries": 0} | options
        return openai.OpenAI(api_key=key.secret, base_url="http://gateway/v1", http_client=self._client(), **options)

    def _client(self, **options: object) -> httpx.Client:
        transport = httpx.HTTPTransport(uds=str(self.socket))
        client = httpx.Client(transport=transport, base_url="http://gateway", timeout=20, **options)
        self._clients.append(client)
        return client

    @contextmanager
    def left(self, key: IssuedKey, path: str, body: dict[str, object]) -> Iterator[None]:
        """Ask, and leave without a word at the end of the block."""
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key.secret}\r\n"
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self.socket))
            connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
            yield

    def close_clients(self) -> None:
        while self._clients:
            self._clients.pop().close()

    def leftovers(self) -> dict[Path, bytes]:
        """Return the files of the spool that hold entries, none of which another gateway took up meanwhile."""
        found = {}
        for folder, _, names in os.walk(self.home / "spool"):
            for path in (Path(folder) / name for name in names if name.endswith((".open", ".seg"))):
                with suppress(FileNotFoundError):
                    found[path] = path.read_bytes().rstrip(b"\0")
        return {path: content for path, content in found.items() if content}


@contextmanager
def running_gateway(home: Path) -> Iterator[GatewayProcess]:
    gateway = GatewayProcess(home)
    gateway.start()
    try:
        yield gateway
    finally:
        gateway.close_clients()
        gateway.kill()


def _gateway_database_url() -> str:
    """The database of this test run, entered under the gateway's narrow role."""
    parts = urlsplit(os.environ["DATABASE_URL"])
    host = parts.netloc.replace("anneal_owner", "anneal_gateway")
    return urlunsplit(parts._replace(netloc=host, path=f"/{connection.settings_dict['NAME']}"))


def is_alive(pid: int) -> bool:
    """Tell whether one of its threads lives: until the last one ended its locks are held."""
    states = []
    for thread in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            states.append(thread.read_text().rpartition(")")[2].split()[0])
    return bool(set(states) - {"Z", "X"})


def wait_until(is_so, complaint: str, *, seconds: float = 60):
    deadline = time.monotonic() + seconds
    while not (found := is_so()):
        assert time.monotonic() < deadline, complaint
        time.sleep(0.02)
    return found


# --- Who asks and what is served --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tenant:
    owner: User
    organization: Organization
    key: IssuedKey
    model_name: str
    lora_name: str


@dataclass(frozen=True)
class World:
    base_model: BaseModel
    acme: Tenant
    rival: Tenant


def make_world(engine_url: str) -> World:
    base_model = make_served_model(BASE_MODEL, engine_url)
    return World(base_model, make_tenant("Acme", base_model), make_tenant("Rival", base_model))


@transaction.atomic  # a gateway at work reads all of it or nothing
def make_served_model(name: str, *engine_urls: str, is_priced: bool = True, **config: object) -> BaseModel:
    base_model = BaseModel.objects.create(
        name=name, display_name=name, parameter_count=1, context_length=CONTEXT_LENGTH, is_installed=True, config=config
    )
    for url in engine_urls:
        make_replica(base_model, url)
    if is_priced:
        for way, nano in (("input", INPUT_NANO), ("output", OUTPUT_NANO)):
            set_price(sku=f"inference:{way}:{name}", unit="tokens", price_nano=nano, per=PER, by="system", now=db_now())
    return base_model


def make_replica(base_model: BaseModel, url: str) -> Replica:
    """A replica that was heard of just now, and stays so for the test."""
    replica_id = new_id("rep")
    token = seal(TOKEN, place=place_of(table="serving_replica", column="token_sealed", row_id=replica_id))
    return Replica.objects.create(
        id=replica_id,
        base_model=base_model,
        url=url,
        token_sealed=token,
        is_ready=True,
        observed_at="2100-01-01T00:00Z",
    )


def make_tenant(name: str, base_model: BaseModel, *, credit_nano: int = 10 * USD) -> Tenant:
    owner = make_user(name.lower())
    organization = make_organization(name, owner=owner)
    if credit_nano:
        give_credit(organization, credit_nano)
    version = make_adapter(organization, base_model)
    return Tenant(owner, organization, make_key(organization, owner), version.model_name, version.lora_name)


def give_credit(organization: Organization, amount_nano: int) -> None:
    grant_credit(
        organization=organization, amount_nano=amount_nano, by="system", reason="test", idempotency_key=new_id("grant")
    )


def make_adapter(organization: Organization, base_model: BaseModel) -> AdapterVersion:
    """An adapter that every replica of its base model has loaded."""
    version = make_version(organization, base_model)
    Deployment.objects.create(organization=organization, adapter_version=version)
    for replica in base_model.replicas.all():
        LoadedAdapter.objects.create(
            organization=organization, replica=replica, adapter_version=version, state="loaded"
        )
    return version


def make_version(organization: Organization, base_model: BaseModel, **fields: object) -> AdapterVersion:
    """A version that nothing serves."""
    ulid = new_ulid()
    return AdapterVersion.objects.create(
        organization=organization,
        adapter=Adapter.objects.create(organization=organization, name="bot", base_model=base_model),
        number=1,
        model_name=f"ft:{base_model.name}:{organization.slug}:bot:{ulid[-8:]}",
        lora_name=f"a-{ulid}",
        source="run_test",
        manifest_sha256="0" * 64,
        bytes=1,
        rank=8,
        target_modules=["q_proj"],
        method="lora",
        chat_template_sha256="0" * 64,
        **{"object_prefix": "nowhere", "manifest": {"files": []}} | fields,
    )


def error_of(response: httpx.Response) -> dict:
    return response.json()["error"]


def usage_of(tenant: Tenant) -> list[UsageEvent]:
    return list(UsageEvent.objects.filter(organization=tenant.organization).order_by("occurred_at", "id"))


def wait_for_usage(tenant: Tenant, count: int) -> list[UsageEvent]:
    """Return the organization's usage once `count` requests are in the database."""
    return wait_until(lambda: len(found := usage_of(tenant)) >= count and found, f"{count} requests were not recorded")


def make_whole_model(organization: Organization, base_model: BaseModel) -> AdapterVersion:
    """A result that no engine loads as an adapter, merged: nothing serves it yet."""
    files = [{"name": name, "bytes": 2, "sha256": "0" * 64} for name in ("config.json", "model.safetensors")]
    merged = {"kind": "merged_16bit", "object_prefix": "merged", "manifest": {"files": files}, "bytes": 4}
    return make_version(organization, base_model, status="files_only", exports=[merged])


def dedicate(version: AdapterVersion, url: str) -> Replica:
    """A replica of its own for a whole model, which answers."""
    replica = make_replica(version.adapter.base_model, url)
    Replica.objects.filter(pk=replica.pk).update(whole_model=version)
    give_place(replica=replica, version=version)
    LoadedAdapter.objects.create(
        organization_id=version.organization_id, replica=replica, adapter_version=version, state="loaded"
    )
    replica.refresh_from_db()
    return replica
