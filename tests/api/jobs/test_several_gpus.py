"""A job on several GPUs of one machine: asked for, held, counted, claimed, placed and billed as so many."""

import datetime
import threading
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal

import msgspec
import pytest
from django.db import connection, transaction

from apps.billing.models import Hold
from apps.contracts import runs as wire
from apps.contracts.worker_api import ClaimRequest
from apps.core.database.clock import db_now
from apps.finetuning.jobs.waits import WaitCause, explain_wait
from apps.finetuning.models import FineTuningJob, GpuPool, Run, Worker
from apps.finetuning.runs import claims, reports
from apps.finetuning.runs.leases import Lease, sha256_hex
from apps.finetuning.usage import quotas
from apps.finetuning.usage.occupancy import leased_gpus
from tests.factories.market import Market
from tests.support import attempts

URL, JOBS = "/api/v1/estimates", "/v1/fine_tuning/jobs"


@pytest.fixture
def market(organization) -> Market:
    with transaction.atomic():
        market = Market(organization)
        quotas.set_quota(organization=organization, by="system", now=db_now(), concurrent_gpus=8)
    GpuPool.objects.exclude(name__in=("h100", "h200")).update(is_open=False)
    return market


@pytest.fixture
def body(market) -> dict[str, object]:
    return {"model": market.base_model.name, "training_file": market.version.pk, "recipe": {"batch_size": 32}}


def small_worker(pool: GpuPool) -> Worker:
    gpus = [{"key": pool.gpu_type_id, "name": "one", "memory_bytes": pool.memory_bytes}]
    return Worker.objects.create(
        pool=pool, hostname="small", credential_sha256=sha256_hex("small"), last_seen_at=db_now(), gpus=gpus
    )


def test_the_option_asked_for_is_held_claimed_placed_and_billed(post, body, market) -> None:
    options = {option["id"]: option for option in post(URL, body)["pools"]}
    job = post(JOBS, body | {"compute": {"pool": "h200", "gpu_count": 4}})

    assert (job["pool"], job["gpu_count"]) == ("h200", 4)
    assert Decimal(job["held_usd"]) == Decimal(options["h200:4"]["hold_usd"])
    assert Hold.objects.get().amount_nano == int(Decimal(job["held_usd"]) * 10**9)

    pool = GpuPool.objects.get(name="h200")
    large = Worker.objects.get(pool=pool)
    assert claims.claim(worker=small_worker(pool), base_models=None) is None
    claimed = claims.claim(worker=large, base_models=None)

    spec, plan = claimed.spec, options["h200:4"]["estimate"]["plan"]
    assert (spec.gpu_count, spec.parallelism) == (4, plan["parallelism"])
    rows_at_a_time = spec.hyperparameters.batch_size // spec.hyperparameters.gradient_accumulation_steps
    assert rows_at_a_time == 4 * plan["micro_batch_size"]

    lease = Lease(id=claimed.lease_id, token=claimed.lease_token)
    started = wire.TrainingStarted(sequence=1, total_steps=10, start_step=0, rows=10, trained_tokens_per_epoch=10)
    reports.record_events(lease=lease, reported=(started,))
    run = Run.objects.get()
    run.training_started_at = db_now() - datetime.timedelta(hours=1)
    reports.make_durable(run, FineTuningJob.objects.get(), step=10, training_seconds=20.0)
    assert Run.objects.get().billed_gpu_ms == 4 * 20_000


def test_an_options_id_names_its_gpus_and_nothing_asked_takes_the_cheapest(post, body) -> None:
    named = post(JOBS, body | {"compute": {"pool": "h200:2"}, "dry_run": True})
    cheapest = post(JOBS, body | {"dry_run": True})

    assert (named["pool"], named["gpu_count"]) == ("h200", 2)
    assert cheapest["gpu_count"] == 1


