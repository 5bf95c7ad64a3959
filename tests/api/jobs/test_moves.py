"""Moving a queued job to a pool where it starts sooner: what is offered, what it costs, and that it happens once."""

import re
from datetime import timedelta
from decimal import Decimal

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from apps.billing.models import Hold
from apps.catalog.operations import set_price
from apps.contracts import runs as wire
from apps.contracts.failures import FailureCode
from apps.contracts.worker_api import ClaimRequest
from apps.core.database.clock import db_now
from apps.core.errors import InvalidState
from apps.core.models import AuditEntry
from apps.core.money import usd_to_nano
from apps.finetuning.jobs.control import request_cancellation
from apps.finetuning.jobs.moves import move_job
from apps.finetuning.models import FineTuningJob, GpuPool, QueueShare, Worker
from apps.finetuning.runs import members
from apps.finetuning.runs.leases import reclaim_expired_leases
from apps.finetuning.usage import quotas
from tests.factories.market import Market
from tests.support.attempts import Attempt, paused_at
from tests.support.database import at_once
from tests.support.pages import text

JOBS = "/v1/fine_tuning/jobs"


def claim(pool: str):
    return members.claim(worker=Worker.objects.get(pool__name=pool), request=ClaimRequest())


@pytest.fixture
def market(organization) -> Market:
    with transaction.atomic():
        market = Market(organization)
        quotas.set_quota(organization=organization, by="system", now=db_now(), concurrent_gpus=8)
    GpuPool.objects.exclude(name__in=("h100", "h200", "l4")).update(is_open=False)
    return market


@pytest.fixture
def waiting(market, key, api_client) -> FineTuningJob:
    """A job that waits behind another one for the only GPU of h100; h200 has eight free ones."""
    body = {"model": market.base_model.name, "training_file": market.version.pk, "compute": {"pool": "h100"}}
    first, second = (api_client(key).post(JOBS, body, format="json").json()["id"] for _ in range(2))
    assert claim("h100").spec.job_id == first
    return FineTuningJob.objects.get(pk=second)


def address(job: FineTuningJob) -> str:
    return f"/api{JOBS}/{job.pk}/moves"


@pytest.mark.slow
def test_a_waiting_job_moves_with_one_call_and_its_money_follows(waiting, key, api_client) -> None:
    client, old = api_client(key), Hold.objects.get(pk=waiting.hold_id)

    offered = client.get(address(waiting)).json()["data"]
    best = next(each for each in offered if each["pool"] == "h200")
    asked = {"option": best["option"], "quoted_max_usd": best["maximum_usd"]}
    moved = client.post(address(waiting), asked, format="json").json()

    assert [each["pool"] for each in offered] == ["h200"]  # l4 holds no model of this size
    assert best["starts_after_seconds"] == 0 and best["sooner_seconds"] > 60
    assert (moved["status"], moved["pool"], moved["spend_cap_usd"]) == ("queued", "h200", best["maximum_usd"])
    job = FineTuningJob.objects.get(pk=waiting.pk)
    assert [(run.status, run.pool.name) for run in job.runs.order_by("attempt")] == [
        ("cancelled", "h100"),
        ("queued", "h200"),
    ]
    old.refresh_from_db()
    assert (old.status, old.captured_nano) == ("closed", 0)
    assert Hold.objects.get(pk=job.hold_id).amount_nano == usd_to_nano(Decimal(best["maximum_usd"]))
    assert job.price_rule.sku == "training:h200" and job.estimate["gpu_count"] == job.gpu_count
    assert dict(QueueShare.objects.values_list("pool__name", "queued")) == {"h100": 0, "h200": 1}
    entry = AuditEntry.objects.get(action="job.moved")
    assert (entry.target, entry.details["from_pool"], entry.details["to_pool"]) == (job.pk, "h100", best["option"])
    assert client.get(f"{JOBS}/{job.pk}/events").json()["data"][0]["message"] == "Moved to h200"
    assert claim("h200").spec.job_id == job.pk
    assert client.get(address(waiting)).json()["data"] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"option": "h200", "quoted_max_usd": "0.01"}, "maximum_raised", "quoted_max_usd"),
        ({"option": "nowhere", "quoted_max_usd": "99"}, "invalid_value", "option"),
        ({"option": "", "quoted_max_usd": "99"}, "invalid_value", "option"),
        ({"option": ":8", "quoted_max_usd": "99"}, "invalid_value", "option"),
        ({"option": "l4", "quoted_max_usd": "99"}, "cannot_launch", "option"),
        ({"option": "h100", "quoted_max_usd": "99"}, "invalid_state", "option"),
        ({"option": "h200:3", "quoted_max_usd": "99"}, "invalid_value", "option"),
        ({"option": "h200"}, "missing_required_parameter", "quoted_max_usd"),
    ],
)
def test_a_refused_move_leaves_the_job_where_it_is(waiting, key, api_client, body, code: str, param: str) -> None:
    before = FineTuningJob.objects.filter(pk=waiting.pk).values().get()

    error = api_client(key).post(address(waiting), body, format="json").json()["error"]

    assert (error["code"], error["param"]) == (code, param)
    assert FineTuningJob.objects.filter(pk=waiting.pk).values().get() == before
    assert [run.status for run in waiting.runs.all()] == ["queued"]


