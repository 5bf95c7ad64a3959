"""The recipe for clients that two generators make from the OpenAPI document, of a server, works as pasted."""

import json
import os
import re
import sys
from pathlib import Path

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


def test_clients_of_two_generators_create_follow_and_download_a_job(
    origin, organization, alice, tmp_path: Path  # noqa: F811
) -> None:  # fmt: skip
    assert GENERATOR.exists() and (CLIENTS / "node/node_modules/openapi-fetch").exists(), "missing: make setup-dev"
    (tmp_path / "node_modules").symlink_to(CLIENTS / "node/node_modules")
    kitchen = Kitchen(organization, "unix:///nowhere")  # nothing is asked of the model
    path = [GENERATOR / "bin", Path(sys.executable).parent, os.environ["PATH"]]
    environment = {
        "ANNEAL_BASE_URL": origin, "ANNEAL_API_KEY": make_key(organization, alice).secret,
        "ANNEAL_MODEL": kitchen.model, "PATH": os.pathsep.join(map(str, path)), "PYTHONPATH": str(GENERATOR),
        "NPM_CONFIG_UPDATE_NOTIFIER": "false", "NPM_CONFIG_OFFLINE": "true",
    }  # fmt: skip

    printed = kitchen.run(read_recipe(PAGE), tmp_path, environment)

    assert len(re.findall(PRINTED, printed)) == 2, printed
    assert (tmp_path / "errors.txt").read_text() == ""  # no warning of a generator or compiler


def test_the_page_names_the_versions_that_are_tested() -> None:
    page = (COOKBOOK / f"{PAGE}.md").read_text()
    lock = (ROOT / "requirements/programs/openapi-python-client.lock").read_text()
    wanted = json.loads((Path(__file__).parent / "node/package.json").read_text())["dependencies"]

    named = re.search(r"pip install (openapi-python-client==\S+)`", page)
    assert named and f"\n{named[1]} " in lock
    assert {name for name in wanted if f" {name}@{wanted[name]}" in page} == {
        "@types/node", "openapi-fetch", "openapi-typescript", "typescript",
    }  # fmt: skip