@pytest.mark.parametrize(
    ("compute", "param", "said"),
    [
        ({"pool": "h200", "gpu_count": 3}, "compute.gpu_count", "Offered: 1, 2, 4"),
        ({"pool": "h200:2", "gpu_count": 4}, "compute.gpu_count", "names 2 GPUs"),
        ({"pool": "h200:many"}, "compute.pool", "no open GPU pool"),
        ({"pool": "h200", "gpu_count": 0}, "compute.gpu_count", ""),
    ],
)
def test_what_is_not_offered_is_refused_by_its_field(post, body, compute, param, said) -> None:
    error = post(JOBS, body | {"compute": compute}, status=400)["error"]

    assert error["param"] == param
    assert said in error["message"]


def test_more_than_the_worker_has_cannot_be_launched(post, body) -> None:
    error = post(JOBS, body | {"compute": {"pool": "h100", "gpu_count": 2}}, status=400)["error"]

    assert "A worker of this pool has 1 GPU." in error["message"]


@pytest.fixture
def machine(market) -> Worker:
    """A machine with four GPUs."""
    worker = Worker.objects.select_related("pool").get(pool__name="h200")
    worker.gpus = worker.gpus[:4]
    worker.save()
    return worker


@pytest.fixture
def launch(post, body):
    return lambda gpus: post(JOBS, body | {"compute": {"pool": "h200", "gpu_count": gpus}})["id"]


def claimed(machine: Worker, **options) -> str | None:
    answer = claims.claim(worker=machine, base_models=None, **options)
    return answer and answer.spec.job_id


@pytest.mark.slow
def test_runs_lease_no_more_gpus_than_the_machine_has(launch, machine) -> None:
    jobs = [launch(gpus) for gpus in (2, 1, 2, 1)]

    taken = [claimed(machine) for _ in range(4)]

    assert taken == [jobs[0], jobs[1], jobs[3], None]
    assert leased_gpus(workers=[machine.pk]) == {machine.pk: 4}


@pytest.mark.slow
def test_a_worker_that_uses_more_gpus_than_it_leased_gets_fewer(launch, machine) -> None:
    two, one = launch(2), launch(1)

    assert claimed(machine, free_gpus=0) is None
    assert claimed(machine, free_gpus=1) == one
    assert claimed(machine, free_gpus=99) == two
    launch(2)
    assert claimed(machine, free_gpus=99) is None  # three of four are leased


@pytest.mark.slow
def test_leases_that_a_restarted_worker_does_not_know_end(launch, machine) -> None:
    first, second = launch(2), launch(2)
    known = claims.claim(worker=machine, base_models=None, held=())
    assert claimed(machine, held=(known.lease_id,)) == second

    assert claimed(machine, held=(known.lease_id,)) is None  # perhaps the same claim, late
    Run.objects.update(leased_at=db_now() - datetime.timedelta(seconds=31))

    assert claimed(machine, held=(known.lease_id,)) == second  # its next attempt

    assert [(run.job_id, run.status) for run in Run.objects.order_by("created_at")] == [
        (first, "leased"), (second, "lost"), (second, "leased"),
    ]  # fmt: skip


@pytest.mark.slow
def test_a_large_job_is_not_overtaken_for_ever(launch, machine) -> None:
    small, large, later = launch(2), launch(4), launch(1)
    assert claimed(machine) == small
    assert claimed(machine) == later
    another = launch(1)
    ten_minutes_ago = db_now() - datetime.timedelta(minutes=11)
    Run.objects.filter(job=large).update(created_at=ten_minutes_ago)

    assert claimed(machine) is None

    FineTuningJob.objects.get(pk=large).runs.update(created_at=db_now())
    assert claimed(machine) == another


@pytest.fixture
def launch_long_ago(launch):
    def launch_one(gpus: int) -> str:
        job = launch(gpus)
        Run.objects.filter(job=job).update(created_at=db_now() - datetime.timedelta(minutes=11))
        return job

    return launch_one


