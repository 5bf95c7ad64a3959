"""Workers fetch a base model at its commit and check every file; the hub is a twin, its client the real one."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.twins.hub import COMMIT, serve_hub

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "demo/base_model"

_FETCH = """
import json, sys
from apps.contracts.runs import BaseModelRef
from gpu_workers.train.failures import TrainingFailed
from gpu_workers.train.model import fetch_base_model
given = json.load(sys.stdin)
try:
    print(fetch_base_model(BaseModelRef(**given["base_model"]), hub_token=given["token"]))
except TrainingFailed as error:
    print(error.code, error)
"""
_RESOLVE = """
import sys
from gpu_workers.engine import _resolve_model
from gpu_workers.engine_state import ReplicaBase
print(_resolve_model(ReplicaBase(served_name="b-1", repo="acme/tiny", revision=sys.argv[1])))
"""


def run(script: str, hub_url: str, home: Path, *arguments: str, given: object = None, **more: str) -> str:
    environment = {"PATH": os.environ["PATH"], "HF_ENDPOINT": hub_url, "HF_HOME": str(home), **more}
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, input=json.dumps(given), capture_output=True, text=True, check=True
    )
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("token", "spoiled", "answer"),
    [
        ("hf_right", "", "snapshots"),
        ("hf_wrong", "", "the hub does not open it to the operator's token"),
        ("hf_right", "model.safetensors", "model.safetensors of the base model tiny is not the file"),
    ],
)
def test_the_trainer_takes_only_the_files_the_job_was_created_with(tmp_path, token, spoiled, answer):
    with serve_hub(MODEL) as hub:
        hub.token = "hf_right"
        names = [name for name in hub.files if name.endswith((".json", ".safetensors", ".jinja"))]
        files = {name: hashlib.sha256(hub.files[name]).hexdigest() for name in names}
        if spoiled:
            hub.files[spoiled] = hub.files[spoiled][:-1] + b"!"
        reference = {"id": "bm_1", "name": "tiny", "repo": "acme/tiny", "revision": COMMIT, "files_sha256": files}

        said = run(_FETCH, hub.url, tmp_path, given={"base_model": reference, "token": token})

        assert answer in said
        assert "README.md" not in hub.fetched


def test_the_engine_downloads_the_pinned_commit_and_no_code(tmp_path):
    with serve_hub(MODEL) as hub:
        hub.files["modeling_tiny.py"] = b"raise SystemExit"
        folder = Path(run(_RESOLVE, hub.url, tmp_path, COMMIT))

        assert (folder / "config.json").is_file() and (folder / "model.safetensors").is_file()
        assert not (folder / "modeling_tiny.py").exists()
