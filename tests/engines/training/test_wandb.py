"""Weights & Biases' own library, offline: it writes its run to the disk and would send it later."""

import pytest

from apps.contracts.runs import Tracker
from gpu_workers.trainer.tracking.points import FinalStatus, MetricPoint
from gpu_workers.trainer.tracking.wandb import WandbRun


@pytest.mark.slow
def test_a_run_is_recorded_by_the_librarys_own_rules(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracker = Tracker(kind="wandb", project="triage", name="first", entity="acme", tags=("a",), secret="k" * 40)

    run = WandbRun(tracker, job_id="ftjob-1", parameters={"epochs": "3"}, folder=tmp_path)
    run.log([MetricPoint(step=3, values={"train/loss": 0.25})])
    run.finish(FinalStatus.SUCCEEDED)

    [record] = tmp_path.glob("wandb/offline-run-*/run-ftjob-1.wandb")
    data = record.read_bytes()
    for word in (b"triage", b"first", b"train/loss", b"0.25", b"epochs"):
        assert word in data
    assert tracker.secret is not None
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or tracker.secret.encode() not in file.read_bytes()
