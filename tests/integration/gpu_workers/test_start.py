"""A trainer that cannot start ends, so that its supervisor sees it."""

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_a_trainer_that_cannot_start_ends_its_process(tmp_path: Path) -> None:
    blocked = tmp_path / "work"
    blocked.write_text("a file where the folder should be")
    pool = f"pool-{uuid.uuid4().hex[:8]}"
    environment = {
        "PATH": os.environ["PATH"],
        "CELERY_BROKER_URL": os.environ["CELERY_BROKER_URL"],
        "ANNEAL_BROKER_KEY_PREFIX": "anneal:",
        "ANNEAL_INTERNAL_URL": "http://127.0.0.1:1",
        "ANNEAL_WORK_DIR": str(blocked),
        "ANNEAL_POOL": pool,
    }
    command = [
        sys.executable,
        "-m",
        "celery",
        "-A",
        "gpu_workers.trainer.celery_app",
        "worker",
        "--queues",
        f"train.{pool}",
    ]
    command += ["--pool", "solo", "--without-gossip", "--without-mingle", "--without-heartbeat"]

    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)

    assert ended.returncode != 0
    assert "The trainer could not start" in ended.stderr
    assert "FileExistsError" in ended.stderr
