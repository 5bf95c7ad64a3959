"""The recipe for generated clients works as pasted: two generators read the OpenAPI document of a running server."""

import compileall
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.factories.accounts import make_key
from tests.support.asgi import origin  # noqa: F401 - a fixture
from tests.support.gateway.recipes import COOKBOOK, ROOT, Kitchen, read_recipe

CLIENTS = ROOT / ".anneal"
GENERATOR = CLIENTS / "openapi-python-client"
PAGE = "generated-clients"
# What each program of the page prints, beside what its generator says.
PRINTED = (
    r"maximum in dollars: 0\.\d+\nfirst event: Created fine-tuning job\n"
    r"(?=(?:downloaded: .+\n)*downloaded: adapter_model\.safetensors\n)(?:downloaded: .+\n)+"
    r"refused: fine_tuning_job_not_found\n"
)


def environment() -> dict[str, str]:
    """Return what the generators and the programs of the page need."""
    assert GENERATOR.exists() and (CLIENTS / "node/node_modules/openapi-fetch").exists(), "missing: make setup-dev"
    path = [GENERATOR / "bin", Path(sys.executable).parent, os.environ["PATH"]]
    quiet = {"NODE_NO_WARNINGS": "1", "NPM_CONFIG_UPDATE_NOTIFIER": "false", "NPM_CONFIG_OFFLINE": "true"}
    return {"PATH": os.pathsep.join(map(str, path)), "PYTHONPATH": str(GENERATOR)} | quiet


@pytest.mark.nightly  # the generators of others take half a minute
def test_clients_of_two_generators_create_follow_and_download_a_job(
    origin, organization, alice, tmp_path: Path  # noqa: F811
) -> None:  # fmt: skip
    (tmp_path / "node_modules").symlink_to(CLIENTS / "node/node_modules")
    kitchen = Kitchen(organization, "unix:///nowhere")  # nothing is asked of the model
    given = {
        "ANNEAL_BASE_URL": origin, "ANNEAL_API_KEY": make_key(organization, alice).secret,
        "ANNEAL_MODEL": kitchen.model,
    }  # fmt: skip

    printed = kitchen.run(read_recipe(PAGE), tmp_path, environment() | given)

    assert len(re.findall(PRINTED, printed)) == 2, printed
    assert (tmp_path / "errors.txt").read_text() == ""  # no warning of a generator or compiler
    assert compileall.compile_dir(tmp_path / "anneal_api_client", quiet=1)


@pytest.mark.nightly  # mypy reads the whole client
def test_the_python_program_of_the_page_has_sound_types(tmp_path: Path) -> None:
    (tmp_path / "follow.py").write_text(read_recipe(PAGE).files["follow.py"])
    document = str(ROOT / "docs/openapi.json")
    for command in (
        ["openapi-python-client", "generate", "--path", document, "--meta", "none", "--fail-on-warning"],
        # The generator's own client.py has errors of its own.
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--no-incremental", "follow.py"],
    ):
        done = subprocess.run(
            command, cwd=tmp_path, env=os.environ | environment(), capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_page_names_the_versions_that_are_tested() -> None:
    page = (COOKBOOK / f"{PAGE}.md").read_text()
    lock = (ROOT / "requirements/programs/clients/openapi-python-client.lock").read_text()
    wanted = json.loads((Path(__file__).parent / "node/package.json").read_text())["dependencies"]

    named = re.search(r"pip install (openapi-python-client==\S+)`", page)
    assert named and f"\n{named[1]} " in lock
    assert {name for name in wanted if f" {name}@{wanted[name]}" in page} == {
        "@types/node", "openapi-fetch", "openapi-typescript", "typescript",
    }  # fmt: skip
