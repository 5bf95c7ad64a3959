"""Retraining plans over the API: who may make them, what is refused with its field, changes, requests and history."""

from typing import Any

import pytest

from apps.accounts.roles import SCOPES
from apps.finetuning.models import FineTuningJob, Retraining, RetrainingPlan
from apps.serving.models import Alias
from tests.factories.accounts import make_key
from tests.factories.finetuning import make_training_file
from tests.factories.retraining import HELD_OUT, answer, make_production, tick, train
from tests.support.api.document import check_answer

PLANS = "/api/v1/fine_tuning/retraining_plans"


@pytest.fixture
def job(floor, key, claim) -> FineTuningJob:
    return make_production(floor, key, claim)


def wanted(job: FineTuningJob, **changes: Any) -> dict[str, Any]:
    asked = {
        "name": "support", "source_job": job.pk, "dataset": "support", "held_out": HELD_OUT, "alias": "production",
        "schedule": {"every": "week", "value": 1, "hour_utc": 3}, "max_usd": "20",
    }  # fmt: skip
    return {name: value for name, value in (asked | changes).items() if value is not ...}


def call(client: Any, method: str, path: str = "", body: object = None) -> tuple[int, dict[str, Any]]:
    sent = {} if body is None else {"data": body, "format": "json"}
    response = getattr(client, method)(f"{PLANS}{path}", **sent)
    check_answer(
        method.upper(), f"{PLANS}{path}", response.status_code, response.headers["Content-Type"], response.content
    )
    return response.status_code, response.json()


@pytest.mark.slow
def test_members_make_plans_and_others_do_not(
    api_client, job, organization, alice, bob, vera, rival, charlie, key
) -> None:
    member = make_key(organization, bob, scopes=frozenset({"view", "job.write", "inference", "adapter.write"}))
    made = call(api_client(member), "post", body=wanted(job))
    assert made[0] == 200, made[1]
    plan = made[1]
    assert (plan["max_usd"], plan["schedule"], plan["min_new_rows"]) == ("20", wanted(job)["schedule"], None)
    assert plan["held_out"]["name"] == HELD_OUT and plan["alias"]["name"].endswith(":production")
    assert plan["next_due_at"] and plan["testing_criteria"][0]["reference"] == "{{item.reference}}"

    viewer = api_client(make_key(organization, vera, scopes=frozenset({"view"})))
    outsider, anyone = api_client(make_key(rival, charlie)), api_client(None)
    one, runs = f"/{plan['id']}", f"/{plan['id']}/retrainings"
    for client, reads, writes in ((viewer, 200, 403), (outsider, 404, 404), (anyone, 401, 401)):
        assert (call(client, "get", one)[0], call(client, "get", runs)[0]) == (reads, reads)
        assert call(client, "post", one, {"enabled": False})[0] == writes
        assert (call(client, "post", runs)[0], call(client, "delete", one)[0]) == (writes, writes)
    assert call(outsider, "get")[1]["data"] == []
    found = [viewer.get(f"{PLANS}?{query}").json()["data"] for query in ("q=support&enabled=true", "q=x", "enabled=0")]
    assert [len(each) for each in found] == [1, 0, 0]
    foreign = call(outsider, "post", body=wanted(job))
    assert (foreign[0], foreign[1]["error"]["param"]) == (404, "source_job")

    for missing in ("inference", "adapter.write"):
        narrow = api_client(make_key(organization, alice, scopes=frozenset(SCOPES) - {missing}))
        for path, body in (("", wanted(job, name="other")), (one, {"enabled": True}), (runs, None)):
            status, refused = call(narrow, "post", path, body)
            assert (status, refused["error"]["required_scope"]) == (403, missing)
    assert RetrainingPlan.objects.get().is_enabled and not Retraining.objects.exists()


