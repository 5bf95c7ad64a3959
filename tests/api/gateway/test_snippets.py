"""The calls that pages offer for copying, and the recipes of the cookbook, work as they are pasted."""

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from apps.accounts.notices import endpoints
from apps.core.http.asgi import DjangoApplication
from apps.core.messages.outbox import deliver_due
from apps.interfaces.web.edge.front_door import FrontDoor
from apps.interfaces.web.shell.code_samples import chat_samples
from tests.factories.accounts import make_key, make_organization, make_user
from tests.factories.datasets import jsonl
from tests.factories.money import give_credit
from tests.services.ports import free_port
from tests.support.asgi import NO_LIMITS, serving
from tests.support.gateway.recipes import COOKBOOK, Kitchen, read_recipe
from tests.twins.openai_jobs import OpenAiTwin
from tests.twins.scripted_engine import Script

pytestmark = pytest.mark.django_db

DATA = Path(__file__).resolve().parents[3] / ".anneal"
SESSIONS = Path(__file__).with_name("sessions")


@pytest.fixture
def public_url(gateway, settings) -> Iterator[str]:
    gateway_url = f"unix://{gateway.socket}"
    settings.GATEWAY_URL = gateway_url
    with serving(FrontDoor(DjangoApplication(), gateway_url=gateway_url, limits=NO_LIMITS)) as address:
        settings.PUBLIC_URL = address
        yield address


@pytest.mark.slow
def test_snippets_answer_as_pasted(public_url, world, tmp_path: Path):
    code = {sample["key"]: sample["code"] for sample in chat_samples(model=world.acme.model_name, prompt="It's me")}
    environ = os.environ | {"ANNEAL_API_KEY": world.acme.key.secret}

    def said(*command: str) -> str:
        ran = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    answer = json.loads(said("bash", "-c", code["curl"]))
    assert (answer["choices"][0]["message"]["content"], answer["model"]) == ("Hello there.", world.acme.model_name)
    assert said(sys.executable, "-c", code["python"]) == "Hello there.\n"
    assert said(*for_node(code["javascript"], tmp_path)) == "Hello there.\n"
    path = os.pathsep.join(["cli/src", environ.get("PYTHONPATH", "")])
    environ |= {"ANNEAL_BASE_URL": public_url, "PYTHONPATH": path}
    assert said(sys.executable, "-m", "anneal", "chat", world.acme.model_name, "It's me") == "Hello there.\n"


def for_node(source: str, folder: Path, *arguments: str) -> list[str]:
    """Return the command that runs a program beside the packages that it imports."""
    (folder / "node_modules").symlink_to(DATA / "node/node_modules")
    (folder / "program.mjs").write_text(source)
    return ["node", str(folder / "program.mjs"), *arguments]


def session(name: str, folder: Path, *arguments: str) -> Any:
    """Run a session and return what it saw."""
    command = for_node((SESSIONS / name).read_text(), folder, *arguments)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("client", ["openai-4", "openai"])
def test_models_answer_the_clients_for_node(public_url, world, client, tmp_path: Path):
    """The oldest and the newest generation; the session leaves one stream in the middle."""
    seen = session("node.mjs", tmp_path, public_url, world.acme.key.secret, client, world.acme.model_name)

    assert seen == {
        "answer": ["Hello there.", world.acme.model_name, True],
        "stream": ["Hello there.", True],
        "helper": "Hello there.",
        "response": "Hello there.",
        "events": ["response.created", "response.completed", True],
        "completion": "Hello there.",
        "model": world.acme.model_name,
        "unknown": ["NotFoundError", 404, "model_not_found"],
        "invalid": ["BadRequestError", 400, "invalid_value"],
        "signedOut": ["AuthenticationError", 401, "invalid_api_key"],
        "notOffered": ["NotFoundError", 404, "not_offered"],
    }