@pytest.mark.slow
def test_a_move_that_the_balance_does_not_pay_leaves_job_and_hold(waiting, key, api_client) -> None:
    set_price(sku="training:h200", unit="gpu_ms", price_nano=10**17, per=3_600_000, by="user_1", now=db_now())

    asked = {"option": "h200", "quoted_max_usd": "9000000000"}
    error = api_client(key).post(address(waiting), asked, format="json").json()["error"]

    assert (error["code"], error["param"]) == ("insufficient_quota", None) and "cap" not in error["message"]
    job = FineTuningJob.objects.get(pk=waiting.pk)
    assert (job.pool.name, job.hold_id) == ("h100", waiting.hold_id)
    assert [hold.status for hold in Hold.objects.filter(source=job.pk)] == ["open"]


@pytest.mark.slow
def test_the_page_moves_it_with_one_click(waiting, client_for, alice, vera) -> None:
    page = text(client_for(alice).get(f"/jobs/{waiting.pk}"))
    form = dict(re.findall(r'<input type="hidden" name="(option|cap)" value="([^"]+)"', page))

    client_for(alice).post(f"/jobs/{waiting.pk}/move", form)

    assert "h200" in page and "can start it sooner" in page and "within seconds" in page
    assert FineTuningJob.objects.get(pk=waiting.pk).pool.name == "h200"
    assert "can start it sooner" not in text(client_for(vera).get(f"/jobs/{waiting.pk}"))


def test_a_job_that_a_machine_took_does_not_move(waiting, key, api_client) -> None:
    running = FineTuningJob.objects.exclude(pk=waiting.pk).get()

    answer = api_client(key).post(address(running), {"option": "h200", "quoted_max_usd": 9}, format="json")

    assert answer.json()["error"]["code"] == "invalid_state"
    assert "waits in a queue" in answer.json()["error"]["message"]
    assert api_client(key).get(address(running)).json()["data"] == []


@pytest.fixture
def lost(market, key, api_client) -> FineTuningJob:
    """A job that lost its machine after a checkpoint, half way; no other machine of h100 is online."""
    body = {"model": market.base_model.name, "training_file": market.version.pk, "compute": {"pool": "h100"}}
    job = FineTuningJob.objects.get(pk=api_client(key).post(JOBS, body, format="json").json()["id"])
    attempt = Attempt(claim("h100")).start(total_steps=10)
    attempt.checkpoint(step=5, seconds=120)
    attempt.fall_silent()
    assert reclaim_expired_leases() == 1
    Worker.objects.filter(pool__name="h100").update(last_seen_at=db_now() - timedelta(hours=1))
    return job


