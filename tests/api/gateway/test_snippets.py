"""The calls that pages offer for copying work as they are pasted: through the front door, with the key from outside."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn

from apps.interfaces.web.edge.front_door import FrontDoor
from apps.interfaces.web.shell.code_samples import chat_samples
from tests.support.asgi import NO_LIMITS

pytestmark = pytest.mark.django_db


async def _no_dashboard(scope, receive, send) -> None:
    raise AssertionError(f"{scope['path']} is not inference")


@pytest.fixture
def public_url(gateway, settings) -> Iterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    door = FrontDoor(_no_dashboard, gateway_url=f"unix://{gateway.socket}", limits=NO_LIMITS)
    server = uvicorn.Server(uvicorn.Config(door, log_level="warning", timeout_graceful_shutdown=2))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.02)
    settings.PUBLIC_URL = f"http://127.0.0.1:{listener.getsockname()[1]}"
    yield settings.PUBLIC_URL
    server.should_exit = True
    thread.join(timeout=60)
    listener.close()


def test_snippets_answer_as_pasted(public_url, world):
    code = {sample["key"]: sample["code"] for sample in chat_samples(model=world.acme.model_name, prompt="It's me")}
    environ = os.environ | {"ANNEAL_API_KEY": world.acme.key.secret}

    def said(*command: str) -> str:
        ran = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    answer = json.loads(said("bash", "-c", code["curl"]))
    assert (answer["choices"][0]["message"]["content"], answer["model"]) == ("Hello there.", world.acme.model_name)
    assert said(sys.executable, "-c", code["python"]) == "Hello there.\n"
    assert f'baseURL: "{public_url}/v1"' in code["javascript"]
    path = os.pathsep.join(["cli/src", environ.get("PYTHONPATH", "")])
    environ |= {"ANNEAL_BASE_URL": public_url, "PYTHONPATH": path}
    assert said(sys.executable, "-m", "anneal", "chat", world.acme.model_name, "It's me") == "Hello there.\n"
