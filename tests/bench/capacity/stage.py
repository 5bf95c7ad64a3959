"""The control plane as its own processes, an elastic pool on a real Slurm, and tenants that order jobs."""

import itertools
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.embedded import ensure_running
from scripts.processes import REPOSITORY
from tests.services.environment import bench_environment
from tests.services.ports import free_port
from tests.services.programs import running_program, wait_until_up
from tests.services.slurm import SlurmCluster, running_slurm

TENANTS = 4
_PROGRAMS = {"internal": "internal", "celery": "sys", "beat": "sys"}  # with their roles
_ROWS, _BATCH_SIZE, _EPOCHS = 180, 12, 2  # of a job: the steps of child.py
# The arguments are: -m gpu_workers.trainer.polling --exit-when-idle SECONDS
_PYTHON = """#!/bin/sh
export ANNEAL_NODE_ADDRESS=127.0.0.1 ANNEAL_TRAINER_THREADS=1
cd {repository}
[ -e {real} ] && exec {repository}/.venv-engines/bin/python "$@" 2> {logs}/$SLURM_JOB_ID.log
exec {python} -m tests.bench.capacity.worker {adapter} "$4" 2> {logs}/$SLURM_JOB_ID.log
"""


@dataclass(frozen=True)
class Stage:
    """The platform. While the file `real` exists, nodes start the real worker; else one that trains without torch."""

    cluster: SlurmCluster
    pool_id: str
    real: Path
    _base_model: Any
    _organizations: tuple[Any, ...]

    def order(self, *, nodes: int, number: int) -> Any:
        """Return a new job on so many nodes, of each tenant in turn."""
        from tests.factories.finetuning import make_job
        from tests.factories.money import USD

        recipe = {"batch_size": _BATCH_SIZE, "epochs": _EPOCHS}
        return make_job(
            self._organizations[number % TENANTS], self._base_model,
            rows=_ROWS, node_count=nodes, hyperparameters=recipe, spend_cap_nano=2 * USD,
        )  # fmt: skip


@contextmanager
def running_stage(home: Path, *, nodes: int, idle_seconds: int) -> Iterator[Stage]:
    """Start everything in an empty folder; it ends with the block. Raises NotStarted."""
    with ensure_running(home, durable=True) as services, ExitStack() as stack:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        common = {"ANNEAL_INTERNAL_URL": url, "CELERY_SKIP_CHECKS": "1"}
        os.environ.update(bench_environment(home, services, "owner") | common)
        (slurm_home := home / "slurm").mkdir()
        cluster = stack.enter_context(running_slurm(slurm_home, nodes=nodes))
        stage = _make_world(home, cluster, nodes, idle_seconds)
        values = {"internal_listen": f"--host 127.0.0.1 --port {port}", "home": str(home)}
        for name, role in _PROGRAMS.items():
            environ = bench_environment(home, services, role) | common
            if name == "internal":
                environ["DJANGO_SETTINGS_MODULE"] = "apps.config.settings.internal"
            stack.enter_context(running_program(name, home, values, environ))
        wait_until_up(f"{url}/internal/v1/claim", home)
        yield stage


def _make_world(home: Path, cluster: SlurmCluster, nodes: int, idle_seconds: int) -> Stage:
    """Migrate an empty database and fill it."""
    import django

    django.setup()
    from django.core.management import call_command
    from django.db import transaction

    from apps.core.database.clock import db_now
    from apps.finetuning.models import GpuPool, Worker
    from apps.finetuning.models.pools import PricePolicy
    from apps.finetuning.pools.capacity.settings import set_capacity
    from apps.finetuning.usage import quotas
    from tests.factories.accounts import make_organization, make_user
    from tests.factories.finetuning import TrainingSetup
    from tests.factories.money import USD, give_credit

    call_command("migrate", verbosity=0)
    owners = [make_user(f"tenant{number}") for number in range(TENANTS)]
    organizations = [make_organization(owner.name, owner=owner) for owner in owners]
    floor = TrainingSetup(organizations[0])
    for organization in organizations:
        give_credit(organization, 1_000 * USD)
        with transaction.atomic():
            quotas.set_quota(
                organization=organization, by="system", now=db_now(),
                concurrent_gpus=None, queued_jobs=None, gpu_seconds_per_month=None,
            )  # fmt: skip
    Worker.objects.filter(pk=floor.worker.pk).update(revoked_at=db_now())
    GpuPool.objects.filter(pk=floor.pool.pk).update(price_policy=PricePolicy.METERED)
    real = home / "real"
    set_capacity(
        pool=floor.pool, kind="slurm", minimum=0, maximum=nodes, gpus_per_node=1, idle_seconds=idle_seconds,
        node_nano_per_hour=0, budget_nano_per_hour=None, by="system",
        settings={
            "partition": "train", "install_dir": str(_install(home, real, floor.base_model)),
            "work_dir": str(home / "nodes"), "slurm_conf": str(cluster.conf),
            "model_root": str(REPOSITORY / "demo"),
        },
    )  # fmt: skip
    return Stage(cluster, floor.pool.pk, real, floor.base_model, tuple(organizations))


def _install(home: Path, real: Path, base_model: Any) -> Path:
    """Return a folder that looks like Anneal on a node."""
    from tests.factories.finetuning import adapter_files

    adapter, logs, folder = home / "adapter", home / "node-logs", home / "anneal"
    python = folder / ".venv-engines" / "bin" / "python"
    for each in (adapter, logs, python.parent):
        each.mkdir(parents=True)
    for name, body in adapter_files(base_model).items():
        (adapter / name).write_bytes(body)
    python.write_text(
        _PYTHON.format(repository=REPOSITORY, real=real, python=sys.executable, adapter=adapter, logs=logs)
    )
    python.chmod(0o755)
    return folder


def nodes_of_jobs(count: int) -> list[int]:
    """Return as many numbers of nodes, from 1 to 4 in turn."""
    return list(itertools.islice(itertools.cycle((1, 2, 3, 4)), count))