@pytest.mark.slow
def test_the_ai_sdk_holds_conversations_and_calls_functions(public_url, world, engine, tmp_path: Path):
    call = ("call_1", "weather", ('{"city":', '"Oslo"}'))
    engine.scripts["sunny?"] = Script(tokens=(), calls=(call,), finish="tool_calls")

    seen = session("ai_sdk.mjs", tmp_path, public_url, world.acme.key.secret, world.acme.model_name)

    assert seen["responses"] == seen["chat"] == ["Hello there.", "Hello there.", "sun in Oslo", "Hello there."]
    assert "set `providerOptions.openai.store` to false" in seen["stored"]


# What each recipe must print.
PRINTED = {
    "first-adapter": r"maximum in dollars: 0\.\d+\nHello there\.\n",
    "batches": r"ticket-\d Hello there\.\nticket-\d Hello there\.\n",
    "evaluate": r"exact_match 0\.1 -> 0\.8 better\nrows that got worse: 1\n",
    "import-from-openai": r"(?s).*gpt-4o-mini.*",
    "model-as-code": r"(?s).*production.*",
}


@pytest.mark.slow
def test_every_recipe_of_the_cookbook_works_as_pasted(public_url, gateway, world, engine, tmp_path: Path):
    """The trainer is played: each job succeeds at once. Server, gateway and clients are the real ones."""
    owner = make_user("cook")
    organization = make_organization("Kitchen", owner=owner)
    give_credit(organization)
    kitchen = Kitchen(organization, engine.url)
    key = make_key(organization, owner).secret
    environment = {"ANNEAL_BASE_URL": public_url, "ANNEAL_API_KEY": key, "ANNEAL_MODEL": kitchen.model}
    export_jobs(tmp_path / "export")
    (tmp_path / "rows.jsonl").write_bytes(jsonl())
    (tmp_path / "held-out.jsonl").write_bytes(jsonl(30)[len(jsonl(15)) :])

    elsewhere = {"webhooks", "generated-clients"}  # below, and in tests/api/sdks
    assert {path.stem for path in COOKBOOK.glob("*.md")} == {*PRINTED, *elsewhere}
    for name, pattern in PRINTED.items():
        printed = kitchen.run(read_recipe(name), tmp_path, environment)
        assert re.fullmatch(pattern, printed), (name, printed)


def export_jobs(folder: Path) -> None:
    """Write one job of OpenAI with its rows, as the recipe says."""
    twin = OpenAiTwin()
    job = twin.add_job(1, jsonl())
    folder.mkdir()
    (folder / "jobs.json").write_text(json.dumps({"object": "list", "data": [job], "has_more": False}))
    (folder / f"{job['training_file']}.jsonl").write_bytes(jsonl())


@pytest.mark.slow
def test_the_receiver_of_the_cookbook_takes_signed_events_once_and_no_others(world, settings):
    settings.PRIVATE_WEBHOOKS = True
    port = free_port()
    types = ["fine_tuning.job.succeeded"]
    endpoint, secret = endpoints.create_endpoint(
        organization=world.acme.organization, by=world.acme.owner.pk, url=f"http://127.0.0.1:{port}/anneal",
        event_types=types, format="standard",
    )  # fmt: skip
    environment = os.environ | {"WEBHOOK_SECRET": secret, "PORT": str(port)}
    program = [sys.executable, "-c", read_recipe("webhooks").python]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(program, env=environment, text=True, **pipes) as ran, ExitStack() as stack:
        stack.callback(ran.kill)
        assert ran.stdout is not None
        assert ran.stdout.readline() == "listening\n"
        forged = urllib.request.Request(f"http://127.0.0.1:{port}/anneal", data=b"{}", headers={"webhook-id": "a"})
        with pytest.raises(urllib.error.HTTPError, match="400"):
            urllib.request.urlopen(forged, timeout=20)
        delivery = endpoints.send_test(endpoint=endpoint, by=world.acme.owner.pk)
        deliver_due(lane="webhooks")
        delivery.refresh_from_db()
        assert delivery.status == "delivered", delivery.error
        assert ran.stdout.readline().startswith(f"webhook.test {endpoint.pk}")
