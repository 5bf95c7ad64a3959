"""The wheel in an environment with its locked dependencies and nothing else, against a real server."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli import wheel as builder
from scripts.installation import installer
from scripts.installation.commands import REQUIREMENTS, version_of
from scripts.installation.packages import install_locked
from tests.factories.accounts import make_key
from tests.factories.datasets import jsonl
from tests.factories.finetuning import TrainingSetup, make_training_file
from tests.support.asgi import origin  # noqa: F401 - a fixture

OLDER = [pytest.param(version, marks=pytest.mark.nightly) for version in ("3.12", "3.13", "3.14")]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    builder.build(folder)
    return next(folder.glob("*.whl"))


def interpreters(version: str) -> Iterator[str]:
    """Yield the places where an interpreter of this version may be: this one, the path, pyenv."""
    yield sys.executable
    yield shutil.which(f"python{version}") or ""
    yield from map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))


@pytest.mark.slow
@pytest.mark.parametrize("version", [f"{sys.version_info[0]}.{sys.version_info[1]}", *OLDER])
def test_the_wheel_does_a_customers_work_in_a_bare_environment(
    origin,  # noqa: F811
    organization,
    alice,
    wheel,
    tmp_path,
    version,
) -> None:
    python = next((each for each in interpreters(version) if each and version_of(each) == version), None)
    if python is None:
        pytest.skip(f"Python {version} is not on this machine")
    subprocess.run([python, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    bare = tmp_path / "bare/bin"
    install_locked(bare / "python", [REQUIREMENTS / "programs/cli.lock"])
    install = [installer.UV, "pip", "install", "--offline", "--no-deps", "--quiet", f"--python={bare}/python", wheel]
    subprocess.run(install, env=installer.variables(), check=True)
    (tmp_path / "rows.jsonl").write_bytes(jsonl())
    file_id = make_training_file(organization, TrainingSetup(organization).base_model).pk
    key = make_key(organization, alice).secret
    environment = {"ANNEAL_API_KEY": key, "ANNEAL_BASE_URL": origin, "HOME": str(tmp_path), "PATH": os.defpath}

    def anneal(*words: str) -> str:
        done = subprocess.run(
            [bare / "anneal", *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    completing = {"_ANNEAL_COMPLETE": "complete_bash", "COMP_WORDS": "anneal mod", "COMP_CWORD": "1"}
    completed = subprocess.run([bare / "anneal"], env=environment | completing, capture_output=True, text=True)
    assert completed.stdout.split() == ["models"], completed.stderr
    assert "12 rows" in anneal("files", "check", "rows.jsonl")
    assert json.loads(anneal("files", "upload", "rows.jsonl", "--no-wait", "--json"))["status"] == "uploaded"
    job = json.loads(anneal("jobs", "create", "--model", "anneal-demo", "--file", file_id, "--yes", "--json"))
    assert job["status"] == "queued" and job["id"] in anneal("jobs", "list")
    default = json.loads(anneal("projects", "list", "--json"))["data"][0]["id"]
    assert job["id"] in anneal("--project", default, "jobs", "list")
    (tmp_path / "jobs.json").write_text("[]")
    (tmp_path / "tune.yaml").write_text("model: anneal-demo\ntraining_file: rows.jsonl\n")
    assert "Nothing was uploaded." in anneal("import", "openai", "--export", ".", "--dry-run")
    assert "anneal-demo" in anneal("import", "together", "tune.yaml", "--dry-run")
    assert "12 rows are kept" in anneal("files", "convert", "rows.jsonl")
    assert "H100" in anneal("estimate", "--model", "Llama-3.1-8B", "--gpu", "h100", "--tokens", "10e6", "--price", "2")
