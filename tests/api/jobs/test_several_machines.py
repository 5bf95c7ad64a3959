"""A job on several machines of a pool: quoted over the network between them, asked for, claimed together and billed."""

from decimal import Decimal

import pytest
from django.db import transaction

from apps.contracts.failures import FailureCode
from apps.contracts.worker_api import ClaimRequest
from apps.core.database.clock import db_now
from apps.finetuning.jobs.retries import retry_job
from apps.finetuning.models import FineTuningJob, GpuPool, Run, Worker
from apps.finetuning.runs import members
from apps.finetuning.runs.attempts import fail_job
from apps.finetuning.runs.leases import Lease, reclaim_expired_leases
from apps.finetuning.usage import quotas
from tests.factories.market import MACHINE_OFFER, Market, join_machines
from tests.support.attempts import Attempt

URL, JOBS = "/api/v1/estimates", "/v1/fine_tuning/jobs"


@pytest.fixture
def body(organization) -> dict[str, object]:
    """Two machines with four H200 each that reach each other."""
    with transaction.atomic():
        market = Market(organization)
        quotas.set_quota(organization=organization, by="system", now=db_now(), concurrent_gpus=16)
    GpuPool.objects.exclude(name="h200").update(is_open=False)
    join_machines()
    return {"model": market.base_model.name, "training_file": market.version.pk, "recipe": {"batch_size": 32}}


@pytest.mark.slow
def test_machines_are_quoted_held_and_claimed_together(post, body) -> None:
    alone = {option["id"]: option for option in post(URL, body)["pools"]}
    options = {option["id"]: option for option in post(URL, body | {"node_count": 2})["pools"]}
    job = post(JOBS, body | {"compute": {"pool": "h200", "gpu_count": 8, "node_count": 2}})

    assert all((option["node_count"], option["gpu_count"] % 2) == (2, 0) for option in options.values())
    # The gradients of two GPUs cross the network instead of NVLink.
    seconds = [each["h200:2"]["estimate"]["train_seconds_p50"] for each in (alone, options)]
    assert seconds[0] < seconds[1] < 2 * seconds[0]
    assert options["h200:2"]["finish_seconds"] is not None
    assert (job["gpu_count"], job["node_count"]) == (8, 2)
    assert Decimal(job["held_usd"]) == Decimal(options["h200:8"]["hold_usd"])

    first, second = Worker.objects.filter(pool__name="h200").order_by("pk")
    request = ClaimRequest(address="10.0.0.1", port=29_500)
    led, joined = (members.claim(worker=worker, request=request) for worker in (first, second))
    assert (led.lease_id, led.spec.gpus_here, joined.spec.group.rank) == (joined.lease_id, 4, 1)
    assert (led.spec.parallelism, Run.objects.get().job.node_count) == ("ddp", 2)


@pytest.mark.parametrize(
    ("compute", "recipe", "param", "said"),
    [
        ({"gpu_count": 3, "node_count": 2}, {}, "compute.gpu_count", "give a multiple of 2"),
        ({"pool": "h200:5", "node_count": 2}, {}, "compute.gpu_count", "give a multiple of 2"),
        ({"gpu_count": 6, "node_count": 2}, {}, "compute.gpu_count", "not offered on 6 GPUs"),
        ({"node_count": 2}, {"cpu_offload": True}, "compute.node_count", "cpu_offload"),
        ({"node_count": 3}, {}, "recipe.batch_size", "cannot share a batch of 32"),
        ({"node_count": 4}, {}, "compute.pool", "needs 4 machines that can reach each other. This pool has 2 now."),
        ({"node_count": 0}, {}, "compute.node_count", ""),
    ],
)
def test_what_several_machines_cannot_do_is_refused_by_its_field(post, body, compute, recipe, param, said) -> None:
    asked = body | {"compute": compute, "recipe": {"batch_size": 32} | recipe}

    error = post(JOBS, asked, status=400)["error"]

    assert (error["param"], said in error["message"]) == (param, True), error
    assert not FineTuningJob.objects.exists()


def test_machines_that_lack_the_base_model_do_not_count(post, body) -> None:
    Worker.objects.filter(hostname="two").update(offer=MACHINE_OFFER | {"base_models": ["other"]})

    asked = body | {"compute": {"pool": "h200", "gpu_count": 8, "node_count": 2}}

    assert "This pool has 1 now." in post(JOBS, asked, status=400)["error"]["message"]


