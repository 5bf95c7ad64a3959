"""Fine-tuning jobs through three generations of OpenAI's own SDK, over HTTP."""

import json
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from tests.factories.accounts import make_key
from tests.factories.finetuning import TrainingSetup, make_training_file

CLIENTS = Path(__file__).resolve().parents[3] / ".anneal"


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("sdk", ["installed", pytest.param("2.54.0", marks=pytest.mark.nightly), "1.109.1"])
def test_every_call_of_fine_tuning_works_with_each_sdk(live_server, organization, alice, sdk: str) -> None:
    folder = "" if sdk == "installed" else str(CLIENTS / f"openai-{sdk}")
    assert not folder or Path(folder).exists(), f"{folder} is missing: make setup-dev"
    floor = TrainingSetup(organization)
    file_id = make_training_file(organization, floor.base_model).pk
    session = Path(__file__).with_name("sdk_job_session.py")
    arguments = [live_server.url, make_key(organization, alice).secret, file_id, folder]

    done = subprocess.run([sys.executable, session, *arguments], capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["version"] == (openai.__version__ if sdk == "installed" else sdk)
    created = seen["created"]
    assert (created["object"], created["status"], created["seed"]) == ("fine_tuning.job", "queued", 7)
    assert created["method"]["supervised"]["hyperparameters"]["n_epochs"] == 2
    assert seen["retrieved"]["id"] == created["id"]
    assert len(seen["pages"]) == len(set(seen["pages"])) == 2
    assert seen["by_label"] == [seen["pages"][0]]
    assert ["fine_tuning.job.event", "Created fine-tuning job"] in seen["events"] and len(seen["events"]) > 1
    assert (seen["checkpoints"], seen["cancelled"]) == ([], "cancelled")
    assert seen["pause"] == [400, "invalid_state", "fine_tuning_job_id"] == seen["resume"] == seen["cancel"]
    assert seen["unknown"][:2] == [404, "fine_tuning_job_not_found"]
    assert seen["grader"] and (seen["reward"]["reward"], seen["reward"]["metadata"]["name"]) == (1.0, "a")
    assert (seen["permissions"][:2], seen["elsewhere"][:2]) == ([404, "model_not_found"], [404, "not_offered"])
    assert seen["slash"][:2] == [404, "model_not_found"]
    assert seen["help"].endswith("/help/errors#model_not_found")
