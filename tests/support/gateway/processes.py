"""The gateway as its own process under its own database role, before a scripted engine and a small world of tenants."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import openai
import pytest

from apps.accounts.login.key_operations import IssuedKey
from apps.billing.models import UsageEvent
from apps.billing.usage.traffic import Refusal
from tests.factories.serving import Tenant, World
from tests.support.database import database_url, empty_database
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[3]
MEDIA_HOST = "images.example.com"
HI = [{"role": "user", "content": "Hi"}]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


class GatewayProcess:
    """One gateway on a Unix socket."""

    def __init__(
        self,
        home: Path,
        *,
        name: str = "gateway",
        engines: Path | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """`engines` is the folder of the engines' sockets, by default `home`."""
        self._variables = dict(variables or {})
        self.home = home
        self.engines = (engines or home).resolve()
        self.name = name
        self.socket = home / f"{name}.sock"
        self._process: subprocess.Popen[bytes] | None = None
        self._clients: list[httpx.Client] = []

    def start(self) -> None:
        self.socket.unlink(missing_ok=True)  # a killed process leaves it
        command = [
            sys.executable,
            "-m",
            "uvicorn",
            "--factory",
            "apps.interfaces.gateway.app:create_app",
            "--uds",
            self.socket,
        ]
        command += [
            "--loop",
            "uvloop",
            "--http",
            "apps.interfaces.gateway.http.connections:GatewayConnection",
            "--no-access-log",
        ]
        command += ["--log-level", "warning"]
        environ = os.environ | {"ANNEAL_HOME": str(self.home), "DATABASE_URL": database_url("gateway")}
        environ["ANNEAL_REPLICA_ADDRESSES"] = f"unix://{self.engines}"
        environ["ANNEAL_MEDIA_HOSTS"] = MEDIA_HOST
        environ["DJANGO_SETTINGS_MODULE"] = "apps.config.settings.dev"
        environ |= self._variables
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

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def log(self) -> str:
        return (self.home / f"{self.name}.log").read_text()

    def kill(self) -> None:
        """Kill it as a crash would: nothing is flushed, and its recorder ends by itself."""
        if self._process is None:
            return
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
        transport = httpx.HTTPTransport(uds=str(self.socket), verify=False)  # a socket needs no certificates
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
def running_gateway(
    home: Path, *, engines: Path | None = None, variables: Mapping[str, str] | None = None
) -> Iterator[GatewayProcess]:
    gateway = GatewayProcess(home, engines=engines, variables=variables)
    try:
        gateway.start()  # Ctrl-C may come while it starts
        yield gateway
    finally:
        gateway.close_clients()
        gateway.kill()


def is_alive(pid: int) -> bool:
    """Tell whether one of its threads lives: until the last one ended its locks are held."""
    states = []
    for thread in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            states.append(thread.read_text().rpartition(")")[2].split()[0])
    return bool(set(states) - {"Z", "X"})


def error_of(response: httpx.Response) -> dict:
    return response.json()["error"]


def wait_until_known(gateway: GatewayProcess, world: World, *names: str) -> None:
    """Wait until the gateway has heard of these models, of which no replica hears."""
    http = gateway.http(world.acme.key)
    for name in names:
        asked = {"model": name, "input": "Hi"}
        wait_until(lambda asked=asked: http.post("/v1/embeddings", json=asked).status_code == 400, f"{name} is unknown")


def usage_of(tenant: Tenant) -> list[UsageEvent]:
    """Return the organization's metered requests, without the counts of those refused before an engine saw them."""
    events = UsageEvent.objects.filter(organization=tenant.organization).exclude(finish__in=list(Refusal), slice_id="")
    return list(events.order_by("occurred_at", "id"))


def wait_for_usage(tenant: Tenant, count: int) -> list[UsageEvent]:
    """Return the organization's usage once `count` requests are in the database."""
    return wait_until(lambda: len(found := usage_of(tenant)) >= count and found, f"{count} requests were not recorded")


@pytest.fixture(name="_django_db_helper")
def no_transaction() -> None:
    """Neither a transaction around each test nor a flush after it."""


@pytest.fixture(name="_database", scope="module", autouse=True)
def committed_database(django_db_setup, django_db_blocker) -> Iterator[None]:
    with django_db_blocker.unblock():
        yield
        empty_database()