@pytest.mark.slow
def test_a_machine_that_lost_gpus_keeps_none_for_a_job_that_it_can_never_take(
    launch, launch_long_ago, machine, settings
) -> None:
    launch_long_ago(4)
    small = launch(2)
    settings.ROOT_URLCONF = "apps.config.urls_internal"

    status, answer = attempts.post("claim", msgspec.json.encode(ClaimRequest(free_gpus=2, gpu_count=2)), "h200")

    assert (status, answer["spec"]["job_id"]) == (200, small)
    assert Worker.objects.get(pk=machine.pk).gpu_count == 2  # quotes offer no more


@pytest.mark.slow
def test_a_machine_that_leaves_a_large_job_waiting_is_not_the_one_that_keeps_gpus(
    launch, launch_long_ago, machine
) -> None:
    Worker.objects.create(
        pool=machine.pool, hostname="idle", credential_sha256="idle", last_seen_at=db_now(), gpus=machine.gpus
    )
    small = launch(2)
    assert claimed(machine) == small
    launch_long_ago(4)
    launch(1)

    assert claimed(machine) is None


@pytest.mark.slow
def test_runs_on_one_machine_share_its_own_memory(launch, machine) -> None:
    jobs = [launch(1), launch(1)]
    needed = FineTuningJob.objects.get(pk=jobs[0]).estimate["host_bytes"]
    assert needed > 3 * 2**30
    Worker.objects.filter(pk=machine.pk).update(memory_bytes=2 * needed - 1)

    assert [claimed(machine), claimed(machine)] == [jobs[0], None]

    Worker.objects.filter(pk=machine.pk).update(memory_bytes=2 * needed)
    assert claimed(machine) == jobs[1]


@pytest.mark.slow
def test_a_job_that_needs_much_of_the_machines_memory_is_not_overtaken_for_ever(
    launch, launch_long_ago, machine
) -> None:
    running = launch(1)
    assert claimed(machine) == running
    waiting, small = launch_long_ago(1), launch(1)
    needed = FineTuningJob.objects.get(pk=waiting).estimate["host_bytes"]
    Worker.objects.filter(pk=machine.pk).update(memory_bytes=needed)
    FineTuningJob.objects.filter(pk=small).update(estimate={})

    assert claimed(machine) is None

    Run.objects.filter(job=waiting).update(created_at=db_now())
    assert claimed(machine) == small


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_of_two_claims_at_once_the_second_counts_the_first(launch, machine, monkeypatch) -> None:
    jobs, list_candidates = [launch(4), launch(4)], claims.list_candidates
    with ThreadPoolExecutor(2) as threads:
        has_counted, other = threading.Event(), threading.Event()

        def wait_for_the_other(**known):
            has_counted.set()
            other.wait(0.5)
            return list_candidates(**known)

        def claim() -> str | None:
            try:
                return claimed(machine)
            finally:
                other.set()
                connection.close()

        monkeypatch.setattr(claims, "list_candidates", wait_for_the_other)
        first = threads.submit(claim)
        has_counted.wait(30)
        second = threads.submit(claim)

        assert (first.result(), second.result()) == (jobs[0], None)


@pytest.mark.slow
def test_the_quota_counts_gpus_not_runs(post, body, market) -> None:
    quotas.set_quota(organization=market.organization, by="system", now=db_now(), concurrent_gpus=3)
    refused = post(JOBS, body | {"compute": {"pool": "h200:4"}}, status=429)["error"]
    first, second = (post(JOBS, body | {"compute": {"pool": "h200:2"}}) for _ in range(2))

    assert (refused["param"], refused["code"]) == ("compute.gpu_count", "insufficient_quota")
    worker = Worker.objects.get(pool__name="h200")
    assert claims.claim(worker=worker, base_models=None).spec.job_id == first["id"]
    assert claims.claim(worker=worker, base_models=None) is None
    waiting = explain_wait(job=FineTuningJob.objects.get(pk=second["id"]), now=db_now())
    assert waiting is not None
    assert (waiting.cause, waiting.position) == (WaitCause.QUOTA, None)
    assert waiting.reason == "Waiting until 2 of your 3 concurrent GPUs are free."
