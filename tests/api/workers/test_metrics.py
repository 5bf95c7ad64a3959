"""The series of /internal/v1/metrics under the role of its process; alerts and dashboards ask for no others."""

import asyncio
import datetime
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from apps.batches import worker
from apps.batches.models import Batch
from apps.billing.books.reconciliation import LAST_CHECK
from apps.billing.models import LedgerCheck, TrafficHour
from apps.billing.usage.traffic import BOUNDS_MS
from apps.config.monitored import Monitored
from apps.core.database.clock import db_now
from apps.core.models import OutboxMessage
from apps.finetuning.models import Run, Worker
from apps.finetuning.pools.capacity.metrics import render_pool_metrics
from apps.finetuning.usage.quotas import set_quota
from apps.interfaces.worker_api import metrics
from apps.interfaces.worker_api.metrics import render_installation_metrics
from apps.serving.metrics import render_metrics
from apps.serving.models import MeteringCheck, Replica
from tests.factories.batches import make_batch, make_line
from tests.factories.finetuning import make_job, make_worker
from tests.factories.serving import make_adapter, make_replica, make_served_model

MONITORING = Path(__file__).resolve().parents[3] / "deploy/monitoring"
_SAMPLE = re.compile(r"^(\w+)(?:{(.*)})? ")
HOUR = datetime.timedelta(hours=1)
_OF_OTHERS = {"kube_pod_container_status_restarts_total"}


def scrape() -> str:
    """Return all series, read as the worker API reads them."""
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SET LOCAL ROLE anneal_internal")
        text = render_installation_metrics() + render_metrics() + render_pool_metrics()
        cursor.execute("RESET ROLE")
    return text


def scrape_web() -> str:
    """Return the series of a process that has answered one request."""

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        assert message["status"] == 200

    monitored = Monitored(application, process="web")
    asyncio.run(monitored({"type": "http", "path": "/", "headers": []}, application, send))
    return monitored.render()


def test_jobs_workers_effects_and_books_are_counted(floor) -> None:
    job = make_job(floor.organization, floor.base_model)
    Worker.objects.update(last_seen_at=None)
    make_worker(job.pool, credential="annw_other")
    make_worker(job.pool, credential="annw_revoked")
    Worker.objects.filter(credential_sha256=make_worker(job.pool, credential="x").credential_sha256).update(
        revoked_at=db_now()
    )
    OutboxMessage.objects.create(topic="x", key="x", lane="mail")
    LedgerCheck.objects.create(name="balances", difference_count=2)

    text = scrape()

    for line in (
        f'anneal_jobs{{status="{job.status}"}} 1', 'anneal_jobs{status="paused"} 0',
        f'anneal_workers{{pool="{job.pool.name}",state="live"}} 2',
        f'anneal_workers{{pool="{job.pool.name}",state="silent"}} 1',
        'anneal_outbox_due{lane="mail"} 1', 'anneal_ledger_differences{check="balances"} 2',
    ):  # fmt: skip
        assert line in text.splitlines(), line


def seconds_of(name: str) -> float:
    [line] = [line for line in scrape().splitlines() if re.match(rf"{name}\W", line)]
    return float(line.split()[1])


def test_a_beat_that_sends_no_task_is_noticed_by_the_age_of_the_newest_check(floor) -> None:
    now = db_now()
    for hours in (5, 3):
        LedgerCheck.objects.create(name=LAST_CHECK, difference_count=0, checked_at=now - hours * HOUR)
    LedgerCheck.objects.create(name="charges that failed", difference_count=1, checked_at=now)

    assert 3 * 3600 <= seconds_of("anneal_ledger_checked_seconds") < 3 * 3600 + 60


