"""Clients of a platform on this machine go around the proxy that the environment names, which cannot reach it."""

import json
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from anneal.api import Api

from demo.main_job import platform as main_job
from tests.e2e import platform as e2e
from tests.services.ports import free_port


class Anyone(BaseHTTPRequestHandler):
    """A platform with an empty list at each address."""

    def do_GET(self) -> None:
        body = b'{"object": "list", "data": []}'
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *parts: object) -> None:
        pass


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a platform that answers, in an environment with a proxy that does not."""
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), Anyone) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        for name in ("ready.json", "ports.json"):
            (tmp_path / name).write_text(json.dumps({"public_url": url}))
        account = {"api_key": "ann_live_x", "base_model": "demo", "pool": "local-cpu"}
        (tmp_path / "demo.json").write_text(json.dumps(account))
        yield tmp_path
        server.shutdown()


def test_the_main_job_goes_around_a_proxy(home: Path) -> None:
    platform = main_job.Platform(home)
    platform.openai.max_retries = 0

    assert platform.openai.models.list().data == []


def test_the_tests_of_the_whole_platform_go_around_a_proxy(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = SimpleNamespace(poll=lambda: None, send_signal=lambda number: None, wait=lambda timeout: 0)
    monkeypatch.setattr(e2e, "subprocess", SimpleNamespace(Popen=lambda *_, **__: launcher, STDOUT=subprocess.STDOUT))
    platform = e2e.Platform(home)
    platform.client.max_retries = 0

    assert platform.client.models.list().data == []
    assert platform.native.get("/pools").status_code == 200
    platform.stop()


def test_the_command_line_goes_around_a_proxy(home: Path) -> None:
    url = json.loads((home / "ports.json").read_text())["public_url"]
    api = Api(url, "ann_live_x")
    api.attempts = 1

    assert api.get("/v1/models")["data"] == []
    api.close()
