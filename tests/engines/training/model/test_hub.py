"""Workers fetch a base model at its commit and check every file; the hub is a twin, its client the real one."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpu_workers.common.config import REPOSITORY
from tests.support.engines.models import BASE_MODEL
from tests.twins.hub import COMMIT, Fault, Hub, serve_hub

_FETCH = """
import json, sys
from apps.contracts.runs import BaseModelRef
from gpu_workers.train.failures import TrainingFailed
from gpu_workers.train.model.base_model import fetch_base_model
for line in sys.stdin:
    given = json.loads(line)
    try:
        said = str(fetch_base_model(BaseModelRef(**given["base_model"]), hub_token=given["token"]))
    except TrainingFailed as error:
        said = f"{error.code} {error}"
    print(json.dumps(said), flush=True)
"""
_RESOLVE = """
import json, sys
from gpu_workers.engine.launcher import _resolve_model
from gpu_workers.engine.state import ReplicaBase
files = json.loads(sys.argv[2])
given = {"repo": "acme/tiny", "revision": sys.argv[1], "files_sha256": files, "hub_token": "hf_right"}
print(_resolve_model(ReplicaBase(served_name="b-1", **given)))
"""


def environment_of(hub: Hub, home: Path) -> dict[str, str]:
    """What the hub's client reads when it is imported, and never again."""
    blobs = hub.blob_url.removeprefix("http://")
    return {"PATH": os.environ["PATH"], "HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_BLOB_HOSTS": blobs}


@pytest.fixture(scope="module")
def fetching(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., tuple[str, Hub]]]:
    """One process for all cases; each finds the hub whole and nothing kept."""
    home = tmp_path_factory.mktemp("home")
    with (
        serve_hub(BASE_MODEL) as hub,
        subprocess.Popen(
            [sys.executable, "-c", _FETCH],
            cwd=REPOSITORY,
            env=environment_of(hub, home),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as trainer,
    ):
        whole = dict(hub.files)

        def fetch(given: dict[str, object], spoiled: str, *faults: Fault) -> tuple[str, Hub]:
            hub.faults = list(faults)
            shutil.rmtree(home, ignore_errors=True)
            hub.only.token, hub.only.revisions[COMMIT] = "hf_right", dict(whole)
            hub.fetched.clear()
            if spoiled:
                hub.files[spoiled] = hub.files[spoiled][:-1] + b"!"
            assert trainer.stdin is not None and trainer.stdout is not None
            trainer.stdin.write(json.dumps(given) + "\n")
            trainer.stdin.flush()
            return json.loads(trainer.stdout.readline()), hub

        yield fetch
        assert trainer.stdin is not None
        trainer.stdin.close()
    assert trainer.returncode == 0


FILES = {
    path.name: hashlib.sha256(path.read_bytes()).hexdigest()
    for path in BASE_MODEL.iterdir()
    if path.name.endswith((".json", ".safetensors", ".jinja"))
}
REFERENCE = {"id": "bm_1", "name": "tiny", "repo": "acme/tiny", "revision": COMMIT, "files_sha256": FILES}
WEIGHTS = "name=model.safetensors"  # in the address of the blob


@pytest.mark.parametrize(
    ("token", "spoiled", "answer"),
    [
        ("hf_right", "", "snapshots"),
        ("hf_wrong", "", "the operator's token has no access to it"),
        ("hf_right", "model.safetensors", "model.safetensors of the base model tiny is not the file"),
    ],
)
def test_the_trainer_takes_only_the_files_the_job_was_created_with(fetching, token, spoiled, answer):
    said, hub = fetching({"base_model": REFERENCE, "token": token}, spoiled)

    assert answer in said
    assert "README.md" not in hub.fetched
    assert ("model.safetensors" in hub.fetched) is (token == "hf_right")  # nothing of the case before was kept


@pytest.mark.slow
def test_damaged_cut_and_refused_downloads_are_repeated_until_every_file_is_right(fetching):
    faults = [
        Fault("flipped", WEIGHTS),
        Fault("limited", "/acme/tiny/resolve/"),
        Fault("limited", WEIGHTS),
        Fault("cut", WEIGHTS),
    ]

    said, hub = fetching({"base_model": REFERENCE, "token": "hf_right"}, "", *faults)

    assert "snapshots" in said and not hub.faults
    weights = Path(said) / "model.safetensors"
    assert hashlib.sha256(weights.read_bytes()).hexdigest() == FILES["model.safetensors"]
    assert hub.fetched.count("model.safetensors") == 3  # flipped; cut, and its second half
    assert hub.blob_bearers == set()


@pytest.mark.slow
def test_the_engine_downloads_the_pinned_commit_with_its_token_but_no_code_and_repeats_a_damaged_file(tmp_path):
    with serve_hub(BASE_MODEL) as hub:
        hub.files["modeling_tiny.py"] = b"raise SystemExit"
        hub.only.token, hub.faults = "hf_right", [Fault("flipped", WEIGHTS)]
        command = [sys.executable, "-c", _RESOLVE, COMMIT, json.dumps(FILES)]
        environment = environment_of(hub, tmp_path)
        done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True)
        folder = Path(done.stdout.strip().splitlines()[-1])

        assert (folder / "config.json").is_file() and (folder / "model.safetensors").is_file()
        assert not (folder / "modeling_tiny.py").exists()
        assert hub.fetched.count("model.safetensors") == 2
