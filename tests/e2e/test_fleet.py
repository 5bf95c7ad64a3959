"""A base model without a replica: a request starts one on a real Slurm and waits, and is answered and billed once."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from xmlrpc.client import ServerProxy

import openai
import pytest
from supervisor.xmlrpc import SupervisorTransport

from tests.e2e.platform import ROOT, Platform, find_socket, until
from tests.services.slurm import ask_slurm, needs_slurm

pytestmark = [pytest.mark.nightly, needs_slurm]
_SETTING_UP = """
from apps.catalog.models import BaseModel, GpuType
from apps.core.database.tenancy import system
from apps.finetuning.pools.capacity.fleets import set_fleet
from apps.finetuning.pools.capacity.settings import set_capacity
from apps.finetuning.pools.operations import create_pool
with system():
    pool = create_pool(name="serving", gpu_type=GpuType.objects.get(key="cpu"), memory_bytes=2**33, by="user_test")
    set_capacity(
        pool=pool, kind="slurm", minimum=0, maximum=0, gpus_per_node=1, idle_seconds=30, node_nano_per_hour=0,
        budget_nano_per_hour=None, by="user_test", settings={settings},
    )
    set_fleet(
        pool=pool, base_model=BaseModel.objects.get(name="{model}"), minimum=0, maximum=1, requests_per_replica=8,
        idle_seconds=30, by="user_test",
    )
"""


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch, slurm: Path, tmp_path: Path) -> Iterator[Platform]:
    """Return a platform whose only replicas are those that Slurm starts."""
    home = Path(tempfile.mkdtemp(prefix="anneal-"))
    for name in [name for name in os.environ if name.startswith(("ANNEAL_", "DATABASE_", "REDIS_", "CELERY_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("ANNEAL_HOME", str(home))
    monkeypatch.setenv("ANNEAL_REPLICA_ADDRESSES", "127.0.0.0/8")
    running = Platform(home)
    try:
        settings = {
            "partition": "train", "install_dir": str(_install(tmp_path)), "work_dir": str(home / "nodes"),
            "slurm_conf": str(slurm),
        }  # fmt: skip
        program = _SETTING_UP.format(settings=settings, model=running.model)
        command = f'set -a; . {home}/env; set +a; exec {sys.executable} manage.py shell -c "$PROGRAM"'
        environment = running.environment | {"PROGRAM": program}
        subprocess.run(["sh", "-c", command], cwd=ROOT, env=environment, check=True)
        with ServerProxy(
            "http://localhost", transport=SupervisorTransport(None, None, f"unix://{find_socket(home)}")
        ) as proxy:
            groups = {program["name"]: program["group"] for program in proxy.supervisor.getAllProcessInfo()}
            for name in ("serving-agent", "vllm"):
                proxy.supervisor.stopProcess(f"{groups[name]}:{name}")
        yield running
    finally:
        assert running.stop() == 0, (home / "launch.log").read_text()[-3000:]
    shutil.rmtree(home)


def _install(tmp_path: Path) -> Path:
    """Return a folder that looks like Anneal on a node, which is reached on loopback."""
    python = tmp_path / "anneal" / ".venv-engines" / "bin" / "python"
    python.parent.mkdir(parents=True)
    real = ROOT / ".venv-engines" / "bin" / "python"
    log = f"{tmp_path}/node-$$.log"
    python.write_text(f'#!/bin/sh\ncd {ROOT} && ANNEAL_NODE_ADDRESS=127.0.0.1 exec {real} "$@" > {log} 2>&1\n')
    python.chmod(0o755)
    return tmp_path / "anneal"


def test_a_request_from_zero_is_answered_and_billed_once(platform: Platform, slurm: Path) -> None:
    client = platform.client.with_options(timeout=180, max_retries=0)

    def has_jobs() -> bool:
        return bool(ask_slurm(slurm, "squeue", "--noheader"))

    def ask() -> int:
        """Return the tokens of the answer; 0 before the pool was looked at for the first time."""
        begin = time.monotonic()
        try:
            answer = client.chat.completions.create(
                model=platform.model, messages=[{"role": "user", "content": "Where is my card?"}], max_tokens=8
            )
        except openai.InternalServerError as error:
            assert error.status_code == 503 and time.monotonic() - begin < 10, error
            return 0
        print(f"\nzero to answer: {time.monotonic() - begin:.1f} s")  # noqa: T201
        return answer.usage.total_tokens if answer.usage else 0

    asked = [until(ask, 120, "no answer")]
    until(lambda: not has_jobs(), 180, "the replica stays")
    asked.append(ask())
    until(lambda: not has_jobs(), 180, "the replica stays")
    bill = platform.wait_for_settled_books()
    assert (bill["tokens_billed"], bill["ledger_sum_nano"]) == (sum(asked), 0)