@pytest.mark.slow
def test_a_job_that_lost_its_machine_moves_with_its_checkpoint_and_is_billed_at_both_prices(
    lost, key, api_client, client_for, alice
) -> None:
    client, old = api_client(key), Hold.objects.get(pk=lost.hold_id)
    of_h100 = round(120 * 2_690_000_000 / 3600)

    (best,) = client.get(address(lost)).json()["data"]
    asked = {"option": best["option"], "quoted_max_usd": best["maximum_usd"]}
    moved = client.post(address(lost), asked, format="json").json()

    job = FineTuningJob.objects.get(pk=lost.pk)
    assert (moved["status"], moved["pool"], moved["spend_cap_usd"]) == ("queued", "h200", best["maximum_usd"])
    assert (job.cost_nano, job.moved_nano, job.moved_gpu_ms) == (of_h100, of_h100, 120_000)
    assert list(job.runs.order_by("attempt").values_list("status", flat=True)) == ["lost", "cancelled", "queued"]
    old.refresh_from_db()
    assert (old.status, old.captured_nano) == ("closed", of_h100)
    assert Hold.objects.get(pk=job.hold_id).amount_nano == job.spend_cap_nano - of_h100
    assert "to resume from step 5" in client.get(f"{JOBS}/{job.pk}/events").json()["data"][0]["message"]

    attempt = Attempt(claim("h200"))
    assert attempt.claimed.spec.resume_from.step == 5
    attempt.start(total_steps=10, start_step=5)
    request_cancellation(job=job, by=alice.pk, now=db_now())
    attempt.checkpoint(step=8, seconds=90)
    attempt.finish(wire.Stopped(reason="cancelled", step=8, training_seconds=90))

    job.refresh_from_db()
    assert job.cost_nano == of_h100 + 90_000 * 3_490_000_000 // 3_600_000
    assert sum(Hold.objects.filter(source=job.pk).values_list("captured_nano", flat=True)) == job.cost_nano
    assert not Hold.objects.filter(source=job.pk, status="open").exists()
    charge = client_for(alice).get(f"/why/{old.pk}").context
    assert [(each["run"].pool.name, each["cost_nano"]) for each in charge["attempts"]] == [
        ("h100", of_h100),
        ("h100", 0),
    ]


@pytest.mark.slow
def test_a_checkpoint_that_the_other_pool_refuses_is_not_paid(lost, key, api_client, alice) -> None:
    client, old = api_client(key), Hold.objects.get(pk=lost.hold_id)
    (best,) = client.get(address(lost)).json()["data"]
    client.post(address(lost), {"option": best["option"], "quoted_max_usd": best["maximum_usd"]}, format="json")

    Attempt(claim("h200")).finish(wire.Failed(code=FailureCode.CHECKPOINT_INVALID, message="It differs."))
    job = FineTuningJob.objects.get(pk=lost.pk)
    assert (job.status, job.moved_gpu_ms, job.moved_nano) == ("queued", 0, 0)
    request_cancellation(job=job, by=alice.pk, now=db_now())

    job.refresh_from_db()
    old.refresh_from_db()
    assert (job.status, job.cost_nano) == ("cancelled", 0)
    assert old.refunded_nano == old.captured_nano > 0


@pytest.mark.slow
def test_a_checkpoint_that_a_third_pool_refuses_is_taken_off_at_the_price_of_the_second(lost, alice) -> None:
    def move(option: str) -> None:
        job = FineTuningJob.objects.get(pk=lost.pk)
        move_job(job=job, option=option, by=alice.pk, now=db_now(), shown_max_nano=10**12)

    move("h200")
    second = Attempt(claim("h200")).start(total_steps=10, start_step=5)
    second.checkpoint(step=8, seconds=90)
    second.fall_silent()
    assert reclaim_expired_leases() == 1
    set_price(sku="training:h100", unit="gpu_ms", price_nano=10**9, per=3_600_000, by="user_1", now=db_now())
    Worker.objects.filter(pool__name="h100").update(last_seen_at=db_now())
    move("h100")
    of_h100, of_h200 = round(120 * 2_690_000_000 / 3600), 90_000 * 3_490_000_000 // 3_600_000
    job = FineTuningJob.objects.get(pk=lost.pk)
    assert (job.moved_gpu_ms, job.moved_nano) == (210_000, of_h100 + of_h200)

    Attempt(claim("h100")).finish(wire.Failed(code=FailureCode.CHECKPOINT_INVALID, message="It differs."))

    job.refresh_from_db()
    assert (job.status, job.moved_gpu_ms, job.moved_nano) == ("queued", 120_000, of_h100)