def test_batches_that_wait_are_noticed_unless_a_worker_is_at_work(organization, alice) -> None:
    assert seconds_of("anneal_batches_oldest_pending_seconds") == 0
    now = db_now()
    for hours, status in ((2, "in_progress"), (1, "validating"), (9, "failed")):
        batch = make_batch(organization, alice, [make_line("a")])
        Batch.objects.filter(pk=batch.pk).update(status=status, created_at=now - hours * HOUR)

    assert 7200 <= seconds_of("anneal_batches_oldest_pending_seconds") < 7260
    with worker._alone() as is_alone:
        assert is_alone and seconds_of("anneal_batches_oldest_pending_seconds") == 0
    Batch.objects.filter(status="in_progress").update(retry_at=now + HOUR)  # after an error of ours
    assert 3600 <= seconds_of("anneal_batches_oldest_pending_seconds") < 3660


def test_a_replica_says_whether_it_serves_adapters_or_one_whole_model(floor, organization) -> None:
    shared = make_replica(floor.base_model, "unix:///shared")
    alone = make_replica(floor.base_model, "unix:///alone")
    Replica.objects.filter(pk=alone.pk).update(whole_model=make_adapter(organization, floor.base_model))

    text = scrape()

    for replica, serves in ((shared, "adapters"), (alone, "whole_model")):
        labels = f'replica="{replica.pk}",base_model="{floor.base_model.name}",serves="{serves}"'
        assert f"anneal_replica_ready{{{labels}}} " in text


def test_runs_that_may_not_start_page_and_scale_for_nothing(floor, claim) -> None:
    Worker.objects.filter(pk=floor.worker.pk).update(gpus=floor.worker.gpus[:1])
    for _ in range(4):
        make_job(floor.organization, floor.base_model)
    claim()
    set_quota(organization=floor.organization, by="user_test", now=db_now(), concurrent_gpus=3)
    Run.objects.filter(status="queued").update(created_at=db_now() - 2 * HOUR)

    def figures() -> dict[str, float]:
        names = ("queued_runs", "startable_runs", "needed_machines", "oldest_startable_wait_seconds")
        return {name: seconds_of(f"anneal_pool_{name}") for name in names}

    found = figures()
    assert found == {
        "queued_runs": 3, "startable_runs": 3, "needed_machines": 3,
        "oldest_startable_wait_seconds": pytest.approx(7200, abs=60),
    }  # fmt: skip
    set_quota(organization=floor.organization, by="user_test", now=db_now(), concurrent_gpus=1)
    assert figures() == {
        "queued_runs": 3, "startable_runs": 0, "needed_machines": 1, "oldest_startable_wait_seconds": 0,
    }  # fmt: skip


def test_a_scrape_makes_as_many_statements_however_many_runs_wait(floor) -> None:
    set_quota(organization=floor.organization, by="user_test", now=db_now(), concurrent_gpus=None)

    def statements() -> int:
        make_job(floor.organization, floor.base_model)
        with CaptureQueriesContext(connection) as captured:
            render_pool_metrics()
        return len(captured)

    assert [statements() for _ in range(3)] == [statements()] * 3


def test_attempts_count_for_an_hour_after_their_end(floor, claim) -> None:
    make_job(floor.organization, floor.base_model)
    claim()
    lost = {"status": "lost", "finished_at": db_now(), "lease_id": None, "lease_token_sha256": None}
    Run.objects.update(**lost, lease_expires_at=None)

    assert 'anneal_runs_ended_last_hour{status="lost"} 1' in scrape()


def test_requests_of_this_hour_count_by_their_end_and_time_to_the_first_token(floor, monkeypatch) -> None:
    now = db_now()
    monkeypatch.setattr(metrics, "db_now", lambda: now)
    buckets = [0] * (len(BOUNDS_MS) + 1)
    sums = dict.fromkeys(("aborted", "rate_limited", "over_quota", "not_found", "invalid", "cached_input_tokens"), 0)
    times = {"first_token_counts": [*buckets[:10], 2, *buckets[11:]], "latency_counts": buckets}
    for hours, failed in ((0, 1), (1, 5)):
        TrafficHour.objects.create(
            organization=floor.organization, hour_at=now.replace(minute=0, second=0, microsecond=0) - hours * HOUR,
            requests=3, failed=failed, input_tokens=90, output_tokens=7, cost_nano=0, **sums, **times,
        )  # fmt: skip

    lines = scrape().splitlines()

    assert 'anneal_inference_requests_total{end="answered"} 2' in lines
    assert 'anneal_inference_requests_total{end="failed"} 1' in lines
    assert 'anneal_inference_tokens_total{direction="input"} 90' in lines
    assert [f"{BOUNDS_MS[9]} ms", f"{BOUNDS_MS[10]} ms"] == ["79 ms", "100 ms"]
    assert 'anneal_inference_first_token_seconds_bucket{le="0.079"} 0' in lines
    assert 'anneal_inference_first_token_seconds_bucket{le="0.1"} 2' in lines
    assert "anneal_inference_first_token_seconds_count 2" in lines


