"""The command line in this process: its calls go to the application, inside the test's own transaction."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from anneal import api, session, watching
from anneal.app import app
from anneal.commands import files
from typer.testing import CliRunner

from apps.accounts.login.key_operations import IssuedKey
from apps.datasets.models import DatasetVersion, TokenCount
from apps.datasets.tasks import validate
from tests.factories.finetuning import TrainingSetup
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
    """Carries calls to the application, and keeps them. `cut` decides which ones find no connection.

    While it `is_forgetful`, it carries out every call, and loses the answer to the first POST of each address.
    """

    def __init__(self) -> None:
        self.inner: httpx.BaseTransport = InProcess()
        self.calls: list[httpx.Request] = []
        self.cut: Callable[[httpx.Request], bool] = lambda request: False
        self.is_forgetful, self.lost = False, set[str]()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.calls.append(request)
        if self.cut(request):
            raise httpx.ConnectError("no route to host")
        answer = self.inner.handle_request(request)
        if self.is_forgetful and request.method == "POST" and request.url.path not in self.lost:
            self.lost.add(request.url.path)
            raise httpx.ReadError("the connection broke")
        return answer

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

    def run(
        *words: str,
        answer: str | bytes | None = None,
        key: str | None = "",
        address: str | None = ADDRESS,
        charset: str = "utf-8",
    ) -> Outcome:
        if key == "":
            issued: IssuedKey = request.getfixturevalue("key")
            key = issued.secret
        environment = {"ANNEAL_API_KEY": key, "ANNEAL_BASE_URL": address, "XDG_CONFIG_HOME": str(tmp_path / "home")}
        done = CliRunner(charset).invoke(app, list(words), input=answer, env=environment)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return Outcome(done.exit_code, done.stdout, done.stderr)

    return run


@pytest.fixture
def model(floor, claim) -> str:
    job = floor.job(suffix="triage")
    claim().start().succeed(floor.base_model)
    job.refresh_from_db()
    return job.adapter_version.model_name


@pytest.fixture
def checking_server(floor: TrainingSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the server check files, and count their tokens, while a command waits for it."""

    def check(seconds: float) -> None:
        for version in DatasetVersion.objects.filter(status="uploaded"):
            validate(version.pk)
            TokenCount.objects.get_or_create(
                version=version, base_model=floor.base_model, organization=floor.organization,
                defaults={
                    "chat_template_sha256": floor.base_model.chat_template_sha256, "tokens": 240,
                    "trained_tokens": 60, "longest_row_tokens": 20, "histogram": [[20, 12]], "starts": [[16, 16, 12]],
                },
            )  # fmt: skip

    monkeypatch.setattr(files, "time", SimpleNamespace(sleep=check))