@pytest.mark.slow
def test_a_job_that_began_moves_only_where_it_can_go_on(lost, key, api_client) -> None:
    asked = {"option": "h200:2", "quoted_max_usd": "99"}

    error = api_client(key).post(address(lost), asked, format="json").json()["error"]

    assert (error["code"], error["param"]) == ("cannot_launch", "option")
    assert "began on one GPU" in error["message"]
    assert FineTuningJob.objects.get(pk=lost.pk).pool.name == "h100"


@pytest.mark.slow
@pytest.mark.parametrize(("cap", "new_cap"), [({}, "1"), ({"max_cost_usd": "0.5"}, "2")])
def test_the_cap_set_at_a_resume_goes_with_the_job(market, key, api_client, cap: dict[str, str], new_cap: str) -> None:
    client = api_client(key)
    body = {"model": market.base_model.name, "training_file": market.version.pk, "compute": {"pool": "h100"}}
    job = FineTuningJob.objects.get(pk=client.post(JOBS, body | {"budget": cap}, format="json").json()["id"])
    paused_at(Attempt(claim("h100")).start(), job, step=5, seconds=660)  # for 49 cents
    client.post(f"{JOBS}/{job.pk}/resume", {"budget": {"max_cost_usd": new_cap}}, format="json")
    Worker.objects.filter(pool__name="h100").update(last_seen_at=db_now() - timedelta(hours=1))

    (best,) = client.get(address(job)).json()["data"]
    asked = {"option": best["option"], "quoted_max_usd": best["maximum_usd"]}
    moved = client.post(address(job), asked, format="json").json()

    assert (moved["pool"], moved["spend_cap_usd"], best["maximum_usd"]) == ("h200", new_cap, new_cap)
    job.refresh_from_db()
    assert Hold.objects.get(pk=job.hold_id).amount_nano == usd_to_nano(Decimal(new_cap)) - job.cost_nano


@pytest.mark.slow
def test_a_move_locks_the_limits_before_the_shares_as_claims_and_admissions_do(waiting, alice) -> None:
    with CaptureQueriesContext(connection) as asked:
        move_job(job=waiting, option="h200", by=alice.pk, now=db_now(), shown_max_nano=10**11)

    locks = [each["sql"] for each in asked if "advisory_xact_lock" in each["sql"] or "FOR UPDATE" in each["sql"]]
    limits = next(place for place, sql in enumerate(locks) if "quota:" in sql)
    shares = next(place for place, sql in enumerate(locks) if "finetuning_queueshare" in sql)
    assert limits < shares, "a claim holds the limits while it waits for the share"


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_of_a_claim_and_a_move_at_once_one_wins(waiting, alice) -> None:
    machine = Worker.objects.get(pool__name="h100")
    Worker.objects.filter(pk=machine.pk).update(gpus=machine.gpus * 2)

    def act(number: int) -> object:
        if number:
            return claim("h100")
        return move_job(job=waiting, option="h200", by=alice.pk, now=db_now(), shown_max_nano=10**11)

    moved, claimed = at_once(act, 2)

    job = FineTuningJob.objects.get(pk=waiting.pk)
    if isinstance(moved, InvalidState):
        assert claimed.spec.job_id == job.pk and job.pool.name == "h100"
    else:
        assert claimed is None and job.pool.name == "h200"
    assert Hold.objects.filter(source=job.pk, status="open").count() == 1