# --- deploy/monitoring ------------------------------------------------------------------------------------------------


def expressions() -> Iterator[tuple[str, str]]:
    """Yield every expression of an alert or a dashboard, with where it stands."""
    for group in yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]
    for path in sorted((MONITORING / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                yield f"{path.name}: {panel['title']}", target["expr"]


def selected(expression: str) -> Iterator[tuple[str, set[str]]]:
    """Yield each series that an expression selects, with the labels that it matches. Raises ValueError."""
    parsed = promql_parser.parse(re.sub(r"\$\w+", ".*", expression))
    for found in re.finditer(r"(\w+){([^}]*)}|\b(\w+_\w+)\b(?!\()", parsed.prettify()):
        name = found[1] or found[3]
        if name.startswith(("anneal_", "kube_")):
            yield name, set(re.findall(r"(\w+)(?:=~|!~|!=|=)", found[2] or ""))


@pytest.fixture
def series(floor, organization) -> dict[str, set[str]]:
    """Return each series that a working installation has, with its labels."""
    version = make_adapter(organization, make_served_model("small", "unix:///old", is_priced=False))
    make_job(floor.organization, floor.base_model)
    replica = version.adapter.base_model.replicas.get()
    counted = dict.fromkeys(("counted_input_tokens", "counted_output_tokens", "request_count"), 1)
    metered = dict.fromkeys(("least_input_tokens", "most_input_tokens", "least_output_tokens", "most_output_tokens"), 1)
    MeteringCheck.objects.create(
        replica=replica, day="2026-11-03", **counted, **metered, difference_share=0, is_within=True, checked_at=db_now()
    )
    LedgerCheck.objects.create(name=LAST_CHECK, difference_count=0)
    matches = (_SAMPLE.match(line) for line in [*scrape().splitlines(), *scrape_web().splitlines()])
    return {found[1]: set(re.findall(r'(\w+)="', found[2] or "")) for found in matches if found}


def test_alerts_and_dashboards_ask_for_series_that_exist(series: dict[str, set[str]]) -> None:
    asked = [(place, *each) for place, expression in expressions() for each in selected(expression)]

    wrong = [
        one for one in asked if one[1] not in _OF_OTHERS and not one[2] <= series.get(one[1], {"missing"} - one[2])
    ]
    assert [one for one in asked if one[1] not in series and one[1] not in _OF_OTHERS] == []
    assert wrong == [] and len(asked) > 50


@pytest.mark.slow
def test_every_alert_says_what_is_wrong_and_where_to_look() -> None:
    groups = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]

    assert len({rule["alert"] for rule in rules}) == len(rules) > 12
    for rule in rules:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}


@pytest.mark.slow
def test_dashboards_are_found_by_their_own_address_and_choose_their_data_source() -> None:
    boards = [json.loads(path.read_text()) for path in (MONITORING / "dashboards").glob("*.json")]

    assert len({board["uid"] for board in boards}) == len(boards) == 3
    for board in boards:
        assert board["templating"]["list"][0]["type"] == "datasource"
        panels = board["panels"]
        assert {panel["datasource"]["uid"] for panel in panels} == {"${datasource}"}
        places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
        assert len({panel["id"] for panel in panels}) == len(set(places)) == len(panels)
