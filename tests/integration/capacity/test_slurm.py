"""A pool goes from zero to a node of a real Slurm, its job ends, and the pool is empty."""

import sys
from pathlib import Path

import pytest

from apps.core.database.clock import db_now
from apps.finetuning.models import CapacityNode, PoolCapacity, Worker
from apps.finetuning.pools.capacity.port import NodeRequest
from apps.finetuning.pools.capacity.reconciliation import reconcile_pool
from apps.finetuning.pools.capacity.settings import engine_of, set_capacity
from tests.services.slurm import ask_slurm, needs_slurm, until

pytestmark = [pytest.mark.nightly, needs_slurm]
ROOT = Path(__file__).resolve().parents[3]
WORKER = "tests.integration.capacity.slurm_worker"


@pytest.fixture
def install_dir(tmp_path: Path) -> Path:
    """Return a folder that looks like Anneal on a node; its python starts the worker of this test."""
    python = tmp_path / "anneal" / ".venv-engines" / "bin" / "python"
    python.parent.mkdir(parents=True)
    # The arguments are: -m gpu_workers.trainer.polling --exit-when-idle SECONDS
    python.write_text(f'#!/bin/sh\ncd {ROOT} && exec {sys.executable} -m {WORKER} "$4" 2> {tmp_path}/worker.log\n')
    python.chmod(0o755)
    return tmp_path / "anneal"


@pytest.mark.django_db(transaction=True)
def test_a_pool_goes_from_zero_to_a_slurm_node_and_back(slurm, install_dir, tmp_path, internal_url, floor):
    Worker.objects.filter(pk=floor.worker.pk).update(revoked_at=db_now())
    capacity = set_capacity(
        pool=floor.pool, kind="slurm", minimum=0, maximum=2, gpus_per_node=1, idle_seconds=30, node_nano_per_hour=0,
        budget_nano_per_hour=None, by="user_test",
        settings={
            "partition": "train", "install_dir": str(install_dir), "work_dir": str(tmp_path / "nodes"),
            "slurm_conf": str(slurm),
        },
    )  # fmt: skip
    job = floor.job()

    def look() -> list[str]:
        reconcile_pool(pool_id=floor.pool.pk)
        assert PoolCapacity.objects.get().problem == ""
        return list(CapacityNode.objects.values_list("status", flat=True))

    assert look() == ["starting"]
    zero_to_node = until(lambda: look() == ["running"])
    worker = CapacityNode.objects.get().worker
    until(lambda: worker.runs.filter(job=job, status="failed").exists())
    to_zero = until(lambda: look() == ["released"], seconds=90)

    worker.refresh_from_db()
    assert worker.revoked_at
    assert ask_slurm(slurm, "squeue", "--noheader") == b""
    assert list((tmp_path / "nodes").iterdir()) == []  # neither token nor credential remains
    print(f"\nzero to enrolled: {zero_to_node:.1f} s; last run to zero with 30 s of idling: {to_zero:.1f} s")  # noqa: T201

    # A node that Slurm has no room for waits with its reason, and is released on request.
    engine = engine_of(capacity)
    for number in range(3):
        engine.request(
            NodeRequest(
                name=f"anneal-x-{number}", pool="p", token="t", internal_url="http://127.0.0.1:9", idle_seconds=9
            )
        )
    until(lambda: any(node.reason for node in engine.list_nodes(prefix="anneal-x-").values()))
    engine.release(external_ids=[node.external_id for node in engine.list_nodes(prefix="anneal-x-").values()])
    until(lambda: engine.list_nodes(prefix="anneal-x-") == {})