@pytest.mark.slow
def test_a_failed_job_is_started_again_on_as_many_machines(post, body) -> None:
    job = FineTuningJob.objects.get(
        pk=post(JOBS, body | {"compute": {"pool": "h200", "gpu_count": 8, "node_count": 2}})["id"]
    )
    with transaction.atomic():
        Run.objects.filter(job=job).update(status="cancelled", finished_at=db_now())
        fail_job(job=job, code=FailureCode.INTERNAL_ERROR, message="", now=db_now())

    again = retry_job(job=FineTuningJob.objects.get(pk=job.pk), by=job.created_by, now=db_now())

    assert (again.gpu_count, again.node_count) == (8, 2)


@pytest.mark.slow
def test_a_model_that_one_gpu_does_not_hold_is_divided_within_each_machine(post, body) -> None:
    """Only one GPU of each machine: the whole model crosses the network. With several, only the gradients do."""
    GpuPool.objects.filter(name="h200").update(memory_bytes=28 * 2**30)

    options = {option["id"]: option for option in post(URL, body | {"node_count": 2})["pools"]}
    post(JOBS, body | {"compute": {"pool": "h200", "gpu_count": 8, "node_count": 2}})

    across, within = (options[key]["estimate"] for key in ("h200:2", "h200:8"))
    assert {across["parallelism"], within["parallelism"]} == {"zero3"}
    assert within["train_seconds_p50"] < across["train_seconds_p50"] / 8  # four times as many GPUs
    request = ClaimRequest(address="10.0.0.1", port=29_500)
    led = [members.claim(worker=worker, request=request) for worker in Worker.objects.filter(pool__name="h200")][-1]
    assert (led.spec.parallelism, led.spec.model_copies) == ("fsdp", 2)


def test_a_model_that_no_machine_holds_has_no_way_into_the_hosts_memory(post, body) -> None:
    GpuPool.objects.filter(name="h200").update(memory_bytes=3 * 2**30)

    [option] = post(URL, body | {"node_count": 2})["pools"]

    assert (option["is_launchable"], option["cost_usd"]["p50"]) == (False, None)
    assert {way["key"] for way in option["ways_to_fit"]}.isdisjoint({"offload", "gpu_count"})


def test_an_estimate_for_several_machines_refuses_the_hosts_memory_by_its_own_field(post, body) -> None:
    asked = body | {"node_count": 2, "recipe": {"batch_size": 32, "cpu_offload": True}}

    error = post(URL, asked, status=400)["error"]

    assert (error["param"], "cpu_offload" in error["message"]) == ("node_count", True)


@pytest.mark.slow
def test_a_job_that_lost_a_machine_goes_on_on_one_with_as_many_gpus(post, body, key, api_client) -> None:
    client, compute = api_client(key), {"pool": "h200", "gpu_count": 8, "node_count": 2}
    first, second = Worker.objects.filter(pool__name="h200").order_by("pk")
    large = Worker.objects.create(
        pool=first.pool, hostname="three", credential_sha256="3", last_seen_at=db_now(), gpus=first.gpus * 2
    )
    job = FineTuningJob.objects.get(pk=post(JOBS, body | {"compute": compute})["id"])
    request = ClaimRequest(address="10.0.0.1", port=29_500)
    attempt = Attempt(members.claim(worker=first, request=request)).start(total_steps=10)
    joined = members.claim(worker=second, request=request)
    members.heartbeat(lease=Lease(id=joined.lease_id, token=joined.lease_token))
    attempt.checkpoint(step=5, seconds=120)
    attempt.fall_silent()
    assert reclaim_expired_leases() == 1
    Worker.objects.filter(pk=first.pk).update(revoked_at=db_now())

    place = f"/api{JOBS}/{job.pk}/moves"
    (move,) = client.get(place).json()["data"]
    assert (move["option"], move["node_count"], move["sooner_seconds"]) == ("h200:8", 1, None)
    asked = {"option": "h200:8", "quoted_max_usd": move["maximum_usd"]}
    wrong = client.post(place, asked | {"node_count": 65}, format="json").json()["error"]
    moved = client.post(place, asked | {"node_count": 1}, format="json").json()

    assert (wrong["code"], wrong["param"]) == ("invalid_value", "node_count")
    assert (moved["status"], moved["gpu_count"], moved["node_count"]) == ("queued", 8, 1)
    spec = members.claim(worker=large, request=ClaimRequest()).spec
    assert (spec.group, spec.gpus_here, spec.resume_from.step) == (None, 8, 5)
    job.refresh_from_db()
    assert job.moved_gpu_ms == job.billed_gpu_ms == 8 * 120_000
