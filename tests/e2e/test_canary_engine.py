"""With a canary engine: a version is trained, tried by a second vLLM, and served by the first.

Two engines of vLLM and a trainer at a time: on demand only.
"""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.platform import Platform, find_processes, until

pytestmark = pytest.mark.chaos

CANARY_SOCKET = "canary/engine/vllm.sock"


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> Iterator[Platform]:
    home = Path(tempfile.mkdtemp(prefix="anneal-"))
    for name in [name for name in os.environ if name.startswith(("ANNEAL_", "DATABASE_", "REDIS_", "CELERY_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("ANNEAL_HOME", str(home))
    monkeypatch.setenv("ANNEAL_CANARY_ENGINE", "on")
    running = Platform(home)
    yield running
    assert running.stop() == 0, (home / "launch.log").read_text()[-3000:]
    shutil.rmtree(home)


def test_a_version_is_tried_by_the_second_engine_and_served_by_the_first(platform: Platform) -> None:
    file_id = platform.upload(rows=240)
    platform.wait_until_quotable(file_id)
    assert not find_processes(CANARY_SOCKET, platform.home)  # it costs nothing while there is nothing to try

    job = platform.wait_for_end(platform.create_job(file_id, epochs=1))
    assert job.status == "succeeded", job.error
    until(lambda: find_processes(CANARY_SOCKET, platform.home), 120, "no second engine")
    assert platform.ask(platform.model)  # customers do not wait for it
    platform.wait_until_answers(job.fine_tuned_model, 600)

    found = platform.client.models.retrieve(job.fine_tuned_model).model_extra
    assert (found["status"], found["status_reason"]) == ("ready", None)
    log = (platform.home / "logs" / "serving-agent.log").read_text()
    passed = re.search(r"anneal\.canary INFO (a-\w{26}): passed", log)
    assert passed and log.index(f"{passed[1]} is loaded") > passed.start()
    until(lambda: not find_processes(CANARY_SOCKET, platform.home), 180, "the second engine does not end")
    until(lambda: platform.pid("vllm-canary"), 60, "its supervisor starts no launcher that waits for the next version")
    assert platform.ask(job.fine_tuned_model)
