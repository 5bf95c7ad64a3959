"""Clients people use, of every generation, send every documented parameter; what has an effect reaches the engine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from apps.interfaces.gateway.requests.schema import IGNORED
from apps.interfaces.gateway.surfaces.responses import IGNORED as IGNORED_IN_RESPONSES
from tests.twins.scripted_engine import Script

pytestmark = pytest.mark.django_db

CLIENTS = Path(__file__).resolve().parents[3] / ".anneal"
SESSIONS = Path(__file__).with_name("sessions")
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
RESPONSE_EFFECTS = {name: EFFECTS[name] for name in ("temperature", "top_p", "tools", "tool_choice")} | {
    "parallel_tool_calls": EFFECTS["parallel_tool_calls"],
    "max_output_tokens": {"max_tokens"},
    "text": {"response_format"},
    "top_logprobs": {"logprobs", "top_logprobs"},
    "include": {"logprobs"},
}
# What every case has of itself, and what never leaves the client.
NEEDS_NO_CASE = {"model", "messages", "prompt", "input", "timeout"}


def run_session(gateway, tenant, library: str, folder: str) -> dict:
    client = CLIENTS / folder if folder else ""
    assert not folder or Path(client).exists(), f"{client} is missing: make setup-dev"
    arguments = [str(gateway.socket), tenant.key.secret, "tiny", library, str(client)]
    environ = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # or it asks GitHub for prices and waits
    session = SESSIONS / ("langchain_chats.py" if library == "langchain" else "conformance.py")
    command = [sys.executable, str(session), *arguments]
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "folder"),
    [
        ("openai", ""),
        pytest.param("openai", "openai-2.54.0", marks=pytest.mark.nightly),  # between the two others
        ("openai", "openai-1.109.1"),
        pytest.param("litellm", "litellm", marks=pytest.mark.nightly),  # its import alone takes 15 s
    ],
)
def test_every_documented_parameter(gateway, world, engine, library, folder):
    engine.bodies.clear()

    session = run_session(gateway, world.acme, library, folder)

    for surface, names in session["named"].items():
        assert set(names) - set(session["covered"][surface]) - NEEDS_NO_CASE == set(), f"{surface} has a new parameter"
    seen = session["seen"]
    for surface in ("chat", "completion", "response"):
        assert {name: text for name, text in seen[surface].items() if text != "Hello there."} == {}, surface
        refused = seen[f"{surface}_refused"]
        assert {name: said for name, said in refused.items() if said[1] != 400 or name not in said[2]} == {}, surface
    assert {
        name: said for name, said in seen["embedding_refused"].items() if "model_not_supported" not in said[2]
    } == {}
    _check_effects(seen, {_case(body): set(body) - ALWAYS - {"messages", "prompt"} for body in engine.bodies})


@pytest.mark.slow
def test_langchain_reads_answers_streams_tools_and_structured_output(gateway, world, engine):
    engine.bodies.clear()
    arguments = ('{"city": ', '"Bern", "degrees": 7}')
    engine.scripts |= {
        "case:langchain:tool": Script(
            (), calls=(("call_1", "weather", ('{"city": ', '"Bern"}')),), finish="tool_calls"
        ),
        "case:langchain:function_calling": Script((), calls=(("call_2", "Weather", arguments),), finish="tool_calls"),
        "case:langchain:json_schema": Script(arguments),
        "case:langchain:json_mode": Script(arguments),
    }

    seen = run_session(gateway, world.acme, "langchain", "langchain")

    said, read = "Hello there.", {"city": "Bern", "degrees": 7}
    assert (seen["invoke"], seen["tokens"], seen["finish"], seen["stream"]) == (said, 14, "stop", said)
    assert (seen["batch"], seen["asynchronous"], seen["responses"]) == ([said, said], [said, said], said)
    tools = seen["tools"]
    assert (
        tools["after"] == said
        and [tools["whole"], tools["streamed"]]
        == [[{"name": "weather", "args": {"city": "Bern"}, "id": "call_1", "type": "tool_call"}]] * 2
    )
    assert [seen[method] for method in ("json_schema", "function_calling", "json_mode")] == [read] * 3
    assert seen["refused"] == [404, "model_not_found"]
    asked = {_case(body): set(body) - ALWAYS - {"messages"} for body in engine.bodies}
    assert asked["langchain:invoke"] == {"temperature"} and asked["langchain:tool"] == {"tools"}
    assert asked["langchain:json_schema"] == asked["langchain:json_mode"] == {"response_format"}
    assert asked["langchain:function_calling"] == {"tools", "tool_choice", "parallel_tool_calls"}


def _check_effects(seen: dict, fields: dict[str, set[str]]) -> None:
    """Each case changes at the engine what it is about, and nothing else."""
    for name in seen["chat"]:
        assert fields[f"chat:{name}"] == EFFECTS.get(name, set()), name
    for name in seen["completion"]:
        effect = {"logprobs"} if name == "logprobs" else EFFECTS.get(name, set())
        assert fields[f"completion:{name}"] == effect | {"max_tokens"}, name
    for name in seen["response"]:
        assert fields[f"response:{name}"] == RESPONSE_EFFECTS.get(name, set()), name


def _case(body: dict) -> str:
    text = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
    return text.removeprefix("case:")


def test_every_ignored_field_is_in_the_documentation():
    page = (Path(__file__).resolve().parents[3] / "docs/gateway.md").read_text()

    ignored = [*IGNORED.values(), IGNORED_IN_RESPONSES]
    assert [name for names in ignored for name in names if f"`{name}`" not in page] == []


@pytest.mark.slow
@pytest.mark.parametrize("sdk", ["installed", "1.109.1"])
def test_both_generations_of_the_sdk_see_the_same(gateway, world, sdk):
    old_sdk = CLIENTS / "openai-1.109.1"
    assert sdk == "installed" or old_sdk.exists(), f"{old_sdk} is missing: make setup-dev"
    folder = "" if sdk == "installed" else str(old_sdk)
    arguments = [str(gateway.socket), world.acme.key.secret, world.acme.model_name, world.rival.model_name, folder]

    ran = subprocess.run(
        [sys.executable, str(SESSIONS / "sdk.py"), *arguments], capture_output=True, text=True, timeout=240
    )

    assert ran.returncode == 0, ran.stderr
    seen = json.loads(ran.stdout)
    assert seen.pop("version") == (openai.__version__ if sdk == "installed" else sdk)
    assert seen == {
        "whole": "Hello there.",
        "tokens": 14,
        "streamed": "Hello there.",
        "usage": 3,
        "completion": "Hello there.",
        "foreign": [404, "model_not_found", "model", True],
        "bad": [400, "invalid_value", "n", True],
    }