WRONG: list[tuple[dict[str, Any], int, str]] = [
    ({"schedule": ...}, 400, "schedule"),
    ({"schedule": {"every": "week", "value": 8}}, 400, "schedule.value"),
    ({"schedule": {"every": "month", "value": 29}}, 400, "schedule.value"),
    ({"max_usd": "0"}, 400, "max_usd"),
    ({"max_usd": "many"}, 400, "max_usd"),
    ({"source_job": "ftjob-none"}, 404, "source_job"),
    ({"dataset": "none"}, 404, "dataset"),
    ({"held_out": "support"}, 400, "held_out"),
    ({"held_out": ...}, 400, "held_out"),
    ({"regression": "support-regression"}, 400, "max_loss_points"),
    ({"alias": "staging"}, 404, "alias"),
    (
        {"testing_criteria": [{"type": "pairwise_model", "name": "a", "model": "m", "baseline_model": "m"}]},
        400,
        "testing_criteria",
    ),
]


@pytest.mark.slow
def test_a_wrong_plan_is_refused_with_the_field_that_is_wrong(api_client, job, key) -> None:
    for change, status, param in WRONG:
        refused = call(api_client(key), "post", body=wanted(job, **change))
        assert (refused[0], refused[1]["error"]["param"]) == (status, param), refused[1]
    assert not RetrainingPlan.objects.exists()


@pytest.mark.slow
def test_a_job_that_did_not_succeed_and_rows_that_cannot_be_compared_are_refused(api_client, job, key, floor) -> None:
    other = floor.job(suffix="other")
    unfinished = call(api_client(key), "post", body=wanted(job, source_job=other.pk))
    assert unfinished[1]["error"]["param"] == "source_job" and "succeeded" in unfinished[1]["error"]["message"]

    many = make_training_file(floor.organization, floor.base_model, rows=1_001)
    large = call(api_client(key), "post", body=wanted(job, held_out=many.dataset_id))
    assert large[1]["error"]["param"] == "held_out" and "1,001" in large[1]["error"]["message"]


@pytest.mark.slow
def test_a_plan_is_changed_run_at_once_and_deleted_with_its_history(api_client, job, key, floor, claim) -> None:
    client = api_client(key)
    plan = call(client, "post", body=wanted(job))[1]
    one, runs = f"/{plan['id']}", f"/{plan['id']}/retrainings"

    changed = call(client, "post", one, {"schedule": None, "min_new_rows": 5, "min_gain_points": 2, "max_usd": 10})
    assert changed[0] == 200, changed[1]
    assert (changed[1]["schedule"], changed[1]["next_due_at"], changed[1]["min_new_rows"]) == (None, None, 5)
    assert (changed[1]["max_usd"], changed[1]["acts_as"]) == ("10", key.key.pk)
    without = call(client, "post", one, {"min_new_rows": None})
    assert without[1]["error"]["param"] == "schedule"

    begun = call(client, "post", runs)
    assert (begun[0], begun[1]["status"], begun[1]["trigger"]) == (200, "waiting", "request")
    assert call(client, "post", runs)[1]["error"]["code"] == "invalid_state"
    tick()
    train(floor, claim)
    asked = tick()
    answer(asked.new_run, passed=36)
    answer(asked.production_run, passed=18)
    tick()
    tick()
    history = call(client, "get", runs)[1]["data"]
    assert [(each["status"], each["code"]) for each in history] == [("promoted", "better")]
    found = history[0]["held_out"]
    assert (found["rows"], found["new_passed"], found["production_passed"]) == (40, 36, 18)
    assert 0 < found["low_points"] < found["difference_points"] == 45.0 < found["high_points"]
    assert Alias.objects.get().version.model_name == history[0]["model"]
    assert call(client, "get", one)[1]["eval_id"]

    Alias.objects.all().delete()
    stopped = call(client, "post", one, {"enabled": False})
    assert (stopped[0], stopped[1]["enabled"], stopped[1]["alias"]) == (200, False, None), "it needs nothing else"
    assert call(client, "post", one, {"enabled": True})[1]["error"]["param"] == "alias"

    assert call(client, "delete", one)[1]["deleted"]
    assert not Retraining.objects.exists() and FineTuningJob.objects.count() == 2
    assert call(client, "get", one)[0] == 404
