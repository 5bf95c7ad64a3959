"""Machines, each the real worker process, before the real control plane.

Two train one job, and one of them dies. One that is lent to another pool is given back and lent again.
"""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from django.db import transaction

from apps.adapters.models import AdapterVersion
from apps.billing.queries import get_ledger_sum_nano
from apps.contracts.worker_api import EnrollResponse
from apps.core.database.clock import db_now
from apps.finetuning.lifecycle import LEASE_SECONDS, REAPER_SECONDS
from apps.finetuning.models import Checkpoint, FineTuningJob, GpuPool, Run, RunMember, Worker
from apps.finetuning.models.pools import PricePolicy
from apps.finetuning.pools.operations import issue_worker_token
from apps.finetuning.runs.leases import reclaim_expired_leases
from apps.finetuning.runs.lending import ask_machines_back
from apps.finetuning.usage import quotas
from apps.finetuning.usage.charges import cost_of
from apps.finetuning.usage.occupancy import held_of
from tests.factories.catalog import DEMO_FOLDER
from tests.factories.finetuning import TrainingSetup, make_pool
from tests.factories.money import USD
from tests.support.attempts import charged
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[3]
PYTHON = ROOT / ".venv-engines" / "bin" / "python"
_SECONDS = 300.0  # on a busy machine


