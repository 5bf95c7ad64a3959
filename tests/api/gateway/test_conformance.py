"""Clients people use, of every generation, send every documented parameter; what has an effect reaches the engine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from apps.gateway.schema import IGNORED

pytestmark = pytest.mark.django_db

CLIENTS = Path(__file__).resolve().parents[3] / ".anneal"
SESSION = Path(__file__).with_name("conformance_session.py")
ALWAYS = {"model", "cache_salt", "stream", "stream_options"}
# What a case changes at the engine; a case not named here changes nothing.
EFFECTS = {
    **{
        name: {name}
        for name in ("temperature", "top_p", "n", "seed", "max_tokens", "presence_penalty", "frequency_penalty",
                     "logit_bias", "stop", "max_completion_tokens", "tools")
    },
    "stops": {"stop"},
    "logprobs": {"logprobs", "top_logprobs"},
    "json_object": {"response_format"},
    "json_schema": {"response_format"},
    "tool_choice": {"tools", "tool_choice"},
    "tool_named": {"tools", "tool_choice"},
    "parallel_tool_calls": {"tools", "parallel_tool_calls"},
}  # fmt: skip


def run_session(gateway, tenant, library: str, folder: str) -> dict:
    client = CLIENTS / folder if folder else ""
    assert not folder or Path(client).exists(), f"{client} is missing: make setup-dev"
    arguments = [str(gateway.socket), tenant.key.secret, "tiny", library, str(client)]
    ran = subprocess.run(
        [sys.executable, str(SESSION), *arguments], capture_output=True, text=True, timeout=240, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])["seen"]


@pytest.mark.parametrize(
    ("library", "folder"),
    [("openai", ""), ("openai", "openai-2.54.0"), ("openai", "openai-1.109.1"), ("litellm", "litellm")],
)
def test_every_documented_parameter(gateway, world, engine, library, folder):
    engine.bodies.clear()

    seen = run_session(gateway, world.acme, library, folder)

    assert {name: text for name, text in seen["chat"].items() if text != "Hello there."} == {}
    assert {name: text for name, text in seen["completion"].items() if text != "Hello there."} == {}
    for group in ("chat_refused", "completion_refused"):
        assert {name: said for name, said in seen[group].items() if said[1] != 400 or name not in said[2]} == {}
    bodies = {_case(body): body for body in engine.bodies}
    for name in seen["chat"]:
        effect = EFFECTS.get(name, set())
        assert set(bodies[f"chat:{name}"]) - ALWAYS - {"messages"} == effect, name
    for name in seen["completion"]:
        effect = {"logprobs"} if name == "logprobs" else EFFECTS.get(name, set())
        assert set(bodies[f"completion:{name}"]) - ALWAYS - {"prompt"} == effect | {"max_tokens"}, name


def _case(body: dict) -> str:
    text = body["messages"][0]["content"] if "messages" in body else body["prompt"]
    return text.removeprefix("case:")


def test_every_ignored_field_is_in_the_documentation():
    page = (Path(__file__).resolve().parents[3] / "docs/gateway.md").read_text()

    assert [name for names in IGNORED.values() for name in names if f"`{name}`" not in page] == []
