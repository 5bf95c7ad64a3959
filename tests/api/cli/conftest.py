"""The command line in this process: its calls go to the application, inside the test's own transaction."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from anneal import api, session, watching
from anneal.app import app
from typer.testing import CliRunner

from apps.accounts.operations import IssuedKey
from tests.support.sdk import InProcess

ADDRESS = "http://testserver"


@dataclass(frozen=True)
class Outcome:
    exit_code: int
    output: str
    errors: str

    @property
    def json(self) -> Any:
        return json.loads(self.output)


class Network(httpx.BaseTransport):
    """Carries calls to the application, and keeps them. `cut` decides which ones find no connection."""

    def __init__(self) -> None:
        self.inner: httpx.BaseTransport = InProcess()
        self.calls: list[httpx.Request] = []
        self.cut: Callable[[httpx.Request], bool] = lambda request: False

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.calls.append(request)
        if self.cut(request):
            raise httpx.ConnectError("no route to host")
        return self.inner.handle_request(request)

    def paths(self, method: str) -> list[str]:
        return [call.url.path for call in self.calls if call.method == method]


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    """Replace the network, and the waits for it."""
    network = Network()
    monkeypatch.setattr(session, "transport", network)
    monkeypatch.setattr(api, "_back_off", lambda attempt: 0.0)
    monkeypatch.setattr(watching, "_SECONDS", 0.0)
    return network


@pytest.fixture
def anneal(network: Network, tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., Outcome]:
    """Run a command with Acme's key in the environment; `key=None` leaves it out."""

    def run(*words: str, answer: str | None = None, key: str | None = "", address: str | None = ADDRESS) -> Outcome:
        if key == "":
            issued: IssuedKey = request.getfixturevalue("key")
            key = issued.secret
        environment = {"ANNEAL_API_KEY": key, "ANNEAL_BASE_URL": address, "XDG_CONFIG_HOME": str(tmp_path / "home")}
        done = CliRunner().invoke(app, list(words), input=answer, env=environment)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return Outcome(done.exit_code, done.stdout, done.stderr)

    return run