class Machine:
    """A worker process that has a folder and a credential of its own, and nothing else of the control plane."""

    def __init__(self, folder: Path, url: str, token: str) -> None:
        folder.mkdir()
        (folder / "token").write_text(token)
        self.folder = folder
        self._environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "ANNEAL_INTERNAL_URL": url,
            "ANNEAL_WORK_DIR": str(folder / "work"),
            "ANNEAL_ENROLL_TOKEN_FILE": str(folder / "token"),
            "ANNEAL_BASE_MODEL_ROOTS": str(DEMO_FOLDER.parent),
            "ANNEAL_NODE_ADDRESS": "127.0.0.1",
            "ANNEAL_TRAINER_THREADS": "1",
        }
        self.start()

    def start(self) -> None:
        """Start the process; again after its death, with what it left in its folder."""
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [PYTHON, "-m", "gpu_workers.trainer.polling"],
                cwd=ROOT,
                env=self._environment,
                stdout=log,
                stderr=log,
            )

    def kill(self) -> None:
        """Send kill -9, as a machine that lost its power would end."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(30)

    @property
    def worker_id(self) -> str:
        stored = (self.folder / "work" / "credential.json").read_bytes()
        return msgspec.json.decode(stored, type=EnrollResponse).worker_id


@pytest.fixture(autouse=True)
def metered(floor: TrainingSetup) -> None:
    """Let jobs take as long as a busy machine needs: a firm price pauses them at a few times the quoted maximum."""
    GpuPool.objects.filter(pk=floor.pool.pk).update(price_policy=PricePolicy.METERED)
    floor.pool.refresh_from_db()


@pytest.fixture
def machines(floor: TrainingSetup, internal_url: str, tmp_path: Path) -> Iterator[list[Machine]]:
    """Two machines of the pool that reach each other; none else takes runs."""
    Worker.objects.filter(pk=floor.worker.pk).update(cordoned_at=db_now())
    with transaction.atomic():
        quotas.set_quota(organization=floor.organization, by="system", now=db_now(), concurrent_gpus=2)
    tokens = [issue_worker_token(pool=floor.pool, kind="trainer", base_model=None, by="system") for _ in range(2)]
    started = [Machine(tmp_path / str(number), internal_url, token) for number, token in enumerate(tokens)]
    try:
        yield started
    finally:
        for machine in started:
            machine.kill()


def status_of(job: FineTuningJob) -> str:
    return FineTuningJob.objects.values_list("status", flat=True).get(pk=job.pk)


def until(holds: Callable[[], bool], machines: list[Machine]) -> None:
    """Wait until it holds; meanwhile leases expire and lent machines are asked back, as by the process `celery`."""

    def look() -> bool:
        reclaim_expired_leases()
        ask_machines_back(now=db_now())
        return holds()

    logs = [machine.folder / "log" for machine in machines]
    wait_until(look, lambda: "\n".join(log.read_text()[-3000:] for log in logs), seconds=_SECONDS)


@pytest.mark.nightly
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("is_first_killed", [False, True])
def test_a_machine_dies_and_the_job_resumes_on_both_from_its_last_checkpoint(
    machines, floor, organization, is_first_killed
):
    until(lambda: Worker.objects.filter(offer__isnull=False).count() == 2, machines)
    recipe = {"batch_size": 4, "epochs": 20, "lora_rank": 8, "lora_alpha": 16}
    job = floor.job(node_count=2, hyperparameters=recipe, spend_cap_nano=10 * USD)
    assert job.spend_cap_nano == 10 * USD  # far above the quote
    until(lambda: Checkpoint.objects.filter(job=job).exists(), machines)

    first, place = Run.objects.get(job=job), RunMember.objects.get()
    lost_id = first.worker_id if is_first_killed else place.worker_id
    assert {first.worker_id, place.worker_id} == {machine.worker_id for machine in machines}
    lost = next(machine for machine in machines if machine.worker_id == lost_id)
    lost.kill()
    killed_at = db_now()
    until(lambda: status_of(job) == "queued", machines)

    first.refresh_from_db()
    assert (first.finished_at - killed_at).total_seconds() < LEASE_SECONDS + REAPER_SECONDS
    assert held_of() == {}  # the other machine is free as well
    kept = Checkpoint.objects.filter(job=job).latest("step")
    assert (first.durable_step, first.billed_gpu_ms) == (kept.step, kept.billed_gpu_ms)
    trained_ms = (killed_at - first.training_started_at).total_seconds() * 1000
    assert 0 < first.billed_gpu_ms <= 2 * trained_ms
    assert charged(organization) == 0  # until the job ends

    lost.start()
    until(lambda: status_of(job) not in ("queued", "running"), machines)

    job = FineTuningJob.objects.get(pk=job.pk)
    assert job.status == "succeeded", job.error_message
    first, second = Run.objects.filter(job=job).order_by("attempt")
    assert (second.status, second.resume_from_id) == ("succeeded", kept.pk)
    assert {second.worker_id, second.members.get().worker_id} == {machine.worker_id for machine in machines}
    assert first.billed_gpu_ms == kept.billed_gpu_ms
    assert AdapterVersion.objects.get().source == second.pk
    assert charged(organization) == job.cost_nano == cost_of(job=job, gpu_ms=job.billed_gpu_ms)
    assert job.billed_gpu_ms >= first.billed_gpu_ms + second.billed_gpu_ms
    assert get_ledger_sum_nano() == 0
    assert held_of() == {}


@pytest.mark.nightly
@pytest.mark.django_db(transaction=True)
def test_a_lent_machine_is_given_back_through_a_checkpoint(floor, organization, internal_url, tmp_path):
    Worker.objects.filter(pk=floor.worker.pk).update(cordoned_at=db_now())
    with transaction.atomic():
        quotas.set_quota(organization=organization, by="system", now=db_now(), concurrent_gpus=None)
    low = make_pool("low")
    GpuPool.objects.filter(pk=low.pk).update(
        is_spot=True, interruptions_per_hour=1.0, borrows_from=floor.pool, price_policy=PricePolicy.METERED
    )
    token = issue_worker_token(pool=floor.pool, kind="trainer", base_model=None, by="system")
    machine = Machine(tmp_path / "lent", internal_url, token)
    recipe = {"batch_size": 4, "lora_rank": 8, "lora_alpha": 16}
    try:
        until(lambda: Worker.objects.exclude(pk=floor.worker.pk).exists(), [machine])
        long = floor.job(pool="low", hyperparameters=recipe | {"epochs": 20}, spend_cap_nano=10 * USD)
        until(lambda: FineTuningJob.objects.get(pk=long.pk).step > 0, [machine])
        own = floor.job(pool=floor.pool.name, hyperparameters=recipe | {"epochs": 1}, spend_cap_nano=10 * USD)
        until(lambda: status_of(own) == "succeeded", [machine])
        until(lambda: status_of(long) == "succeeded", [machine])
    finally:
        machine.kill()

    first, second = Run.objects.filter(job=long).order_by("attempt")
    assert (first.status, first.failure_code) == ("lost", "preempted") and first.return_requested_at
    assert second.resume_from.run == first and second.resume_from.step > 0
    [between] = Run.objects.filter(job=own)
    assert first.finished_at <= between.leased_at < between.finished_at <= second.leased_at
    assert {first.worker, second.worker, between.worker} == {first.worker}
    long.refresh_from_db()
    assert long.billed_gpu_ms >= first.billed_gpu_ms + second.billed_gpu_ms
    assert get_ledger_sum_nano() == 0
